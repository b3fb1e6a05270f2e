"""Single-pass manifold-constrained hyper-connections: C residual streams, mixed around each sublayer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.ops.invariant import alone, fence, sum_few
from deepinfer_jax.ops.linear import contract
from deepinfer_jax.ops.norm_rope import inverse_rms


class Mixes(NamedTuple):
    """What one site computes from the streams, float32.

    Attributes:
        pre: [B, S, C] weights with which the *next* sublayer collapses the streams.
        post: [B, S, C] weights with which this sublayer's output enters each stream.
        comb: [B, S, C, C] doubly stochastic mixing, [input stream, output stream].
    """

    pre: jax.Array
    post: jax.Array
    comb: jax.Array


def mixes(
    h_BSCD: jax.Array,
    fn: jax.Array,
    base: jax.Array,
    scale: jax.Array,
    *,
    norm_eps: float,
    eps: float,
    iterations: int,
    invariant: bool = False,
) -> Mixes:
    """The mixes of one site.

    Args:
        h_BSCD: Streams.
        fn: float32[C * (C + 2), C * D]; base: float32[C * (C + 2)]; scale: float32[3] (pre, post, comb).
        norm_eps: Of the RMS that divides the projection (after it, as in the release).
        eps: Added in the Sinkhorn normalisation.
        iterations: Sinkhorn iterations; ends on columns.
    """
    *lead, c, d = h_BSCD.shape
    x = h_BSCD.reshape(*lead, c * d).astype(jnp.float32)
    m = contract(x, fn, invariant) * inverse_rms(x, norm_eps, invariant)[..., None]
    base = base.reshape((1,) * len(lead) + base.shape)
    scaled = m * jnp.repeat(scale, np.array([c, c, c * c]), total_repeat_length=c * (c + 2)).reshape(base.shape)
    m = fence(fence(scaled) + base) if invariant else scaled + base
    gates = m[..., : 2 * c]
    gates = alone(jax.nn.sigmoid, gates) if invariant else jax.nn.sigmoid(gates)
    pre, post = gates[..., :c] + eps, 2 * gates[..., c:]
    comb = sinkhorn(m[..., 2 * c :].reshape(*lead, c, c), eps, iterations, invariant)
    return Mixes(*map(fence, (pre, post, comb))) if invariant else Mixes(pre, post, comb)


def sinkhorn(logits: jax.Array, eps: float, iterations: int, invariant: bool = False) -> jax.Array:
    """exp of logits[..., C, C], rows and columns normalised in turn; the first row pass is a softmax."""

    # A quotient of quotients may be computed as one, with a product below.
    keep = fence if invariant else lambda x: x

    def total(k: jax.Array, axis: int) -> jax.Array:
        return jnp.expand_dims(sum_few(k, axis), axis) if invariant else jnp.sum(k, axis=axis, keepdims=True)

    def rows(k: jax.Array) -> jax.Array:
        return keep(k / keep(total(k, -1) + eps))

    def columns(k: jax.Array) -> jax.Array:
        return keep(k / keep(total(k, -2) + eps))

    # The maximum cancels out, so it needs no gradient. Its own would compare recomputed logits with it for equality,
    # which a compiler may make false everywhere: 0 / 0.
    below = logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    k = alone(jnp.exp, below) if invariant else jnp.exp(below)
    k = columns(keep(k / keep(total(k, -1))) + eps)
    return lax.fori_loop(0, iterations - 1, lambda _, k: columns(rows(k)), k)


def collapse(h_BSCD: jax.Array, pre_BSC: jax.Array, invariant: bool = False) -> jax.Array:
    """Weighted sum of the streams, [B, S, D]: float32 inside, one cast."""
    if invariant:
        return fence(sum_few(fence(pre_BSC[..., None] * h_BSCD.astype(jnp.float32)), -2).astype(h_BSCD.dtype))
    return jnp.sum(pre_BSC[..., None] * h_BSCD.astype(jnp.float32), axis=-2).astype(h_BSCD.dtype)


def expand(y_BSD: jax.Array, h_BSCD: jax.Array, site: Mixes, invariant: bool = False) -> jax.Array:
    """New streams: post_k * y + sum_j comb_jk * h_j, [B, S, C, D]: float32 inside, one cast."""
    if invariant:
        terms = fence(site.comb[..., None] * h_BSCD.astype(jnp.float32)[..., None, :])
        own = fence(site.post[..., None] * y_BSD[..., None, :].astype(jnp.float32))
        return fence((own + sum_few(terms, -3)).astype(y_BSD.dtype))
    mixed = jnp.einsum("...jk,...jd->...kd", site.comb, h_BSCD.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return (site.post[..., None] * y_BSD[..., None, :].astype(jnp.float32) + mixed).astype(y_BSD.dtype)


def stream_mean(h_BSCD: jax.Array, invariant: bool = False) -> jax.Array:
    """Mean of the streams, [B, S, D]: float32 inside, one cast."""
    h = h_BSCD.astype(jnp.float32)
    mean = sum_few(h, -2) / np.float32(h.shape[-2]) if invariant else jnp.mean(h, axis=-2)
    return fence(mean.astype(h_BSCD.dtype)) if invariant else mean.astype(h_BSCD.dtype)
