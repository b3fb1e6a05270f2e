"""FP8, FP4, E8M0 against numpy's ml_dtypes and the definition of the formats."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.formats import (
    QuantizedTensor,
    decode_e2m1,
    decode_e8m0,
    decode_rows,
    encode_e2m1,
    encode_e8m0,
    encode_rows,
    fp4_round_trip,
    fp8_round_trip,
    pack_nibbles,
    power_of_two_ceil,
    quantize_weight,
    row_bytes,
    unpack_nibbles,
)

pytestmark = pytest.mark.optimized

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (*shape[:-1], 1)))).astype(np.float32)


def numpy_scale(amax: np.ndarray, largest: float) -> np.ndarray:
    """Smallest power of two >= amax / largest, by exact comparison."""
    target = amax * np.float32(1 / largest)
    scale = np.exp2(np.floor(np.log2(target.astype(np.float64))))
    return np.where(scale < target, scale * 2, scale).astype(np.float32)


def numpy_e2m1(v: np.ndarray) -> np.ndarray:
    """Nearest value, ties to the even code, through ml_dtypes."""
    return v.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)


def test_exact_powers_of_two_do_not_move_up():
    powers = np.exp2(np.arange(-120, 120)).astype(np.float32)
    np.testing.assert_array_equal(power_of_two_ceil(powers), powers)
    np.testing.assert_array_equal(power_of_two_ceil(np.nextafter(powers, np.float32(np.inf))), powers * 2)
    np.testing.assert_array_equal(power_of_two_ceil(np.nextafter(powers, np.float32(0))), powers)


def test_every_e8m0_byte_decodes_as_ml_dtypes_says_and_encodes_back():
    byte = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(decode_e8m0(byte), byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    np.testing.assert_array_equal(encode_e8m0(decode_e8m0(byte[1:255])), byte[1:255])


def test_every_e2m1_code_and_every_tie():
    code = np.arange(16, dtype=np.uint8)
    decoded = np.asarray(decode_e2m1(code))
    np.testing.assert_array_equal(decoded, np.concatenate([E2M1, -E2M1]))
    np.testing.assert_array_equal(encode_e2m1(decoded), code)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
    np.testing.assert_array_equal(decode_e2m1(encode_e2m1(ties)), [0, 1, 1, 2, 2, 4, 4])
    np.testing.assert_array_equal(unpack_nibbles(pack_nibbles(code)), code)
    assert pack_nibbles(np.array([0x1, 0x2], np.uint8))[0] == 0x21, "the even channel is the low nibble"


def test_the_fp8_round_trip_is_ml_dtypes_under_a_power_of_two():
    x = values((64, 128))
    g = x.reshape(64, 4, 32)
    scale = numpy_scale(np.maximum(np.abs(g).max(-1, keepdims=True), np.float32(1e-4)), 448)
    want = (np.clip(g / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale).reshape(x.shape)
    np.testing.assert_array_equal(jax.jit(fp8_round_trip)(x), want)
    half = x.astype(ml_dtypes.bfloat16)
    assert fp8_round_trip(half).dtype == jnp.bfloat16


@pytest.mark.parametrize("fmt", ["e4m3", "e8m0"])
def test_the_fp4_round_trip_is_ml_dtypes_under_its_scale(fmt):
    # Small integers make quotients by 6 that are ties of e4m3: a reciprocal instead of the division shows here.
    x = np.concatenate([values((64, 128)), np.random.default_rng(1).integers(-500, 500, (512, 128)).astype(np.float32)])
    group = 16 if fmt == "e4m3" else 32
    g = x.reshape(len(x), -1, group)
    amax = np.abs(g).max(-1, keepdims=True)
    if fmt == "e4m3":
        quotient = np.maximum(amax, np.float32(6 * 2.0**-9)) / np.float32(6)
        scale = np.minimum(quotient, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    else:
        scale = numpy_scale(np.maximum(amax, np.float32(6 * 2.0**-126)), 6)
    want = (numpy_e2m1(np.clip(g / scale, -6, 6)) * scale).reshape(x.shape)
    got = np.asarray(jax.jit(lambda v: fp4_round_trip(v, fmt))(x))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("fmt", "n", "size"), [("fp8", 512, 528), ("fp4_e4m3", 512, 288), ("fp4_e8m0", 128, 68)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_packed_rows_have_the_released_size_and_hold_the_round_trip(fmt, n, size, dtype):
    x = jnp.asarray(values((33, n), 3), dtype)
    rows = jax.jit(lambda v: encode_rows(v, fmt))(x)
    assert rows.shape == (33, size)
    assert row_bytes(fmt, n) == size
    want = fp8_round_trip(x) if fmt == "fp8" else fp4_round_trip(x, fmt.removeprefix("fp4_"))
    np.testing.assert_array_equal(decode_rows(rows, fmt, n, dtype), want)


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False), min_size=32, max_size=32))
@settings(max_examples=200, deadline=None)
def test_a_round_trip_changes_nothing_the_second_time(row):
    x = np.array([row], np.float32)
    once = np.asarray(fp8_round_trip(x))
    assert np.isfinite(once).all()
    np.testing.assert_array_equal(fp8_round_trip(once), once)


def test_the_published_bytes_decode_to_the_published_values():
    # layers.0.attn.wkv.weight, row 0, of the September checkpoint.
    codes = np.frombuffer(bytes.fromhex("d871f2797069f0e5"), np.uint8)
    row = np.zeros((1, 32), np.uint8)
    row[0, :8] = codes
    w = QuantizedTensor.from_parts(jnp.asarray(row), jnp.asarray([[0x73]], jnp.uint8), "fp8_block", (1, 32))
    want = [-0.00390625, 0.03515625, -0.0390625, 0.0703125, 0.03125, 0.017578125, -0.03125, -0.0126953125]
    np.testing.assert_array_equal(np.asarray(w.decode(jnp.float32))[0, :8], want)


@pytest.mark.parametrize("fmt", ["fp8_block", "fp8_row", "fp4"])
@pytest.mark.parametrize("shape", [(64, 96), (3, 40, 64), (33, 64), (7, 1, 32)])
def test_weights_decode_by_the_rule_and_lose_nothing_in_bfloat16(fmt, shape):
    w = quantize_weight(jnp.asarray(values(shape, 5)), fmt)
    codes, scales = np.asarray(w.codes), np.asarray(w.scales)
    if fmt == "fp4":
        value = np.stack([codes & 15, codes >> 4], -1).reshape(shape)
        value = np.concatenate([E2M1, -E2M1])[value]
    else:
        value = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    r, c = np.indices(shape[-2:])
    scale = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    want = value * scale[..., r // 32 if fmt == "fp8_block" else r, c // 32]
    np.testing.assert_array_equal(w.decode(jnp.float32), want)
    np.testing.assert_array_equal(np.asarray(w.decode(jnp.bfloat16)).astype(np.float32), want)
    again = quantize_weight(w.decode(jnp.float32), fmt)
    np.testing.assert_array_equal(again.decode(jnp.float32), want)


def test_a_quantised_weight_is_one_leaf_and_indexes_its_leading_axis():
    w = quantize_weight(jnp.asarray(values((4, 32, 64))), "fp4")
    assert len(jax.tree.leaves(w)) == 1
    np.testing.assert_array_equal(w[2].decode(jnp.float32), w.decode(jnp.float32)[2])
