"""gate and swiglu: one test body for every backend that is there."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deepinfer_jax.formats import fp8_round_trip
from deepinfer_jax.kernels import Kernels
from deepinfer_jax.numerics import Numerics
from deepinfer_jax.ops.moe import choose_experts, expert_activation
from tests.ops.backends import custom_backends

ULPS = 4 * 2.0**-23
"""exp and log of the kernels, within two units of the last place each."""


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def routed(logits, bias, top_k, backend):
    return choose_experts(jnp.asarray(logits), jnp.asarray(bias), top_k=top_k, scale=2.5, backend=backend)


@pytest.mark.parametrize("backend", custom_backends("gate"))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 384, 6), (70, 384, 6), (5, 16, 2), (3, 8, 1), (9, 100, 32), (0, 16, 2)]
)
@pytest.mark.parametrize("own_bias", [False, True])
def test_experts_and_weights_are_those_of_the_reference(backend, tokens, experts, top_k, own_bias):
    logits = 4 * normal(tokens, experts)
    bias = normal(tokens if own_bias else 1, experts, seed=1)
    expected, found = (routed(logits, bias, top_k, b) for b in ("reference", backend))
    score = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
    ranked = np.sort(score + bias, axis=-1)[:, ::-1]
    # Two scores may change places only where they are closer than their last bits.
    clear = ranked[:, top_k - 1] - ranked[:, top_k] > 1e-5 if top_k < experts else np.ones(tokens, bool)
    assert clear.sum() >= 0.9 * tokens
    np.testing.assert_array_equal(np.asarray(found.experts)[clear], np.asarray(expected.experts)[clear])
    np.testing.assert_allclose(np.asarray(found.weights)[clear], np.asarray(expected.weights)[clear], rtol=8 * ULPS)
    assert np.all(np.diff(found.experts, axis=1) > 0)


@pytest.mark.parametrize("backend", custom_backends("gate"))
def test_ties_go_to_the_lower_expert(backend):
    logits = np.zeros((2, 40), np.float32)
    logits[1, [7, 39]] = 1
    for b in ("reference", backend):
        found = routed(logits, np.zeros((1, 40), np.float32), 3, b)
        np.testing.assert_array_equal(found.experts, [[0, 1, 2], [0, 7, 39]])


@pytest.mark.parametrize("backend", custom_backends("gate"))
def test_logits_of_any_size_give_finite_weights(backend):
    logits = np.array([[-300, -80, 0, 80, 300, 3e38, -3e38, 1e-30]], np.float32)
    expected, found = (routed(logits, np.zeros((1, 8), np.float32), 8, b) for b in ("reference", backend))
    assert np.isfinite(found.weights).all()
    np.testing.assert_allclose(found.weights, expected.weights, rtol=1e-5, atol=1e-18)


@pytest.mark.parametrize("backend", custom_backends("gate"))
def test_too_many_experts_are_refused(backend):
    with pytest.raises(NotImplementedError, match=r"experts: found 600.*top_k: found 40"):
        routed(normal(1, 600), np.zeros((1, 600), np.float32), 40, backend)


@pytest.mark.parametrize("backend", custom_backends("swiglu"))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 2304), (37, 2304), (5, 96), (3, 256), (0, 64)])
def test_activations_are_those_of_the_reference_through_fp8(backend, dtype, rows, width):
    released = Numerics.named("released")
    custom = dataclasses.replace(released, kernels=Kernels(swiglu=backend))
    gate_up = jnp.asarray(6 * normal(rows, 2 * width), dtype)
    weight = jnp.asarray(np.random.default_rng(2).uniform(0, 1, rows), jnp.float32)
    for w in (None, weight):
        expected = np.asarray(fp8_round_trip(expert_activation(gate_up, w, 10.0, released)), np.float32)
        found = np.asarray(expert_activation(gate_up, w, 10.0, custom), np.float32)
        # Another last bit moves a value over the edge of a rounding seldom, and then by one step of its group.
        assert rows == 0 or np.mean(found != expected) < 2e-3
        largest = np.abs(expected).reshape(rows, width // 32, 32).max(-1, initial=0).repeat(32, -1)
        assert np.all(np.abs(found - expected) <= largest / 8)
        # What has been through FP8 stays as it is.
        np.testing.assert_array_equal(fp8_round_trip(jnp.asarray(found)), found)


@pytest.mark.parametrize("backend", custom_backends("swiglu"))
def test_a_row_has_the_same_bits_among_any_others(backend):
    custom = dataclasses.replace(Numerics.named("released"), kernels=Kernels(swiglu=backend))
    gate_up = jnp.asarray(normal(40, 512), jnp.bfloat16)
    whole = np.asarray(expert_activation(gate_up, None, 7.0, custom), np.float32)
    for rows in (1, 7, 33):
        np.testing.assert_array_equal(
            np.asarray(expert_activation(gate_up[:rows], None, 7.0, custom), np.float32), whole[:rows]
        )


@pytest.mark.parametrize("backend", custom_backends("swiglu"))
def test_numerics_without_fp8_inputs_are_refused(backend):
    custom = dataclasses.replace(Numerics.named("fp32"), kernels=Kernels(swiglu=backend))
    with pytest.raises(NotImplementedError, match=r"numerics: .*width: found 20"):
        expert_activation(jax.ShapeDtypeStruct((2, 40), jnp.float32), None, 0.0, custom)
