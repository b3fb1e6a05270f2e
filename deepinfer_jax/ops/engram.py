"""Engram: hashed n-gram addresses on the device, and the gated memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from deepinfer_jax.engram_hash import offsets
from deepinfer_jax.ops.invariant import alone, fence, sum_channels
from deepinfer_jax.ops.norm_rope import inverse_rms

Table = tuple[tuple[int, ...], ...]


def addresses(lookback: jax.Array, primes: Table, multipliers: Table, n_heads: int) -> list[jax.Array]:
    """Table rows of each Engram layer.

    The reference multiplies, xors and divides 64-bit integers, which JAX has only in a global mode; here a
    product is two 32-bit words and the remainder is taken digit by digit. `engram_hash.addresses` is the
    64-bit form.

    Args:
        lookback: int32[..., max_ngram]: compressed ids of this token and those before it, the pad's where
            there is none.
        primes, multipliers: Of `engram_hash`.

    Returns:
        Per layer int32[..., columns].
    """
    out = []
    for layer_primes, layer_offsets, layer_m in zip(primes, offsets(primes), multipliers, strict=True):
        high, low = _product(lookback[..., 0], layer_m[0])
        columns = []
        for k in range(1, lookback.shape[-1]):
            next_high, next_low = _product(lookback[..., k], layer_m[k])
            high, low = high ^ next_high, low ^ next_low
            for c in range((k - 1) * n_heads, k * n_heads):
                columns.append(_remainder(high, low, layer_primes[c]).astype(jnp.int32) + layer_offsets[c])
        out.append(jnp.stack(columns, axis=-1))
    return out


def _product(c: jax.Array, m: int) -> tuple[jax.Array, jax.Array]:
    """(high, low) uint32 words of c * m, for c < 2^31 and c * m < 2^63."""
    c = c.astype(jnp.uint32)
    high, low = _wide_product(c, m & 0xFFFFFFFF)
    return high + c * jnp.uint32(m >> 32), low


def _wide_product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    mask = jnp.uint32(0xFFFF)
    a1, a0 = a >> 16, a & mask
    b1, b0 = jnp.uint32(b >> 16), jnp.uint32(b & 0xFFFF)
    p00, p01, p10 = a0 * b0, a0 * b1, a1 * b0
    middle = (p00 >> 16) + (p01 & mask) + (p10 & mask)
    return a1 * b1 + (p01 >> 16) + (p10 >> 16) + (middle >> 16), (p00 & mask) | (middle << 16)


def _remainder(high: jax.Array, low: jax.Array, p: int) -> jax.Array:
    """(high * 2^32 + low) mod p for p < 2^31, by digits that keep remainder * base below 2^32."""
    digit = min(16, 32 - p.bit_length())
    divisor = jnp.uint32(p)
    r = jnp.zeros_like(high)
    for word in (high, low):
        for shift in range(32, 0, -digit):
            bits = min(digit, shift)
            part = (word >> jnp.uint32(shift - bits)) & jnp.uint32((1 << bits) - 1)
            r = ((r << jnp.uint32(bits)) | part) % divisor
    return r


def engram_gate(
    h_BSCD: jax.Array,
    key_BSCD: jax.Array,
    value_BSD: jax.Array,
    qk_CD: jax.Array,
    open_BS: jax.Array,
    norm_eps: float,
    invariant: bool = False,
) -> jax.Array:
    """Streams plus the gated memory, [B, S, C, D]: float32 inside, one cast.

    Args:
        key_BSCD: A key per stream; value_BSD: one value for all.
        qk_CD: float32 q_weight * k_weight.
        open_BS: False closes the gate (image positions).
    """
    h, key = h_BSCD.astype(jnp.float32), key_BSCD.astype(jnp.float32)
    scale = inverse_rms(h, norm_eps, invariant) * inverse_rms(key, norm_eps, invariant)
    terms = h * qk_CD[None, None] * key
    dot = (sum_channels(terms) if invariant else jnp.sum(terms, axis=-1)) * scale * h.shape[-1] ** -0.5
    dot = fence(dot) if invariant else dot
    strength = jnp.sqrt(jnp.maximum(jnp.abs(dot), 1e-6))
    signed = jnp.copysign(strength, dot)
    share = alone(jax.nn.sigmoid, signed) if invariant else jax.nn.sigmoid(signed)
    opened = jnp.where(open_BS[..., None], share, 0)
    memory = opened[..., None] * value_BSD[..., None, :].astype(jnp.float32)
    out = (h + (fence(memory) if invariant else memory)).astype(h_BSCD.dtype)
    return fence(out) if invariant else out
