"""Parts can be replaced, intermediates returned, and neither costs anything to those who do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import deepinfer_jax as dj
from deepinfer_jax.model.hyper_connection import HyperConnection
from deepinfer_jax.model.moe import Router
from deepinfer_jax.model.v41 import abstract_params
from deepinfer_jax.ops.moe import Routing

call = jax.jit(dj.forward, static_argnames=("config", "numerics", "taps", "definition"))


@pytest.fixture(scope="module")
def inputs(tiny):
    tokens = jnp.asarray(np.random.default_rng(1).integers(2, 120, (2, 12)), jnp.int32)
    positions = jnp.tile(jnp.arange(12)[None], (2, 1)).at[1, 9:].set(-1)
    return dj.Batch(tokens, positions, jnp.arange(2)), dj.init_cache(tiny.config, tiny.numerics, 2, 64)


def run(llm, inputs, **options):
    return call(llm.params, llm.config, *inputs, numerics=llm.numerics, **options)[0]


def with_layers(params, change):
    """Weights whose layers are changed as the model was."""
    return {**params, "layers": {i: change(layer) for i, layer in params["layers"].items()}}


class FirstExperts(Router):
    """Sends every token to the same experts, and has no use for the vectors that come with it."""

    def __call__(self, x_TD, vectors, image_T, numerics):
        k = self.config.text_config.num_experts_per_tok
        experts = jnp.tile(jnp.arange(k, dtype=jnp.int32)[None], (x_TD.shape[0], 1))
        return Routing(experts, jnp.full(experts.shape, 1 / k))


def first_experts(model):
    for block in model.layers:
        block.ffn.gate = FirstExperts(model.config, block.plan)


class Plain(HyperConnection):
    """One residual stream in all of them."""

    def collapse(self, h_BSCD, pre_BSC, numerics):
        return h_BSCD[:, :, 0]

    def expand(self, y_BSD, h_BSCD, site, numerics):
        return h_BSCD + y_BSD[:, :, None]


class NoAttention(nnx.Module):
    """An attention that adds nothing, with the weights of the one it replaces."""

    def __init__(self, attention):
        self.inner = attention

    def __call__(self, x_BSD, vectors, step, cache, source, selection, run):
        return jnp.zeros_like(x_BSD), cache, selection


def test_a_router_is_replaced_and_the_taps_show_it(tiny, inputs):
    definition = dj.define(tiny.config, first_experts)
    taps = ("layers.*.ffn.experts", "layers.2.ffn.weights")
    plain, forked = run(tiny, inputs, taps=taps), run(tiny, inputs, taps=taps, definition=definition)
    assert sorted(forked.taps) == sorted([f"layers.{i}.ffn.experts" for i in range(6)] + ["layers.2.ffn.weights"])
    for name, value in forked.taps.items():
        assert value.shape == (2, 12, 2)
        if name.endswith("experts"):
            np.testing.assert_array_equal(value, np.broadcast_to([0, 1], value.shape))
    assert not np.array_equal(plain.taps["layers.3.ffn.experts"], forked.taps["layers.3.ffn.experts"])
    assert np.abs(np.asarray(plain.logits - forked.logits)[0]).max() > 1e-3


def test_hyper_connections_are_replaced(tiny, inputs):
    """Engram gives every stream something else, so it is taken out too."""

    def plain_streams(model):
        for block in model.layers:
            block.engram, block.hc = None, Plain(model.config)

    params = with_layers(tiny.params, lambda layer: {k: v for k, v in layer.items() if k != "engram"})
    options = {"taps": ("layers.*.streams",), "definition": dj.define(tiny.config, plain_streams)}
    out = call(params, tiny.config, *inputs, numerics=tiny.numerics, **options)[0]
    for streams in out.taps.values():
        np.testing.assert_allclose(streams, np.broadcast_to(streams[:, :, :1], streams.shape), atol=1e-6)


def test_attention_is_replaced(tiny, inputs):
    """Without attention and Engram's look back, a position sees itself alone."""

    def blind(model):
        for block in model.layers:
            block.engram = None
            block.attn = NoAttention(block.attn)

    params = with_layers(
        tiny.params, lambda layer: {k: {"inner": v} if k == "attn" else v for k, v in layer.items() if k != "engram"}
    )
    definition = dj.define(tiny.config, blind)
    batch, cache = inputs
    one = call(params, tiny.config, batch, cache, numerics=tiny.numerics, definition=definition)[0]
    other = dj.Batch(batch.tokens.at[:, :-1].set(5), batch.positions, batch.slots)
    two = call(params, tiny.config, other, cache, numerics=tiny.numerics, definition=definition)[0]
    np.testing.assert_allclose(one.logits[0, -1], two.logits[0, -1], atol=1e-6)
    assert np.abs(np.asarray(one.logits - two.logits)[0, 3]).max() > 1e-3


def test_a_replaced_part_may_have_weights_of_its_own(tiny):
    class Wider(Router):
        def __init__(self, config, plan):
            super().__init__(config, plan)
            self.extra = nnx.Param(jax.ShapeDtypeStruct((7,), jnp.float32))

    def change(model):
        model.layers[2].ffn.gate = Wider(model.config, model.layers[2].plan)

    described = abstract_params(tiny.config, change)
    assert described["layers"][2]["ffn"]["gate"]["extra"].shape == (7,)
    assert "extra" not in described["layers"][1]["ffn"]["gate"]


def test_generation_takes_a_fork(tiny):
    definition = dj.define(tiny.config, first_experts)
    llm = dj.LLM.of(
        tiny.config,
        tiny.params,
        numerics="fp32",
        max_length=256,
        steps=4,
        chunk=64,
        definition=definition,
        progress=False,
    )
    params = dj.SamplingParams(temperature=0, max_tokens=6)
    prompts = [[5, 6, 7], [8, 9], [44]]
    forked, plain = llm.generate(prompts, params), tiny.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in forked] != [o.outputs[0].token_ids for o in plain]


def test_every_tap_has_the_shape_that_the_guide_says(tiny, inputs):
    out = run(tiny, inputs, taps=("*",))
    t = tiny.config.text_config
    shapes = {
        "embed": (2, 12, t.hidden_size),
        "layers.0.engram.rows": (2, 12, t.engram_columns),
        "layers.1.attn.entries": (2, 12, t.index_topk),
        "layers.1.attn.out": (2, 12, t.hidden_size),
        "layers.1.ffn.experts": (2, 12, t.num_experts_per_tok),
        "layers.1.ffn.weights": (2, 12, t.num_experts_per_tok),
        "layers.1.ffn.out": (2, 12, t.hidden_size),
        "layers.1.streams": (2, 12, t.hc_mult, t.hidden_size),
        "hidden": (2, 12, t.hidden_size),
    }
    assert {name: out.taps[name].shape for name in shapes} == shapes
    np.testing.assert_array_equal(out.taps["embed"][0], tiny.params["embed"][inputs[0].tokens[0]])


def test_taps_cost_nothing_when_absent(tiny, inputs):
    def trace(**options):
        return str(jax.make_jaxpr(lambda p: dj.forward(p, tiny.config, *inputs, numerics=tiny.numerics, **options))(
            tiny.params
        ))  # fmt: skip

    assert trace() == trace(taps=())
    # The control: a tap is one more output.
    assert trace() != trace(taps=("hidden",))


def test_a_tap_that_matches_nothing_is_named(tiny, inputs):
    with pytest.raises(dj.DeepInferError, match=r"nothing is called 'layers\.9\.\*'; the intermediates are embed, "):
        run(tiny, inputs, taps=("embed", "layers.9.*"))
