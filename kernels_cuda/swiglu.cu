// SwiGLU, weight and FP8: a warp per 256 channels of a row, eight neighbours a lane, each value read once.
#include "ffi/ops/swiglu.h"

#include "kernels_cuda/rows.cuh"

namespace {

using namespace dj;

constexpr int kOwn = 8;
constexpr int kPart = 32 * kOwn;

template <bool kBf16>
__global__ void __launch_bounds__(32 * kWarps) swiglu(const dj_swiglu a, const int64_t parts) {
  const int64_t index = (int64_t)blockIdx.x * kWarps + threadIdx.y;
  if (index >= a.rows * parts) return;
  const int64_t row = index / parts, begin = index % parts * kPart;
  const int64_t at = begin + threadIdx.x * kOwn;
  // A group of 32 channels is four lanes, all of them inside or outside.
  const bool inside = at < a.width;

  float gate[kOwn] = {}, up[kOwn] = {}, v[kOwn];
  if (inside) {
    const char* gates = static_cast<const char*>(a.gate_up) + (row * 2 * a.width + at) * (kBf16 ? 2 : 4);
    load_own<kBf16, kOwn>(gates, 0, gate);
    load_own<kBf16, kOwn>(gates + a.width * (kBf16 ? 2 : 4), 0, up);
  }
  const float weight = a.weight[row];
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    v[i] = rounded<kBf16>(swiglu_of(gate[i], up[i], a.limit) * weight);
    amax = larger(amax, absolute(v[i]));
  }
  amax = group_max<32 / kOwn>(amax);
  const float scale = fp8_scale(amax);
  alignas(8) uint8_t codes[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) codes[i] = fp8_code(v[i], scale);
  if (!inside) return;
  uint8_t* to = a.packed + row * dj_row_bytes(DJ_ROW_FP8, a.width);
  // Rows are width * 33 / 32 bytes apart: 8-byte stores where that keeps them aligned.
  if (a.width % 256 == 0) {
    store_own(to + at, codes);
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) to[at + i] = codes[i];
  }
  if (threadIdx.x % (32 / kOwn) == 0) to[a.width + at / 32] = to_e8m0(scale);
}

}  // namespace

const char* dj_cuda_swiglu(const dj_swiglu* a, void* stream) {
  if (a->width % 32 != 0) return "width is not a multiple of 32";
  if (a->rows == 0) return nullptr;
  const int64_t parts = (a->width + kPart - 1) / kPart;
  const dim3 grid(blocks(a->rows * parts, kWarps)), block(32, kWarps);
  const auto s = static_cast<cudaStream_t>(stream);
  if (a->dtype == DJ_BF16)
    swiglu<true><<<grid, block, 0, s>>>(*a, parts);
  else
    swiglu<false><<<grid, block, 0, s>>>(*a, parts);
  return launch_status();
}
