// What the CPU implementations share: rows over threads, and sums in the order of a warp.
#ifndef DEEPINFER_CPU_ROWS_H_
#define DEEPINFER_CPU_ROWS_H_

#include "ffi/ops/numeric.h"
#include "ffi/ops/op.h"

namespace dj {

// f(i) for every i in [0, count), over the pool's threads if there is enough to do for them.
template <typename F>
void for_each(void* stream, int64_t count, int64_t work_of_one, F f) {
  const dj_pool* pool = static_cast<const dj_pool*>(stream);
  // Handing out work costs some microseconds.
  if (pool == nullptr || pool->threads < 2 || count < 2 || count * work_of_one < (1 << 15)) {
    for (int64_t i = 0; i < count; ++i) f(i);
    return;
  }
  const int64_t parts = count < 4 * pool->threads ? count : 4 * pool->threads;
  struct Context {
    F* f;
    int64_t count, parts;
  } context{&f, count, parts};
  pool->run(
      pool->self, parts,
      [](void* data, int64_t part) {
        const Context& c = *static_cast<Context*>(data);
        for (int64_t i = c.count * part / c.parts; i < c.count * (part + 1) / c.parts; ++i) (*c.f)(i);
      },
      &context);
}

constexpr int kLanes = 32;

// Sum of f(0) .. f(n - 1), n a multiple of 32, in the order of a warp whose lanes own n / 32 neighbours each: every lane
// from its first to its last, then lanes 16, 8, 4, 2 and 1 apart.
template <typename F>
float lane_sum(int64_t n, F f) {
  const int64_t own = n / kLanes;
  float lane[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    float sum = f(l * own);
    for (int64_t i = 1; i < own; ++i) sum = sum + f(l * own + i);
    lane[l] = sum;
  }
  for (int apart = kLanes / 2; apart > 0; apart /= 2)
    for (int l = 0; l < apart; ++l) lane[l] = lane[l] + lane[l + apart];
  return lane[0];
}

// Element i of a row of `dtype`, as a float.
template <bool kBf16>
float element(const void* row, int64_t i) {
  return kBf16 ? from_bf16(static_cast<const uint16_t*>(row)[i]) : static_cast<const float*>(row)[i];
}

template <bool kBf16>
void set_element(void* row, int64_t i, float v) {
  if (kBf16)
    static_cast<uint16_t*>(row)[i] = to_bf16(v);
  else
    static_cast<float*>(row)[i] = v;
}

inline int64_t element_bytes(dj_dtype dtype) { return dtype == DJ_BF16 ? 2 : 4; }

// Quantise a row of `width` floats into packed bytes.
void pack_row(const float* v, int64_t width, dj_row_format format, uint8_t* packed);

}  // namespace dj

#endif  // DEEPINFER_CPU_ROWS_H_
