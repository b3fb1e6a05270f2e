#include "ffi/ops/finish_rows.h"

#include <string.h>

#include "ffi/cpu/rows.h"

namespace {

constexpr int64_t kMaxWidth = 1024;

template <bool kBf16>
void finish(const dj_finish_rows& a, int64_t row) {
  using namespace dj;
  const char* x = static_cast<const char*>(a.x) + row * a.width * (kBf16 ? 2 : 4);
  float v[kMaxWidth];
  for (int64_t i = 0; i < a.width; ++i) v[i] = element<kBf16>(x, i);
  const float sum = lane_sum(a.width, [&](int64_t i) { return v[i] * v[i]; });
  const float scale = quotient(1.0f, root(quotient(sum, (float)a.width) + a.eps));
  for (int64_t i = 0; i < a.width; ++i) v[i] = rounded<kBf16>(a.weight[i] * (v[i] * scale));
  float* turned = v + a.width - a.rope;
  for (int64_t i = 0; i < a.rope / 2; ++i) {
    const float cos = a.cos[row * (a.rope / 2) + i], sin = a.sin[row * (a.rope / 2) + i];
    const float real = turned[2 * i], imaginary = turned[2 * i + 1];
    turned[2 * i] = rounded<kBf16>(real * cos - imaginary * sin);
    turned[2 * i + 1] = rounded<kBf16>(real * sin + imaginary * cos);
  }
  const int64_t bytes = dj_row_bytes(a.format, a.width);
  pack_row(v, a.width, a.format, a.packed + row * bytes);
  if (a.index[row] >= 0 && a.index[row] < a.pool_rows)
    memcpy(a.pool + a.index[row] * bytes, a.packed + row * bytes, bytes);
}

}  // namespace

const char* dj_cpu_finish_rows(const dj_finish_rows* a, void* stream) {
  if (a->width % 32 != 0 || a->width > kMaxWidth) return "width is not a multiple of 32 up to 1024";
  const auto run = a->dtype == DJ_BF16 ? finish<true> : finish<false>;
  dj::for_each(stream, a->rows, 8 * a->width, [&](int64_t row) { run(*a, row); });
  return nullptr;
}
