"""Linears on packed weights: one test body for every backend that is there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.formats import quantize_weight
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.linear import grouped_output_linear, quantized_linear
from deepinfer_jax.ops.moe import Routing, routed_experts
from deepinfer_jax.ops.packed_linear import grouped_packed_linear, packed_linear
from tests.ops.backends import custom_backends

BACKENDS = custom_backends("linear")
FP32 = Numerics.named("fp32")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def bound(x, w):
    """float32 sums of k products, whatever their order: k roundings of the sum of magnitudes."""
    k = x.shape[-1]
    return k * 2.0**-24 * (np.abs(np.float64(x)) @ np.abs(np.float64(w)).T) + 1e-30


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", ["fp4", "fp8_block"])
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 32, 1), (1, 256, 70), (3, 96, 33), (64, 2304, 128), (0, 64, 8)])
def test_products_are_those_of_the_decoded_weight(backend, fmt, rows, k, n):
    # Magnitudes from 2^-8 to 2^8, so that scales differ.
    w = quantize_weight(
        jnp.asarray(normal(n, k, seed=1) * np.exp2(np.random.default_rng(2).integers(-8, 9, (n, 1)))), fmt
    )
    x = normal(rows, k)
    found = np.asarray(packed_linear(jnp.asarray(x), w, backend))
    decoded = np.asarray(w.decode(jnp.float32))
    assert np.all(np.abs(found - np.asarray(x, np.float64) @ np.asarray(decoded, np.float64).T) <= bound(x, decoded))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", ["fp4", "fp8_block"])
def test_every_code_is_decoded_exactly(backend, fmt):
    """A product with a row of the identity is the weight itself."""
    w = quantize_weight(jnp.asarray(normal(96, 64, seed=3)), fmt)
    codes = np.arange(96 * (32 if fmt == "fp4" else 64)) % 256
    if fmt == "fp8_block":
        codes = np.where(codes % 128 == 127, 0, codes)  # NaN is no weight
    record = np.concatenate([codes.astype(np.uint8), np.asarray(w.record)[len(codes) :]])
    w = dataclasses.replace(w, record=jnp.asarray(record))
    found = packed_linear(jnp.eye(64), w, backend)
    np.testing.assert_array_equal(found.T, w.decode(jnp.float32))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_has_the_same_bits_among_any_others(backend):
    w = quantize_weight(jnp.asarray(normal(4, 160, 512, seed=4)), "fp4")
    x = jnp.asarray(normal(40, 512))
    whole = np.asarray(packed_linear(x, w[2], backend))
    for rows in (1, 2, 7, 33):
        np.testing.assert_array_equal(packed_linear(x[:rows], w[2], backend), whole[:rows])
    grouped = grouped_packed_linear(
        x.reshape(5, 8, 512), w, jnp.asarray([2, 0, -1, 2, 1]), jnp.asarray([8, 3, 8, 2, 0]), backend
    )
    np.testing.assert_array_equal(grouped[0], whole[:8])
    np.testing.assert_array_equal(grouped[3, :2], whole[24:26])
    assert not np.any(grouped[2]) and not np.any(grouped[3, 2:]) and not np.any(grouped[4])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tag", ["fp32", "released"])
def test_experts_are_those_of_the_reference(backend, tag):
    numerics = Numerics.named(tag)
    custom = dataclasses.replace(numerics, kernels=Kernels(linear=backend))
    random = np.random.default_rng(5)
    w13 = quantize_weight(jnp.asarray(normal(6, 128, 64, seed=6) / 8), "fp4")
    w2 = quantize_weight(jnp.asarray(normal(6, 64, 64, seed=7) / 8), "fp4")
    x = jnp.asarray(normal(37, 64), numerics.dtype)
    # Expert 5 has no row.
    experts = np.sort(np.stack([random.permutation(5)[:2] for _ in range(37)]), axis=1)
    routing = Routing(jnp.asarray(experts, jnp.int32), jnp.asarray(random.uniform(0.1, 1, (37, 2)), jnp.float32))
    valid = jnp.asarray(random.random(37) < 0.8)
    expected = np.asarray(routed_experts(x, routing, valid, w13, w2, 6, 7.0, numerics))
    found = np.asarray(routed_experts(x, routing, valid, w13, w2, 6, 7.0, custom))
    assert not np.any(found[~np.asarray(valid)])
    # Roundings of inputs to FP8 turn a last bit of the first product into a step of 1/16 of one input of the second.
    np.testing.assert_allclose(found, expected, atol=1e-5 if tag == "fp32" else 0.03)
    assert np.mean(np.abs(found - expected)) < (1e-6 if tag == "fp32" else 1e-3)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_projection_uses_each_groups_own_rows(backend):
    w = quantize_weight(jnp.asarray(normal(4 * 32, 64, seed=8)), "fp8_block")
    x = jnp.asarray(normal(2, 5, 4 * 64))
    custom = dataclasses.replace(FP32, kernels=Kernels(linear=backend))
    found, expected = grouped_output_linear(x, w, 4, custom), grouped_output_linear(x, w, 4, FP32)
    np.testing.assert_allclose(found, expected, atol=2e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expanded_weight_is_refused(backend):
    custom = dataclasses.replace(FP32, kernels=Kernels(linear=backend))
    with pytest.raises(NotImplementedError, match=r"weight: found an expanded.*columns: found 40"):
        quantized_linear(jnp.zeros((1, 40)), jnp.zeros((8, 40)), custom)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_with_a_wrong_matrix_is_an_error(backend):
    w = quantize_weight(jnp.asarray(normal(2, 32, 32)), "fp4")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a matrix that does not exist"):
        jax.block_until_ready(
            grouped_packed_linear(jnp.zeros((1, 1, 32)), w, jnp.asarray([2]), jnp.asarray([1]), backend)
        )
