"""Single-pass manifold-constrained hyper-connections: C residual streams, mixed around each sublayer."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from deepinfer_jax.ops.linear import contract


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
    h_BSCD: jax.Array, fn: jax.Array, base: jax.Array, scale: jax.Array, *, norm_eps: float, eps: float, iterations: int
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
    m = contract(x, fn) * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + norm_eps)
    base = base.reshape((1,) * len(lead) + base.shape)
    pre = jax.nn.sigmoid(m[..., :c] * scale[0] + base[..., :c]) + eps
    post = 2 * jax.nn.sigmoid(m[..., c : 2 * c] * scale[1] + base[..., c : 2 * c])
    logits = (m[..., 2 * c :] * scale[2] + base[..., 2 * c :]).reshape(*lead, c, c)
    return Mixes(pre, post, sinkhorn(logits, eps, iterations))


def sinkhorn(logits: jax.Array, eps: float, iterations: int) -> jax.Array:
    """exp of logits[..., C, C], rows and columns normalised in turn; the first row pass is a softmax."""

    def rows(k: jax.Array) -> jax.Array:
        return k / (jnp.sum(k, axis=-1, keepdims=True) + eps)

    def columns(k: jax.Array) -> jax.Array:
        return k / (jnp.sum(k, axis=-2, keepdims=True) + eps)

    # The maximum cancels out, so it needs no gradient. Its own would compare recomputed logits with it for equality,
    # which a compiler may make false everywhere: 0 / 0.
    k = jnp.exp(logits - lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True)))
    k = columns(k / jnp.sum(k, axis=-1, keepdims=True) + eps)
    return lax.fori_loop(0, iterations - 1, lambda _, k: columns(rows(k)), k)


def collapse(h_BSCD: jax.Array, pre_BSC: jax.Array) -> jax.Array:
    """Weighted sum of the streams, [B, S, D]: float32 inside, one cast."""
    return jnp.sum(pre_BSC[..., None] * h_BSCD.astype(jnp.float32), axis=-2).astype(h_BSCD.dtype)


def expand(y_BSD: jax.Array, h_BSCD: jax.Array, site: Mixes) -> jax.Array:
    """New streams: post_k * y + sum_j comb_jk * h_j, [B, S, C, D]: float32 inside, one cast."""
    mixed = jnp.einsum("...jk,...jd->...kd", site.comb, h_BSCD.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    return (site.post[..., None] * y_BSD[..., None, :].astype(jnp.float32) + mixed).astype(y_BSD.dtype)
