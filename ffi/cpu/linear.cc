#include "ffi/ops/linear.h"

#include <string.h>

#include <vector>

#include "ffi/cpu/rows.h"

// Compiled for several instruction sets, one of which is chosen at run time. All give the same bits: sums run in 16 lanes
// that are added in a fixed order, products and sums are rounded apart.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define DJ_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DJ_CLONES
#endif

namespace {

using namespace dj;

constexpr int kSum = 16;        // lanes of a sum
constexpr int kTogether = 4;    // weight rows that are decoded and used together
constexpr int64_t kBlock = 32;  // weight rows of a task

// Vectors of the compiler: it cuts them to what the instruction set has.
typedef float Floats __attribute__((vector_size(4 * kSum)));
typedef uint32_t Words __attribute__((vector_size(4 * kSum)));
typedef int32_t Integers __attribute__((vector_size(4 * kSum)));

DJ_FN Floats load(const float* from) {
  Floats v;
  memcpy(&v, from, sizeof v);
  return v;
}

// Lanes 8, 4, 2 and 1 apart.
DJ_FN float total(const Floats& sum) {
  float lane[kSum];
  memcpy(lane, &sum, sizeof lane);
  for (int apart = kSum / 2; apart > 0; apart /= 2)
    for (int l = 0; l < apart; ++l) lane[l] += lane[l + apart];
  return lane[0];
}

// kTogether decoded weight rows [kTogether, k] times `rows` rows of x; out[r * stride + j].
DJ_CLONES void products(const float* __restrict__ w, const float* __restrict__ x, int64_t k, int64_t rows,
                        float* __restrict__ out, int64_t stride) {
  int64_t r = 0;
  // Two rows of x for each load of a weight.
  for (; r + 1 < rows; r += 2) {
    const float *one = x + r * k, *two = one + k;
    Floats a[kTogether] = {}, b[kTogether] = {};
    for (int64_t i = 0; i < k; i += kSum) {
      const Floats u = load(one + i), v = load(two + i);
      for (int j = 0; j < kTogether; ++j) {
        const Floats weight = load(w + j * k + i);
        a[j] += weight * u;
        b[j] += weight * v;
      }
    }
    for (int j = 0; j < kTogether; ++j) {
      out[r * stride + j] = total(a[j]);
      out[(r + 1) * stride + j] = total(b[j]);
    }
  }
  if (r == rows) return;
  Floats a[kTogether] = {};
  for (int64_t i = 0; i < k; i += kSum) {
    const Floats u = load(x + r * k + i);
    for (int j = 0; j < kTogether; ++j) a[j] += load(w + j * k + i) * u;
  }
  for (int j = 0; j < kTogether; ++j) out[r * stride + j] = total(a[j]);
}

// kSum bytes as words. The compiler widens bytes in a loop, and not in a conversion of vectors.
DJ_FN Words widened(const uint8_t* from) {
  uint32_t wide[kSum];
  for (int l = 0; l < kSum; ++l) wide[l] = from[l];
  Words v;
  memcpy(&v, wide, sizeof v);
  return v;
}

// e2m1 codes, of which only the low four bits count. 0 and 0.5 have no normal form with a float's exponent.
DJ_FN Floats fp4_values(const Words& code, float scale) {
  const Words magnitude = code & 7u;
  const Floats normal = (Floats)((magnitude << 22) + (126u << 23));
  const Floats small = __builtin_convertvector((Integers)magnitude, Floats) * 0.5f;
  return (Floats)((Words)((magnitude < 2u ? small : normal) * scale) | ((code & 8u) << 28));
}

DJ_CLONES void decode_fp4(const uint8_t* __restrict__ codes, const uint8_t* __restrict__ scales, int64_t k,
                          float* __restrict__ w) {
  for (int64_t g = 0; g < k / 32; ++g) {
    const Words pairs = widened(codes + g * 16);
    const float scale = from_e8m0(scales[g]);
    const Floats even = fp4_values(pairs, scale), odd = fp4_values(pairs >> 4, scale);
    const Floats first = __builtin_shuffle(even, odd, Words{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
    const Floats last = __builtin_shuffle(even, odd, Words{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    memcpy(w + g * 32, &first, sizeof first);
    memcpy(w + g * 32 + kSum, &last, sizeof last);
  }
}

DJ_CLONES void decode_fp8(const uint8_t* __restrict__ codes, const uint8_t* __restrict__ scales, int64_t k,
                          float* __restrict__ w) {
  for (int64_t i = 0; i < k; i += kSum) {
    const Words code = widened(codes + i);
    const Words magnitude = code & 127u;
    // Below the normal form a code counts steps of 2^-9; with a float's exponent it would be a subnormal number.
    const Floats normal = (Floats)((magnitude << 20) + (120u << 23));
    const Floats small = __builtin_convertvector((Integers)magnitude, Floats) * (1.0f / 512.0f);
    const Floats v = (magnitude < 8u ? small : normal) * from_e8m0(scales[i / 32]);
    const Words bits = (Words)v | ((code & 128u) << 24);
    memcpy(w + i, &bits, sizeof bits);
  }
}

// Rows [begin, end) of a group's results.
void block(const dj_linear& a, int64_t group, int64_t begin, int64_t end) {
  float* out = a.out + group * a.rows * a.n;
  const int64_t used = a.matrix[group] < 0 ? 0 : a.used[group];
  for (int64_t r = used; r < a.rows; ++r)
    for (int64_t n = begin; n < end; ++n) out[r * a.n + n] = 0.0f;
  if (used == 0) return;
  const bool fp4 = a.format == DJ_WEIGHT_FP4;
  const int64_t line = fp4 ? a.k / 2 : a.k, scales_of_line = a.k / 32;
  const int64_t code_bytes = a.n_of_matrix * line;
  const int64_t scale_lines = fp4 ? a.n_of_matrix : (a.n_of_matrix + 31) / 32;
  const uint8_t* codes = a.weight + a.matrix[group] * (code_bytes + scale_lines * scales_of_line);
  const uint8_t* scales = codes + code_bytes;
  // Decoded rows; kept by the thread, so that a call allocates once in its life.
  static thread_local std::vector<float> decoded;
  decoded.resize(kTogether * a.k);
  float part[kTogether];
  for (int64_t n = begin; n < end; n += kTogether) {
    const int64_t count = end - n < kTogether ? end - n : kTogether;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = a.first[group] + n + j;
      if (fp4)
        decode_fp4(codes + row * line, scales + row * scales_of_line, a.k, decoded.data() + j * a.k);
      else
        decode_fp8(codes + row * line, scales + row / 32 * scales_of_line, a.k, decoded.data() + j * a.k);
    }
    const float* x = a.x + group * a.rows * a.k;
    if (count == kTogether) {
      products(decoded.data(), x, a.k, used, out + n, a.n);
      continue;
    }
    for (int64_t r = 0; r < used; ++r) {
      products(decoded.data(), x + r * a.k, a.k, 1, part, kTogether);
      for (int64_t j = 0; j < count; ++j) out[r * a.n + n + j] = part[j];
    }
  }
}

}  // namespace

const char* dj_cpu_linear(const dj_linear* a, void* stream) {
  if (a->k % 32 != 0) return "k is not a multiple of 32";
  const int64_t blocks = (a->n + kBlock - 1) / kBlock;
  for (int64_t g = 0; g < a->groups; ++g) {
    if (a->matrix[g] >= a->matrices) return "a group names a matrix that does not exist";
    if (a->used[g] < 0 || a->used[g] > a->rows) return "a group uses more rows than it has";
    if (a->first[g] < 0 || a->first[g] % 32 != 0 || a->first[g] + a->n > a->n_of_matrix)
      return "a group's first row is not a multiple of 32, or its rows end behind the matrix";
  }
  dj::for_each(stream, a->groups * blocks, kBlock * a->k * (1 + a->rows), [&](int64_t i) {
    const int64_t begin = i % blocks * kBlock;
    block(*a, i / blocks, begin, begin + kBlock < a->n ? begin + kBlock : a->n);
  });
  return nullptr;
}
