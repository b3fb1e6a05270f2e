// RMSNorm, rotation, quantisation and the write into a pool: a warp per row, each channel read once.
#include "ffi/ops/finish_rows.h"

#include "kernels_cuda/pack.cuh"

namespace {

using namespace dj;

template <bool kBf16, int kFormat, int kOwn>
__global__ void __launch_bounds__(32 * kWarps) finish_rows(const dj_finish_rows a) {
  constexpr int kWidth = 32 * kOwn;
  const int64_t row = (int64_t)blockIdx.x * kWarps + threadIdx.y;
  const int lane = threadIdx.x;
  if (row >= a.rows) return;

  float v[kOwn], weight[kOwn];
  load_own<kBf16, kOwn>(static_cast<const char*>(a.x) + row * kWidth * (kBf16 ? 2 : 4), lane, v);
  load_own<false, kOwn>(a.weight, lane, weight);
  float sum = v[0] * v[0];
#pragma unroll
  for (int i = 1; i < kOwn; ++i) sum = sum + v[i] * v[i];
  sum = warp_sum(sum);
  const float scale = quotient(1.0f, root(quotient(sum, (float)kWidth) + a.eps));
#pragma unroll
  for (int i = 0; i < kOwn; ++i) v[i] = rounded<kBf16>(weight[i] * (v[i] * scale));

  const int first = kWidth - (int)a.rope;
  const float* cos = a.cos + row * (a.rope / 2);
  const float* sin = a.sin + row * (a.rope / 2);
  if constexpr (kOwn == 1) {
    // The two parts of a pair lie in neighbouring lanes.
    const float other = __shfl_xor_sync(kFull, v[0], 1);
    if (lane >= first) {
      const float c = cos[(lane - first) / 2], s = sin[(lane - first) / 2];
      v[0] = rounded<kBf16>(lane % 2 == 0 ? v[0] * c - other * s : other * s + v[0] * c);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const int channel = lane * kOwn + i;
      if (channel >= first) {
        const float c = cos[(channel - first) / 2], s = sin[(channel - first) / 2];
        const float real = v[i], imaginary = v[i + 1];
        v[i] = rounded<kBf16>(real * c - imaginary * s);
        v[i + 1] = rounded<kBf16>(real * s + imaginary * c);
      }
    }
  }

  const Packed<kFormat, kOwn> packed(v);
  const int64_t bytes = dj_row_bytes((dj_row_format)kFormat, kWidth);
  packed.store(a.packed + row * bytes, lane);
  const int64_t to = a.index[row];
  if (to >= 0 && to < a.pool_rows) packed.store(a.pool + to * bytes, lane);
}

template <bool kBf16, int kFormat>
const char* launch(const dj_finish_rows& a, cudaStream_t stream) {
  const dim3 grid(blocks(a.rows, kWarps)), block(32, kWarps);
  switch (a.width) {
    case 32: finish_rows<kBf16, kFormat, 1><<<grid, block, 0, stream>>>(a); break;
    case 64: finish_rows<kBf16, kFormat, 2><<<grid, block, 0, stream>>>(a); break;
    case 128: finish_rows<kBf16, kFormat, 4><<<grid, block, 0, stream>>>(a); break;
    case 512: finish_rows<kBf16, kFormat, 16><<<grid, block, 0, stream>>>(a); break;
    default: return "width is none of 32, 64, 128 and 512";
  }
  return launch_status();
}

}  // namespace

const char* dj_cuda_finish_rows(const dj_finish_rows* a, void* stream) {
  if (a->rows == 0) return nullptr;
  const auto s = static_cast<cudaStream_t>(stream);
  const bool bf16 = a->dtype == DJ_BF16;
  switch (a->format) {
    case DJ_ROW_FP8: return bf16 ? launch<true, DJ_ROW_FP8>(*a, s) : launch<false, DJ_ROW_FP8>(*a, s);
    case DJ_ROW_FP4_E4M3: return bf16 ? launch<true, DJ_ROW_FP4_E4M3>(*a, s) : launch<false, DJ_ROW_FP4_E4M3>(*a, s);
    default: return bf16 ? launch<true, DJ_ROW_FP4_E8M0>(*a, s) : launch<false, DJ_ROW_FP4_E8M0>(*a, s);
  }
}
