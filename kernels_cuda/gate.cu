// The router: a warp per token, the scores of all experts in its registers.
#include "ffi/ops/gate.h"

#include "kernels_cuda/rows.cuh"

namespace {

using namespace dj;

// kOwn: experts of a lane, lane, lane + 32, ...
template <int kOwn>
__global__ void __launch_bounds__(32 * kWarps) gate(const dj_gate a) {
  const int64_t token = (int64_t)blockIdx.x * kWarps + threadIdx.y;
  const int lane = threadIdx.x;
  if (token >= a.tokens) return;
  const float* logits = a.logits + token * a.experts;
  const float* bias = a.bias + (a.bias_rows == 1 ? 0 : token) * a.experts;

  float score[kOwn], rank[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int e = lane + 32 * i;
    const bool exists = e < a.experts;
    score[i] = exists ? root(softplus(logits[e])) : 0.0f;
    rank[i] = exists ? score[i] + bias[e] : 0.0f;
  }

  // Experts that are still to be had, a bit each. Lane j keeps the j-th choice.
  unsigned open = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) open |= (lane + 32 * i < a.experts ? 1u : 0u) << i;
  int mine = 0x7fffffff;
  float mine_score = 0.0f;
  for (int j = 0; j < a.chosen; ++j) {
    int best = 0x7fffffff;
    float best_rank = 0.0f, best_score = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if ((open >> i & 1u) && (best == 0x7fffffff || rank[i] > best_rank)) {
        best = lane + 32 * i;
        best_rank = rank[i];
        best_score = score[i];
      }
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
      const int other = __shfl_xor_sync(kFull, best, apart);
      const float other_rank = __shfl_xor_sync(kFull, best_rank, apart);
      const float other_score = __shfl_xor_sync(kFull, best_score, apart);
      const bool better = other != 0x7fffffff &&
                          (best == 0x7fffffff || other_rank > best_rank || (other_rank == best_rank && other < best));
      best = better ? other : best;
      best_rank = better ? other_rank : best_rank;
      best_score = better ? other_score : best_score;
    }
    if (best % 32 == lane) open &= ~(1u << (best / 32));
    if (j == lane) {
      mine = best;
      mine_score = best_score;
    }
  }

  // In the order of ids: as many are before a choice as have lower ids.
  int place = 0;
  for (int j = 0; j < a.chosen; ++j) place += __shfl_sync(kFull, mine, j) < mine;
  float sum = 0.0f;
  for (int p = 0; p < a.chosen; ++p) {
    const unsigned holder = __ballot_sync(kFull, lane < a.chosen && place == p);
    sum = sum + __shfl_sync(kFull, mine_score, __ffs(holder) - 1);
  }
  if (lane < a.chosen) {
    const float share = a.chosen > 1 ? quotient(mine_score, sum + 1e-20f) : mine_score;
    a.ids[token * a.chosen + place] = mine;
    a.weights[token * a.chosen + place] = share * a.scale;
  }
}

}  // namespace

const char* dj_cuda_gate(const dj_gate* a, void* stream) {
  if (a->experts > DJ_GATE_MAX_EXPERTS) return "more than 512 experts";
  if (a->chosen < 1 || a->chosen > DJ_GATE_MAX_CHOSEN || a->chosen > a->experts) return "chosen is not 1 to 32 experts";
  if (a->tokens == 0) return nullptr;
  const dim3 grid(blocks(a->tokens, kWarps)), block(32, kWarps);
  const auto s = static_cast<cudaStream_t>(stream);
  if (a->experts <= 32)
    gate<1><<<grid, block, 0, s>>>(*a);
  else if (a->experts <= 128)
    gate<4><<<grid, block, 0, s>>>(*a);
  else if (a->experts <= 384)
    gate<12><<<grid, block, 0, s>>>(*a);
  else
    gate<16><<<grid, block, 0, s>>>(*a);
  return launch_status();
}
