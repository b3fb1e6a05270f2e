"""Eight virtual devices compute what one computes, and move tokens only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import deepinfer_jax as dj
from deepinfer_jax import SamplingParams
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.generate import Setup, programs
from deepinfer_jax.model.v41 import abstract_params
from deepinfer_jax.parallel.mesh import AXES, Layout, make_mesh, param_shardings, param_specs
from tests.helpers import results_of

ROWS, LENGTH = 8, 24
MESHES = [(1, 8), (2, 4), (8, 1)]


@pytest.fixture(scope="module")
def batch():
    """Rows of different lengths, one of padding alone."""
    rng = np.random.default_rng(4)
    lengths = np.array([24, 1, 7, 0, 13, 24, 2, 20])
    positions = np.where(np.arange(LENGTH)[None] < lengths[:, None], np.arange(LENGTH)[None], -1)
    return rng.integers(2, 126, (ROWS, LENGTH)).astype(np.int32), positions.astype(np.int32)


@pytest.fixture(scope="module")
def alone(tiny, batch):
    """Logits of one device."""
    tokens, positions = batch
    cache = dj.init_cache(tiny.config, tiny.numerics, ROWS, 256)
    whole = dj.Batch(jnp.asarray(tokens), jnp.asarray(positions), jnp.arange(ROWS))
    call = jax.jit(dj.forward, static_argnames=("config", "numerics"))
    out, _ = call(tiny.params, tiny.config, whole, cache, numerics=tiny.numerics)
    return np.where((positions >= 0)[..., None], out.logits, 0)


def on_mesh(tiny, layout, batch):
    """(logits, compiled text) of the same batch over a mesh."""
    tokens, positions = batch
    local = ROWS // layout.shards
    params = jax.device_put(tiny.params, param_shardings(tiny.params, layout.mesh))

    def share(params, tokens, positions):
        cache = dj.init_cache(tiny.config, tiny.numerics, local, 256)
        rows = dj.Batch(tokens, positions, jnp.arange(local))
        out, _ = dj.forward(params, tiny.config, rows, cache, numerics=tiny.numerics, exchange=layout.exchange)
        return out.logits

    specs = (param_specs(params, layout.mesh.size), layout.rows, layout.rows)
    call = jax.jit(layout.spmd(share, specs, layout.rows))
    logits = call(params, *layout.put_rows((tokens, positions)))
    return np.where((positions >= 0)[..., None], logits, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "expert"), MESHES)
def test_every_mesh_gives_the_logits_of_one_device(tiny, batch, alone, data, expert):
    """Slots split over `data` and repeated along `expert`."""
    got = on_mesh(tiny, Layout(make_mesh(data, expert), ("data",)), batch)
    np.testing.assert_allclose(got, alone, atol=1e-5)


@pytest.mark.slow
def test_slots_that_are_split_over_both_axes_give_the_same(tiny, batch, alone):
    layout = Layout.of(make_mesh(2, 4), ROWS)
    assert layout.slot_axes == AXES
    got = on_mesh(tiny, layout, batch)
    np.testing.assert_allclose(got, alone, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "expert", "slots"), [(2, 4, 8), (2, 4, 2)])
def test_the_compiled_loop_gathers_no_weights_and_no_caches(tiny, data, expert, slots):
    layout = Layout.of(make_mesh(data, expert), slots)
    made = programs(Setup(tiny.config, tiny.numerics, layout))
    params = jax.device_put(tiny.params, param_shardings(tiny.params, layout.mesh))
    state = made.init(slots, 256)
    text = made.decode.lower(params, state, steps=4, context=256, top_logprobs=None).compile().as_text()
    t = tiny.config.text_config
    # Of every token its input, its experts with their weights, and its Engram rows: nothing else is gathered.
    tokens = {(slots, n) for n in (t.hidden_size, t.num_experts_per_tok, t.engram_columns)}
    assert results_of(text, "all-gather").keys() <= tokens
    assert results_of(text, "all-gather")[slots, t.hidden_size] == len(tiny.config.layers)
    for operation in ("all-to-all", "collective-permute", "ragged-all-to-all"):
        assert not results_of(text, operation)
    # The control: a leaf that is laid out for one device and used on all has to be gathered.
    whole = jax.jit(lambda p: p * 1.0, out_shardings=jax.sharding.NamedSharding(layout.mesh, P()))
    w13 = params["layers"][0]["ffn"]["w13"]
    assert w13.shape in results_of(whole.lower(w13).compile().as_text(), "all-gather")


@pytest.mark.slow
def test_generation_over_a_mesh_gives_the_tokens_of_one_device(tiny, ragged):
    """Several samples of a prompt, so that slots are copied on their device."""
    prompts = [p[:16] for p in ragged[:9]]
    each = [SamplingParams(max_tokens=6, temperature=float(i % 2), n=1 + i % 3) for i in range(9)]
    options = {"numerics": tiny.numerics, "max_length": 256, "steps": 4, "chunk": 64, "progress": False}
    several = dj.LLM.of(tiny.config, tiny.params, mesh=make_mesh(2, 4), **options).generate(prompts, each)
    for a, b in zip(several, tiny.generate(prompts, each), strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


def test_a_checkpoint_is_read_straight_into_its_shards(data_dir):
    llm = dj.LLM(data_dir / "v41_tiny", data=2, expert=4, expand="none", progress=False)
    w13, table = llm.params["layers"][0]["ffn"]["w13"], llm.params["layers"][0]["engram"]["embed"]
    assert isinstance(w13, QuantizedTensor)
    assert w13.record.sharding.shard_shape(w13.record.shape)[0] == 1
    assert table.record.sharding.shard_shape(table.record.shape)[0] == table.record.shape[0] // 8
    assert llm.params["embed"].sharding.is_fully_replicated
    # Four experts of a draft stage do not divide over eight devices: each holds all.
    assert llm.params["mtp"]["stages"][0]["ffn"]["w13"].record.sharding.is_fully_replicated


def test_slots_are_split_over_all_devices_where_they_can():
    mesh = make_mesh(2, 4)
    assert Layout.of(mesh, 16).slot_axes == AXES
    assert (Layout.of(mesh, 2).slot_axes, Layout.of(mesh, 2).shards) == (("data",), 2)
    assert Layout.of(make_mesh(1, 8), 3).shards == 1


def test_what_a_mesh_cannot_do_is_said():
    with pytest.raises(dj.DeepInferError, match="data 4 x expert 4 needs 16 devices, JAX has 8"):
        make_mesh(4, 4)
    with pytest.raises(dj.DeepInferError, match="found data 0 x expert 1"):
        make_mesh(0, 1)
    with pytest.raises(dj.DeepInferError, match="3 slots do not divide over data 2"):
        Layout.of(make_mesh(2, 1), 3)


def test_experts_that_do_not_divide_are_an_error(data_dir):
    with pytest.raises(dj.DeepInferError, match="weights that do not divide over 3 devices") as error:
        dj.LLM(data_dir / "v41_tiny", expert=3, progress=False)
    assert "layers.0.engram.embed: 704 table rows" in error.value.faults
    assert "layers.5.ffn.w13: 8 experts" in error.value.faults


def test_the_released_model_divides_over_eight_devices():
    specs = param_specs(abstract_params(dj.ModelConfig.named("deepseek_v41_flash")), 8)
    split = [s for s in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P)) if s == P(AXES)]
    # Two matrices of every layer and draft stage, and the two Engram tables.
    config = dj.ModelConfig.named("deepseek_v41_flash")
    assert len(split) == 2 * (len(config.layers) + len(config.draft_stages)) + 2
