"""RMSNorm and rotary embeddings."""

from __future__ import annotations

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from deepinfer_jax.config import TextConfig
from deepinfer_jax.ops.invariant import alone, fence, inverse_sqrt, sum_channels


def rms_norm(x: jax.Array, w: jax.Array, eps: float, invariant: bool = False) -> jax.Array:
    """w * (x * rsqrt(mean(x^2) + eps)) over the last axis; float32 inside, one cast to x's dtype."""
    v = x.astype(jnp.float32)
    v = v * inverse_rms(v, eps, invariant)[..., None]
    out = (_like(w.astype(jnp.float32), v) * v).astype(x.dtype)
    return fence(out) if invariant else out


def inverse_rms(v: jax.Array, eps: float, invariant: bool) -> jax.Array:
    """float32[...]: 1 / sqrt(mean(v^2) + eps) over the last axis of float32 v."""
    if not invariant:
        return lax.rsqrt(jnp.mean(jnp.square(v), axis=-1) + eps)
    mean = fence(sum_channels(jnp.square(v)) / np.float32(v.shape[-1]))
    return fence(inverse_sqrt(mean + eps))


@functools.lru_cache(maxsize=64)
def rope_frequencies(text: TextConfig, kind: Literal["plain", "yarn"]) -> np.ndarray:
    """float32[qk_rope_head_dim / 2] angles per position.

    `plain` (window-only layers): theta^(-2i/d). `yarn`: the same from `compress_rope_theta`, divided by the
    factor where a channel turns fewer than `beta_slow` times in the original context, blended up to
    `beta_fast`. No attention scaling. Source: DeepSeek-V4.1 `inference/model.py`.
    """
    d = text.qk_rope_head_dim
    theta = text.rope_theta if kind == "plain" else text.compress_rope_theta
    # The reference takes a float32 power. A float64 one rounded to float32 gives its bits; numpy's float32
    # power does not, and an angle at position 10^5 shows the difference.
    exponent = np.arange(0, d, 2, dtype=np.float32) / np.float32(d)
    f = np.float32(1) / np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    if kind == "plain":
        return f
    yarn = text.rope_scaling

    def channel(turns: float) -> float:
        context = yarn.original_max_position_embeddings
        return d * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn.beta_fast)), 0)
    high = min(math.ceil(channel(yarn.beta_slow)), d - 1)
    steps = (np.arange(d // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-3))
    ramp = np.clip(steps, 0, 1).astype(np.float32)
    return f / np.float32(yarn.factor) * ramp + f * (1 - ramp)


def rope_table(positions: jax.Array, text: TextConfig, kind: Literal["plain", "yarn"]) -> tuple[jax.Array, jax.Array]:
    """(cos, sin) float32[..., d / 2] for integer positions."""
    angle = positions.astype(jnp.float32)[..., None] * _like(jnp.asarray(rope_frequencies(text, kind)), positions, 1)
    return alone(jnp.cos, angle), alone(jnp.sin, angle)


def rope(x: jax.Array, table: tuple[jax.Array, jax.Array], *, inverse: bool = False) -> jax.Array:
    """Rotate adjacent pairs of the last channels of x, as complex numbers in float32.

    Args:
        x: [..., D] or [..., H, D]; the table's axes are the leading ones.
        table: (cos, sin) from `rope_table`.
        inverse: Rotate back (attention outputs).
    """
    cos, sin = table
    if x.ndim == cos.ndim + 1:
        cos, sin = cos[..., None, :], sin[..., None, :]
    sin = -sin if inverse else sin
    d = 2 * cos.shape[-1]
    pair = x[..., x.shape[-1] - d :].astype(jnp.float32).reshape(*x.shape[:-1], d // 2, 2)
    real, imag = pair[..., 0], pair[..., 1]
    # The barrier keeps the compiler from contracting product and sum into one rounding: a rotated value that
    # stands at the edge of an FP4 or FP8 bin would fall into another one than the reference's.
    rc, ms, rs, mc = lax.optimization_barrier((real * cos, imag * sin, real * sin, imag * cos))
    turned = jnp.stack([rc - ms, rs + mc], axis=-1)
    return jnp.concatenate([x[..., : x.shape[-1] - d], turned.reshape(*x.shape[:-1], d).astype(x.dtype)], axis=-1)


def _like(v: jax.Array, x: jax.Array, extra: int = 0) -> jax.Array:
    """v[n] with leading axes of size 1, as many as x has (implicit rank promotion is an error in our tests)."""
    return v.reshape((1,) * (x.ndim + extra - 1) + v.shape)
