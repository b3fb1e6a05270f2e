// What the row kernels share: a warp per row, each lane with neighbouring channels, sums in a fixed order.
#ifndef DEEPINFER_KERNELS_CUDA_ROWS_CUH_
#define DEEPINFER_KERNELS_CUDA_ROWS_CUH_

#include <cuda_runtime.h>

#include "ffi/ops/numeric.h"
#include "ffi/ops/op.h"

namespace dj {

constexpr unsigned kFull = 0xffffffffu;
constexpr int kWarps = 4;  // rows of a block

// Sum over the lanes: 16, 8, 4, 2 and 1 apart. All lanes get the same bits, since a + b = b + a.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) v = v + __shfl_xor_sync(kFull, v, apart);
  return v;
}

// Largest over the `kLanes` neighbouring lanes that share a group.
template <int kLanes>
__device__ __forceinline__ float group_max(float v) {
#pragma unroll
  for (int apart = kLanes / 2; apart > 0; apart /= 2) v = larger(v, __shfl_xor_sync(kFull, v, apart));
  return v;
}

// The kOwn neighbouring elements of a lane, in as wide loads as their size allows (rows are 16-byte aligned).
template <bool kBf16, int kOwn>
__device__ __forceinline__ void load_own(const void* row, int lane, float (&v)[kOwn]) {
  constexpr int kBytes = kOwn * (kBf16 ? 2 : 4);
  const char* from = static_cast<const char*>(row) + lane * kBytes;
  alignas(16) unsigned char raw[kBytes];
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<uint4*>(raw)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(raw) = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(raw) = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else {
    *reinterpret_cast<uint16_t*>(raw) = __ldg(reinterpret_cast<const uint16_t*>(from));
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i)
    v[i] = kBf16 ? from_bf16(reinterpret_cast<uint16_t*>(raw)[i]) : reinterpret_cast<float*>(raw)[i];
}

// Stores kBytes bytes that a lane holds in registers, as wide as they allow.
template <int kBytes>
__device__ __forceinline__ void store_own(uint8_t* to, const uint8_t (&raw)[kBytes]) {
  if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(raw)[i];
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(raw);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(raw);
  } else if constexpr (kBytes == 2) {
    *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(raw);
  } else {
    for (int i = 0; i < kBytes; ++i) to[i] = raw[i];
  }
}

inline const char* launch_status() {
  const cudaError_t error = cudaPeekAtLastError();
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();
  return cudaGetErrorString(error);
}

inline unsigned blocks(int64_t count, int64_t per_block) { return (unsigned)((count + per_block - 1) / per_block); }

}  // namespace dj

#endif  // DEEPINFER_KERNELS_CUDA_ROWS_CUH_
