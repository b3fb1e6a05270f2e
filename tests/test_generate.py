"""The transitions of a generation are pure, take their state donated, and copy no cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.engine.requests import check_requests
from deepinfer_jax.engine.schedule import Schedule
from deepinfer_jax.engine.sizes import Sizes
from deepinfer_jax.generate import Setup, decode, prefill, programs
from deepinfer_jax.model.step import Batch
from deepinfer_jax.parallel.mesh import Layout
from tests.helpers import results_of

pytestmark = pytest.mark.optimized


@pytest.fixture(scope="module")
def setup(tiny):
    return Setup(tiny.config, tiny.numerics, Layout.of(tiny.mesh, 8))


def running(setup, params, slots=8):
    """A state in which every slot is generating."""
    made, sizes = programs(setup), Sizes(slots, 256, steps=4, chunk=64)
    config = setup.config
    prompts = [[5 + i, 9, 11] for i in range(slots)]
    each = [dj.SamplingParams(max_tokens=20, temperature=float(i % 2)) for i in range(slots)]
    requests = check_requests(prompts, each, config, 256)
    schedule = Schedule(made, params, requests, sizes)
    return made, schedule._fill(made.init(slots, 256))


def cache_shapes(state):
    """Shapes of what is as large as a cache."""
    return {leaf.shape for leaf in jax.tree.leaves(state.cache) if leaf.ndim >= 3}


def test_the_jaxprs_have_no_effects(setup, tiny):
    state = jax.eval_shape(lambda: programs(setup).init(8, 256))
    empty = jnp.zeros((2, 16), jnp.int32)
    batch = Batch(empty, empty, jnp.arange(2))
    for f in (
        lambda p, s: decode(p, setup, s, steps=4, context=256, top_logprobs=3),
        lambda p, s: prefill(p, setup, s, batch, context=256),
        lambda p, s: programs(setup).decode(p, s, steps=4, context=256, top_logprobs=None),
    ):
        assert not jax.make_jaxpr(f)(tiny.params, state).effects


def test_the_same_state_twice_gives_the_same_bits(setup, tiny):
    made, state = running(setup, tiny.params)
    kept = jax.tree.map(np.array, state)
    runs = []
    for _ in range(2):
        again = jax.tree.map(jnp.asarray, kept)
        runs.append(made.decode(tiny.params, again, steps=4, context=256, top_logprobs=0))
    for one, two in zip(*map(jax.tree.leaves, runs), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(two).tobytes()
    assert (np.asarray(runs[0][1].ids) >= 0).all()


def test_the_state_is_donated(setup, tiny):
    made, state = running(setup, tiny.params)
    made.decode(tiny.params, state, steps=4, context=256, top_logprobs=None)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache))


def decode_text(made, state, params, **jit):
    """The compiled decode loop."""
    call = jax.jit(made._decode, static_argnames=("steps", "context", "top_logprobs"), **jit)
    return call.lower(params, state, steps=4, context=256, top_logprobs=None).compile().as_text()


@pytest.mark.parametrize(("numerics", "slots"), [("fp32", 8), ("released", 1)])
def test_the_decode_loop_holds_no_copy_of_the_cache(tiny, numerics, slots):
    setup = Setup(tiny.config, dj.Numerics.named(numerics), Layout.of(tiny.mesh, slots))
    made = programs(setup)
    state = made.init(slots, 256)
    text = decode_text(made, state, tiny.params, donate_argnums=1)
    assert not cache_shapes(state) & results_of(text, "copy").keys()
    if slots == 8:
        # The control: without donation the loop has to start from copies.
        assert cache_shapes(state) <= results_of(decode_text(made, state, tiny.params), "copy").keys()


def test_a_slot_that_is_off_stays_as_it_is(setup, tiny):
    made, state = running(setup, tiny.params)
    off = jnp.arange(8) == 3
    state = made.switch(state, ~off & off, off)
    before = np.asarray(state.cache.lengths)
    state, tokens = made.decode(tiny.params, state, steps=4, context=256, top_logprobs=None)
    moved = np.asarray(state.cache.lengths) - before
    assert (np.asarray(tokens.ids)[:, 3] == -1).all()
    assert moved.tolist() == [4, 4, 4, 0, 4, 4, 4, 4]


def test_a_context_limit_changes_nothing_but_the_work(tiny):
    """Compressed entries beyond the limit do not exist, so leaving them out gives the same logits."""
    config, numerics = tiny.config, tiny.numerics
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 120, (2, 50)), jnp.int32)
    batch = Batch(tokens, jnp.tile(jnp.arange(50)[None], (2, 1)), jnp.arange(2))
    cache = dj.init_cache(config, numerics, 2, 256)
    call = jax.jit(dj.forward, static_argnames=("config", "numerics", "context"))
    whole, _ = call(tiny.params, config, batch, cache, numerics=numerics)
    short, _ = call(tiny.params, config, batch, cache, numerics=numerics, context=64)
    np.testing.assert_allclose(short.logits, whole.logits, atol=1e-5)
