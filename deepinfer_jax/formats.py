"""FP8, FP4 and E8M0: encoding, decoding, round trips, and the quantised weight.

All formats round to nearest even and saturate. Power-of-two scales come from the bits of the float, never from
`log2`, so that an exact power does not move up.

Packed rows (caches, FP4 weights, Engram tables) keep the codes of a row first and its scales behind them.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

GROUP = 32
"""Channels per power-of-two scale."""

FP4_SCALED_GROUP = 16
"""Channels per e4m3 scale in compressed KV."""

E4M3_MAX = 448.0
E2M1_MAX = 6.0
_FP8_FLOOR = 1e-4
_FP4_E4M3_FLOOR = 6 * 2.0**-9
_FP4_E8M0_FLOOR = 6 * 2.0**-126
# Midpoints between neighbouring e2m1 magnitudes; a tie goes to the even code, which is the upper one for odd i.
_E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


# ------------------------------------------------------------------------------------- scalar parts


def power_of_two_ceil(v: jax.Array) -> jax.Array:
    """Smallest power of two >= v, for positive normal float32."""
    bits = lax.bitcast_convert_type(v.astype(jnp.float32), jnp.int32)
    up = (bits & 0x7FFFFF) != 0
    return lax.bitcast_convert_type(((bits >> 23) + up.astype(jnp.int32)) << 23, jnp.float32)


def encode_e8m0(scale: jax.Array) -> jax.Array:
    """The byte of a positive, normal power of two: its float32 exponent field."""
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)


def decode_e8m0(byte: jax.Array) -> jax.Array:
    """2^(byte - 127) in float32; 255 is NaN."""
    return lax.bitcast_convert_type(byte, jnp.float8_e8m0fnu).astype(jnp.float32)


def encode_e2m1(v: jax.Array, scale: jax.Array | None = None) -> jax.Array:
    """Codes 0..15 (bit 3 is the sign) of float32 v / scale, saturating at +-6.

    |v| is compared with midpoint * scale, a product that is exact (3 significant bits by 4), instead of dividing:
    quotients of a compiler or an accelerator are not always rounded once, and then a tie falls to the wrong side.
    """
    magnitude = jnp.abs(v)
    code = jnp.zeros(v.shape, jnp.uint8)
    for i, midpoint in enumerate(_E2M1_MIDPOINTS):
        limit = midpoint if scale is None else midpoint * scale
        above = magnitude >= limit if i % 2 else magnitude > limit
        code = code + above.astype(jnp.uint8)
    return code | (jnp.signbit(v).astype(jnp.uint8) << 3)


def decode_e2m1(code: jax.Array) -> jax.Array:
    """float32 values of codes 0..15. Arithmetic on bits: a table lookup would be a gather."""
    magnitude = (code & 7).astype(jnp.int32)
    normal = lax.bitcast_convert_type((magnitude << 22) + (126 << 23), jnp.float32)
    value = jnp.where(magnitude < 2, magnitude.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code >= 8, -value, value)


def pack_nibbles(code: jax.Array) -> jax.Array:
    """[..., n] codes -> [..., n / 2] bytes, the even channel in the low nibble."""
    return code[..., 0::2] | (code[..., 1::2] << 4)


def unpack_nibbles(packed: jax.Array) -> jax.Array:
    """[..., n / 2] bytes -> [..., n] codes."""
    pair = jnp.stack([packed & 15, packed >> 4], axis=-1)
    return pair.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def _grouped(x: jax.Array, group: int) -> jax.Array:
    return x.astype(jnp.float32).reshape(*x.shape[:-1], x.shape[-1] // group, group)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def _inverse_power(scale: jax.Array) -> jax.Array:
    """1 / scale for a normal power of two, from its exponent."""
    return lax.bitcast_convert_type((254 << 23) - lax.bitcast_convert_type(scale, jnp.int32), jnp.float32)


def _sixth(a: jax.Array) -> jax.Array:
    """a / 6 with one rounding, without a division (see `encode_e2m1`): a product, and its exact remainder."""
    q = a * np.float32(1 / 6)
    return q + ((a - 4 * q) - 2 * q) * np.float32(1 / 6)


def _to_e4m3(v: jax.Array) -> jax.Array:
    """float32 to e4m3. XLA drops a conversion that is followed by its reverse (seen on a GPU: it counts as excess
    precision, which is allowed), and with it the rounding; a barrier keeps both."""
    return lax.optimization_barrier(v.astype(jnp.float8_e4m3fn))


def _quantize_fp8(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e4m3 codes [..., n / 32, 32] and float32 scales [..., n / 32, 1]."""
    g = _grouped(x, GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(g), axis=-1, keepdims=True), _FP8_FLOOR)
    scale = power_of_two_ceil(amax * np.float32(1 / E4M3_MAX))
    return _to_e4m3(jnp.clip(g * _inverse_power(scale), -E4M3_MAX, E4M3_MAX)), scale


def _quantize_fp4(x: jax.Array, scale_format: Literal["e4m3", "e8m0"]) -> tuple[jax.Array, jax.Array]:
    """e2m1 codes [..., n / group, group] and float32 scales [..., n / group, 1]."""
    g = _grouped(x, FP4_SCALED_GROUP if scale_format == "e4m3" else GROUP)
    amax = jnp.max(jnp.abs(g), axis=-1, keepdims=True)
    if scale_format == "e4m3":
        amax = jnp.maximum(amax, _FP4_E4M3_FLOOR)
        scale = _to_e4m3(jnp.minimum(_sixth(amax), E4M3_MAX)).astype(jnp.float32)
    else:
        scale = power_of_two_ceil(jnp.maximum(amax, _FP4_E8M0_FLOOR) * np.float32(1 / E2M1_MAX))
    return encode_e2m1(g, scale), scale


# ------------------------------------------------------------------- round trips and packed rows


# Roundings have no useful derivative. Those below pass tangents on unchanged (the straight-through estimator), so that
# the released arithmetic can be trained.


@jax.custom_jvp
def fp8_round_trip(x: jax.Array) -> jax.Array:
    """x through e4m3 with a power-of-two scale per 32 channels of the last axis; same dtype."""
    code, scale = _quantize_fp8(x)
    return _flat(code.astype(jnp.float32) * scale).astype(x.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def fp4_round_trip(x: jax.Array, scale_format: Literal["e4m3", "e8m0"]) -> jax.Array:
    """x through e2m1: `e4m3` scales per 16 channels (compressed KV) or powers of two per 32 (index q and k)."""
    code, scale = _quantize_fp4(x, scale_format)
    return _flat(decode_e2m1(code) * scale).astype(x.dtype)


@fp8_round_trip.defjvp
def _fp8_round_trip_jvp(primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return fp8_round_trip(*primals), tangents[0]


@fp4_round_trip.defjvp
def _fp4_round_trip_jvp(scale_format: Literal["e4m3", "e8m0"], primals: tuple, tangents: tuple) -> tuple:
    return fp4_round_trip(primals[0], scale_format), tangents[0]


RowFormat = Literal["fp8", "fp4_e4m3", "fp4_e8m0"]


def row_bytes(fmt: RowFormat, n: int) -> int:
    """Bytes of a packed row of n channels: 528, 288 and 68 for the released 512, 512 and 128."""
    return {"fp8": n + n // GROUP, "fp4_e4m3": n // 2 + n // FP4_SCALED_GROUP, "fp4_e8m0": n // 2 + n // GROUP}[fmt]


def encode_rows(x: jax.Array, fmt: RowFormat) -> jax.Array:
    """[..., n] values -> uint8[..., row_bytes(fmt, n)]: codes, then scales."""
    if fmt == "fp8":
        code, scale = _quantize_fp8(x)
        codes = _flat(lax.bitcast_convert_type(code, jnp.uint8))
        scales = encode_e8m0(scale)
    else:
        code, scale = _quantize_fp4(x, "e4m3" if fmt == "fp4_e4m3" else "e8m0")
        codes = pack_nibbles(_flat(code))
        if fmt == "fp4_e4m3":
            scales = lax.bitcast_convert_type(scale.astype(jnp.float8_e4m3fn), jnp.uint8)
        else:
            scales = encode_e8m0(scale)
    return jnp.concatenate([codes, _flat(scales)], axis=-1)


def decode_rows(rows: jax.Array, fmt: RowFormat, n: int, dtype: Any) -> jax.Array:
    """uint8[..., row_bytes(fmt, n)] -> [..., n] in `dtype`. Exact in float32 and bfloat16."""
    width = n if fmt == "fp8" else n // 2
    codes, scales = rows[..., :width], rows[..., width:]
    if fmt == "fp8":
        value = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
        scale, group = decode_e8m0(scales), GROUP
    elif fmt == "fp4_e4m3":
        value = decode_e2m1(unpack_nibbles(codes))
        scale, group = lax.bitcast_convert_type(scales, jnp.float8_e4m3fn).astype(jnp.float32), FP4_SCALED_GROUP
    else:
        value = decode_e2m1(unpack_nibbles(codes))
        scale, group = decode_e8m0(scales), GROUP
    return _flat(_grouped(value, group) * scale[..., None]).astype(dtype)


# ------------------------------------------------------------------------------- quantised weights

WeightFormat = Literal["fp8_block", "fp8_row", "fp4"]


def weight_bytes(fmt: WeightFormat, shape: tuple[int, int]) -> tuple[int, int]:
    """(code bytes, scale bytes) of a (rows, columns) matrix.

    `fp8_block`: e4m3 with one scale per 32 x 32. `fp8_row` and `fp4`: one scale per row and 32 columns.
    """
    rows, cols = shape
    codes = rows * cols if fmt != "fp4" else rows * cols // 2
    scale_rows = -(-rows // GROUP) if fmt == "fp8_block" else rows
    return codes, scale_rows * -(-cols // GROUP)


@partial(jax.tree_util.register_dataclass, data_fields=["record"], meta_fields=["fmt", "shape"])
@dataclasses.dataclass(frozen=True)
class QuantizedTensor:
    """A weight that stays quantised in memory.

    One leaf instead of two: the bytes of the checkpoint's `X.weight`, then those of `X.scale`. Half the leaves
    halve the cost of a dispatch, and each element of the leading axes (an expert, a table row) is one
    contiguous block, so a shard of the array is whole.

    Attributes:
        record: uint8[*lead, code bytes + scale bytes].
        fmt: How the bytes are read.
        shape: (rows, columns) of one matrix, without the leading axes.
    """

    record: Any
    fmt: WeightFormat
    shape: tuple[int, int]

    @classmethod
    def abstract(cls, fmt: WeightFormat, shape: tuple[int, int], lead: tuple[int, ...] = ()) -> QuantizedTensor:
        """A description without data."""
        return cls(jax.ShapeDtypeStruct((*lead, sum(weight_bytes(fmt, shape))), jnp.uint8), fmt, shape)

    @classmethod
    def from_parts(cls, codes: Any, scales: Any, fmt: WeightFormat, shape: tuple[int, int]) -> QuantizedTensor:
        """Join code and scale bytes, uint8[*lead, ...] each."""
        lead = codes.shape[: codes.ndim - 2]
        return cls(jnp.concatenate([codes.reshape(*lead, -1), scales.reshape(*lead, -1)], -1), fmt, shape)

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """Select along the leading axes."""
        return QuantizedTensor(self.record[index], self.fmt, self.shape)

    @property
    def codes(self) -> jax.Array:
        """uint8[*lead, rows, columns (or columns / 2)]."""
        rows, cols = self.shape
        split = weight_bytes(self.fmt, self.shape)[0]
        return self.record[..., :split].reshape(*self.record.shape[:-1], rows, cols // 2 if self.fmt == "fp4" else cols)

    @property
    def scales(self) -> jax.Array:
        """E8M0 bytes, uint8[*lead, rows (or ceil(rows / 32)), ceil(columns / 32)]."""
        split, count = weight_bytes(self.fmt, self.shape)
        width = -(-self.shape[1] // GROUP)
        return self.record[..., split:].reshape(*self.record.shape[:-1], count // width, width)

    def decode(self, dtype: Any) -> jax.Array:
        """[*lead, rows, columns] in `dtype`. Exact in float32 and bfloat16: at most 4 significant bits."""
        rows, cols = self.shape
        if self.fmt == "fp4":
            value = decode_e2m1(unpack_nibbles(self.codes))
        else:
            value = lax.bitcast_convert_type(self.codes, jnp.float8_e4m3fn).astype(jnp.float32)
        scale = jnp.repeat(decode_e8m0(self.scales), GROUP, axis=-1)[..., :cols]
        if self.fmt == "fp8_block":
            scale = jnp.repeat(scale, GROUP, axis=-2)[..., :rows, :]
        return (value * scale).astype(dtype)


def quantize_weight(w: jax.Array, fmt: WeightFormat) -> QuantizedTensor:
    """Quantise [*lead, rows, columns] float values as the release does (round to nearest even, scales up)."""
    *lead, rows, cols = w.shape
    w = w.astype(jnp.float32)
    if fmt == "fp4":
        code, scale = _quantize_fp4(w, "e8m0")
        return QuantizedTensor.from_parts(pack_nibbles(_flat(code)), encode_e8m0(scale)[..., 0], fmt, (rows, cols))
    tile = GROUP if fmt == "fp8_block" else 1
    pad = [(0, 0)] * len(lead) + [(0, -rows % tile), (0, -cols % GROUP)]
    p = jnp.pad(w, pad).reshape(*lead, -(-rows // tile), tile, -(-cols // GROUP), GROUP)
    amax = jnp.maximum(jnp.max(jnp.abs(p), axis=(-3, -1), keepdims=True), _FP8_FLOOR)
    scale = power_of_two_ceil(amax * np.float32(1 / E4M3_MAX))
    code = jnp.clip(p * _inverse_power(scale), -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
    code = code.reshape(*lead, p.shape[-4] * tile, p.shape[-2] * GROUP)[..., :rows, :cols]
    return QuantizedTensor.from_parts(
        lax.bitcast_convert_type(code, jnp.uint8), encode_e8m0(scale)[..., :, 0, :, 0], fmt, (rows, cols)
    )


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def weight_round_trip(w: jax.Array, fmt: WeightFormat) -> jax.Array:
    """What a weight [*lead, rows, columns] becomes by being quantised and decoded; straight through for gradients."""
    return quantize_weight(w, fmt).decode(w.dtype)


@weight_round_trip.defjvp
def _weight_round_trip_jvp(fmt: WeightFormat, primals: tuple, tangents: tuple) -> tuple[jax.Array, jax.Array]:
    return weight_round_trip(primals[0], fmt), tangents[0]


def weight(w: jax.Array | QuantizedTensor, dtype: Any) -> jax.Array:
    """A weight in `dtype`, decoded if it is quantised."""
    return w.decode(dtype) if isinstance(w, QuantizedTensor) else w.astype(dtype)
