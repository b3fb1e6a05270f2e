#include "ffi/ops/swiglu.h"

#include "ffi/cpu/rows.h"

namespace {

using namespace dj;

template <bool kBf16>
void swiglu(const dj_swiglu& a, int64_t row) {
  const char* gates = static_cast<const char*>(a.gate_up) + row * 2 * a.width * (kBf16 ? 2 : 4);
  uint8_t* codes = a.packed + row * dj_row_bytes(DJ_ROW_FP8, a.width);
  for (int64_t g = 0; g < a.width / 32; ++g) {
    float v[32];
    float amax = 0.0f;
    for (int64_t i = 0; i < 32; ++i) {
      const float gate = element<kBf16>(gates, g * 32 + i), up = element<kBf16>(gates, a.width + g * 32 + i);
      v[i] = rounded<kBf16>(swiglu_of(gate, up, a.limit) * a.weight[row]);
      amax = larger(amax, absolute(v[i]));
    }
    const float scale = fp8_scale(amax);
    for (int64_t i = 0; i < 32; ++i) codes[g * 32 + i] = fp8_code(v[i], scale);
    codes[a.width + g] = to_e8m0(scale);
  }
}

}  // namespace

const char* dj_cpu_swiglu(const dj_swiglu* a, void* stream) {
  if (a->width % 32 != 0) return "width is not a multiple of 32";
  const auto run = a->dtype == DJ_BF16 ? swiglu<true> : swiglu<false>;
  dj::for_each(stream, a->rows, 40 * a->width, [&](int64_t row) { run(*a, row); });
  return nullptr;
}
