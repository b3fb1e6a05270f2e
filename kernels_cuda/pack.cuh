// Quantising a row that a warp holds: packed codes and scales, written by the lanes that own the channels.
#ifndef DEEPINFER_KERNELS_CUDA_PACK_CUH_
#define DEEPINFER_KERNELS_CUDA_PACK_CUH_

#include "kernels_cuda/rows.cuh"

namespace dj {

// The lane's part of a packed row of 32 * kOwn channels.
template <int kFormat, int kOwn>
struct Packed {
  static constexpr int kGroup = kFormat == DJ_ROW_FP4_E4M3 ? 16 : 32;
  static constexpr int kGroups = kOwn > kGroup ? kOwn / kGroup : 1;  // groups of a lane
  static constexpr int kSharing = kOwn < kGroup ? kGroup / kOwn : 1;  // lanes of a group
  static constexpr int kCodes = kFormat == DJ_ROW_FP8 ? kOwn : (kOwn + 1) / 2;

  alignas(16) uint8_t codes[kCodes];
  uint8_t scales[kGroups];

  __device__ __forceinline__ explicit Packed(const float (&v)[kOwn]) {
    constexpr int kPart = kOwn / kGroups;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kPart; ++i) amax = larger(amax, absolute(v[g * kPart + i]));
      amax = group_max<kSharing>(amax);
      if constexpr (kFormat == DJ_ROW_FP8) {
        const float scale = fp8_scale(amax);
        scales[g] = to_e8m0(scale);
#pragma unroll
        for (int i = 0; i < kPart; ++i) codes[g * kPart + i] = fp8_code(v[g * kPart + i], scale);
      } else {
        scales[g] = kFormat == DJ_ROW_FP4_E4M3 ? fp4_e4m3_scale(amax) : to_e8m0(fp4_e8m0_scale(amax));
        const float scale = kFormat == DJ_ROW_FP4_E4M3 ? from_e4m3(scales[g]) : from_e8m0(scales[g]);
        if constexpr (kOwn == 1) {
          // A byte holds the codes of two lanes; the even one writes it.
          const unsigned code = to_e2m1(v[0], scale);
          codes[0] = (uint8_t)(code | (__shfl_down_sync(kFull, code, 1) << 4));
        } else {
#pragma unroll
          for (int i = 0; i < kPart; i += 2)
            codes[(g * kPart + i) / 2] =
                (uint8_t)(to_e2m1(v[g * kPart + i], scale) | (to_e2m1(v[g * kPart + i + 1], scale) << 4));
        }
      }
    }
  }

  __device__ __forceinline__ void store(uint8_t* row, int lane) const {
    constexpr bool kPairs = kFormat != DJ_ROW_FP8 && kOwn == 1;
    if constexpr (kPairs) {
      if (lane % 2 == 0) row[lane / 2] = codes[0];
    } else {
      store_own(row + lane * kCodes, codes);
    }
    uint8_t* to = row + (kFormat == DJ_ROW_FP8 ? 32 * kOwn : 16 * kOwn);
    if (lane % kSharing == 0) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) to[lane / kSharing * kGroups + g] = scales[g];
    }
  }
};

}  // namespace dj

#endif  // DEEPINFER_KERNELS_CUDA_PACK_CUH_
