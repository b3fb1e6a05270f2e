// The arithmetic of single elements, for the host and for CUDA from one source: what CI checks on a CPU is what a GPU runs.
//
// Compile without contraction of products into sums (-ffp-contract=off, -fmad=false), so that both round alike.
#ifndef DEEPINFER_OPS_NUMERIC_H_
#define DEEPINFER_OPS_NUMERIC_H_

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define DJ_FN __host__ __device__ __forceinline__
#else
#include <math.h>
#define DJ_FN static inline __attribute__((always_inline))
#endif

namespace dj {

DJ_FN uint32_t bits_of(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(v);
#else
  uint32_t b;
  memcpy(&b, &v, 4);
  return b;
#endif
}

DJ_FN float float_of(uint32_t b) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(b);
#else
  float v;
  memcpy(&v, &b, 4);
  return v;
#endif
}

DJ_FN float absolute(float v) { return float_of(bits_of(v) & 0x7fffffffu); }
DJ_FN float larger(float a, float b) { return a > b ? a : b; }
DJ_FN float smaller(float a, float b) { return a < b ? a : b; }

DJ_FN float root(float v) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(v);
#else
  return sqrtf(v);
#endif
}

DJ_FN float quotient(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// ---- bfloat16: the upper half of a float, rounded to nearest even; NaN stays NaN

DJ_FN uint16_t to_bf16(float v) {
  const uint32_t b = bits_of(v);
  if ((b & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((b >> 16) | 0x40u);
  return (uint16_t)((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
}

DJ_FN float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

// v as it becomes in an activation of bfloat16 (dj_dtype 1) or float32 (0).
template <bool kBf16>
DJ_FN float rounded(float v) {
  return kBf16 ? from_bf16(to_bf16(v)) : v;
}

// ---- powers of two

// The smallest power of two >= v, for positive normal v.
DJ_FN float power_of_two_ceil(float v) {
  const uint32_t b = bits_of(v);
  return float_of(((b >> 23) + ((b & 0x7fffffu) != 0)) << 23);
}

DJ_FN float inverse_power(float scale) { return float_of((254u << 23) - bits_of(scale)); }
DJ_FN uint8_t to_e8m0(float scale) { return (uint8_t)(bits_of(scale) >> 23); }

// 2^(byte - 127); 255 is NaN. Byte 0 would be subnormal, and no encoder writes it.
DJ_FN float from_e8m0(uint8_t byte) {
  return byte == 255 ? float_of(0x7fc00000u) : byte == 0 ? float_of(0x00400000u) : float_of((uint32_t)byte << 23);
}

// ---- e4m3: sign, 4 bits of exponent (bias 7), 3 of mantissa; 448 is the largest, 2^-9 the smallest

// For |v| <= 448, to nearest even.
DJ_FN uint8_t to_e4m3(float v) {
  const uint32_t b = bits_of(v), sign = (b >> 24) & 0x80u, magnitude = b & 0x7fffffffu;
  if (magnitude < (121u << 23)) {
    // Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves just those bits, rounded.
    const float shifted = float_of(magnitude) + 16384.0f;
    return (uint8_t)(sign | (bits_of(shifted) & 0xfu));
  }
  const uint32_t up = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return (uint8_t)(sign | ((up >> 20) - (120u << 3)));
}

DJ_FN float from_e4m3(uint8_t code) {
  const uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu;
  if (magnitude == 0x7fu) return float_of(sign | 0x7fc00000u);
  // Not through a subnormal float: XLA's threads flush those to zero.
  const float v = magnitude < 8 ? (float)magnitude * (1.0f / 512.0f) : float_of((magnitude << 20) + (120u << 23));
  return float_of(sign | bits_of(v));
}

// ---- e2m1: sign, 2 bits of exponent, 1 of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6

// The code of v / scale, saturating. A tie goes to the even code; midpoint * scale is exact.
DJ_FN uint8_t to_e2m1(float v, float scale) {
  const float m = absolute(v);
  const uint32_t code = (m > 0.25f * scale) + (m >= 0.75f * scale) + (m > 1.25f * scale) + (m >= 1.75f * scale) +
                        (m > 2.5f * scale) + (m >= 3.5f * scale) + (m > 5.0f * scale);
  return (uint8_t)(code | ((bits_of(v) >> 31) << 3));
}

DJ_FN float from_e2m1(uint8_t code) {
  const uint32_t sign = (uint32_t)(code & 8u) << 28, magnitude = code & 7u;
  const float v = magnitude < 2 ? (float)magnitude * 0.5f : float_of((magnitude << 22) + (126u << 23));
  return float_of(sign | bits_of(v));
}

// a / 6 with one rounding, without a division: a product, and its exact remainder.
DJ_FN float sixth(float a) {
  const float q = a * (1.0f / 6.0f);
  return q + ((a - 4.0f * q) - 2.0f * q) * (1.0f / 6.0f);
}

// ---- scales of a group from its largest magnitude

DJ_FN float fp8_scale(float amax) { return power_of_two_ceil(larger(amax, 1e-4f) * (1.0f / 448.0f)); }

DJ_FN uint8_t fp8_code(float v, float scale) {
  return to_e4m3(smaller(larger(v * inverse_power(scale), -448.0f), 448.0f));
}

DJ_FN uint8_t fp4_e4m3_scale(float amax) { return to_e4m3(smaller(sixth(larger(amax, 6.0f / 512.0f)), 448.0f)); }

DJ_FN float fp4_e8m0_scale(float amax) {
  return power_of_two_ceil(larger(amax, 6.0f * float_of(1u << 23)) * (1.0f / 6.0f));
}

// ---- exp and log, within 2 units of the last place, from rounded operations alone: the same bits everywhere

// Results below 2^-126 are 0, whether or not the machine knows subnormal numbers.
DJ_FN float exponential(float v) {
  if (!(v > -87.3365f)) return v != v ? v : 0.0f;
  if (v > 88.72283f) return float_of(0x7f800000u);
  const float n = (v * 1.44269504f + 12582912.0f) - 12582912.0f;  // nearest integer, for |v| < 2^22
  const float r = (v - n * 0.693359375f) + n * 2.12194440e-4f;     // ln 2 in two parts
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * (r * r) + r + 1.0f;
  // n can be 128, where 2^n is no float; half of it is always one.
  const int half = (int)n / 2;
  return p * float_of((uint32_t)(127 + half) << 23) * float_of((uint32_t)(127 + (int)n - half) << 23);
}

// For normal v > 0.
DJ_FN float logarithm(float v) {
  const uint32_t b = bits_of(v);
  int e = (int)(b >> 23) - 127;
  float m = float_of((b & 0x7fffffu) | (127u << 23));
  if (m > 1.41421356f) {
    m = m * 0.5f;
    e += 1;
  }
  // log m = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172.
  const float f = m - 1.0f, s = quotient(f, m + 1.0f), z = s * s;
  float p = 2.0f / 9.0f;
  p = p * z + 2.0f / 7.0f;
  p = p * z + 2.0f / 5.0f;
  p = p * z + 2.0f / 3.0f;
  const float log_m = s * (z * p) + 2.0f * s;
  return (float)e * 0.693359375f + (log_m - (float)e * 2.12194440e-4f);
}

DJ_FN float sigmoid(float v) { return quotient(1.0f, 1.0f + exponential(-v)); }

// log(1 + e^v): max(v, 0) + log1p(e^-|v|).
DJ_FN float softplus(float v) {
  const float e = exponential(-absolute(v)), u = 1.0f + e;
  // log1p(e) = log(u) * e / (u - 1), which takes back what the sum's rounding cost.
  const float log1p = u == 1.0f ? e : quotient(logarithm(u) * e, u - 1.0f);
  return larger(v, 0.0f) + log1p;
}

// silu(min(gate, limit)) * clip(up, +-limit); limit 0 is none.
DJ_FN float swiglu_of(float gate, float up, float limit) {
  if (limit > 0.0f) {
    gate = smaller(gate, limit);
    up = smaller(larger(up, -limit), limit);
  }
  return gate * sigmoid(gate) * up;
}

}  // namespace dj

#endif  // DEEPINFER_OPS_NUMERIC_H_
