// The router: scores, choice and weights of experts from logits.
#ifndef DEEPINFER_OPS_GATE_H_
#define DEEPINFER_OPS_GATE_H_

#include "ffi/ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DJ_GATE_MAX_EXPERTS 512
#define DJ_GATE_MAX_CHOSEN 32

// score = sqrt(softplus(logit)); the `chosen` best of score + bias, ties to the lower id; their scores, divided by their
// sum + 1e-20 where more than one is chosen, times `scale`.
typedef struct {
  const float* logits;   // [tokens, experts]
  const float* bias;     // [bias_rows, experts], bias_rows 1 or tokens
  int32_t* ids;          // [tokens, chosen], ascending
  float* weights;        // [tokens, chosen]
  int64_t tokens, experts, chosen, bias_rows;
  float scale;
} dj_gate;

const char* dj_cpu_gate(const dj_gate* args, void* stream);
const char* dj_cuda_gate(const dj_gate* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // DEEPINFER_OPS_GATE_H_
