#include "ffi/cpu/rows.h"

namespace dj {

namespace {

float largest(const float* v, int64_t n) {
  float amax = 0.0f;
  for (int64_t i = 0; i < n; ++i) amax = larger(amax, absolute(v[i]));
  return amax;
}

}  // namespace

void pack_row(const float* v, int64_t width, dj_row_format format, uint8_t* packed) {
  uint8_t* scales = packed + (format == DJ_ROW_FP8 ? width : width / 2);
  const int64_t group = format == DJ_ROW_FP4_E4M3 ? 16 : 32;
  for (int64_t g = 0; g < width / group; ++g) {
    const float* x = v + g * group;
    const float amax = largest(x, group);
    if (format == DJ_ROW_FP8) {
      const float scale = fp8_scale(amax);
      for (int64_t i = 0; i < group; ++i) packed[g * group + i] = fp8_code(x[i], scale);
      scales[g] = to_e8m0(scale);
      continue;
    }
    scales[g] = format == DJ_ROW_FP4_E4M3 ? fp4_e4m3_scale(amax) : to_e8m0(fp4_e8m0_scale(amax));
    const float scale = format == DJ_ROW_FP4_E4M3 ? from_e4m3(scales[g]) : from_e8m0(scales[g]);
    for (int64_t i = 0; i < group; i += 2)
      packed[(g * group + i) / 2] = (uint8_t)(to_e2m1(x[i], scale) | (to_e2m1(x[i + 1], scale) << 4));
  }
}

}  // namespace dj
