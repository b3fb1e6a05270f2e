"""The forward pass is a pure function of few leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deepinfer_jax as dj
from deepinfer_jax.checkpoint.table import leaf_shapes
from deepinfer_jax.formats import QuantizedTensor
from deepinfer_jax.model.v41 import abstract_params, define


@pytest.fixture(scope="module")
def tiny(data_dir):
    config, params = dj.load(data_dir / "v41_tiny_noengram", expand="bfloat16", progress=False)
    batch = dj.Batch(jnp.ones((1, 4), jnp.int32), jnp.arange(4)[None], jnp.zeros(1, jnp.int32))
    return config, params, batch, dj.init_cache(config, dj.Numerics(), 1, 64)


def test_the_jaxpr_has_no_effects(tiny):
    config, params, batch, cache = tiny
    jaxpr = jax.make_jaxpr(lambda p, b, c: dj.forward(p, config, b, c))(params, batch, cache)
    assert not jaxpr.effects


def test_the_same_call_twice_gives_the_same_bits_and_leaves_its_arguments_alone(tiny):
    config, params, batch, cache = tiny
    before = [np.array(leaf) for leaf in jax.tree.leaves((params, cache))]
    call = jax.jit(lambda p, b, c: dj.forward(p, config, b, c))
    first, second = call(params, batch, cache), call(params, batch, cache)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    for old, leaf in zip(before, jax.tree.leaves((params, cache)), strict=True):
        np.testing.assert_array_equal(old, leaf)


def test_the_released_model_is_described_without_being_allocated():
    config = dj.ModelConfig.named("deepseek_v41_flash")
    params = abstract_params(config)
    leaves = jax.tree.leaves(params)
    assert len(leaves) <= 600
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    # The files' bytes, small vectors in float32 instead of bfloat16, the token map, and rows of padding.
    assert 510_286_023_000 < size < 510_286_023_000 * 1.0001
    assert hash(define(config)) == hash(define(config))


def test_quantised_weights_hold_the_bytes_of_the_checkpoint(data_dir):
    config, params = dj.load(data_dir / "v41_tiny", expand="none", progress=False)
    described = leaf_shapes(config)
    assert any(isinstance(leaf, QuantizedTensor) for leaf in described.values())
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(config)
    )


def test_logits_can_be_asked_for_the_last_token_only(tiny):
    config, params, _, cache = tiny
    batch = dj.Batch(jnp.asarray([[7, 9, 0, 0]]), jnp.asarray([[0, 1, -1, -1]]), jnp.zeros(1, jnp.int32))
    call = jax.jit(dj.forward, static_argnames=("config", "logits"))
    every, _ = call(params, config, batch, cache)
    last, _ = call(params, config, batch, cache, logits="last")
    none, _ = call(params, config, batch, cache, logits="none")
    np.testing.assert_allclose(last.logits[0], every.logits[0, 1], atol=1e-5)
    assert none.logits is None
