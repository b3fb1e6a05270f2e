#include "ffi/ops/gate.h"

#include "ffi/cpu/rows.h"

namespace {

using namespace dj;

void gate(const dj_gate& a, int64_t token) {
  const float* logits = a.logits + token * a.experts;
  const float* bias = a.bias + (a.bias_rows == 1 ? 0 : token) * a.experts;
  int32_t* ids = a.ids + token * a.chosen;
  float* weights = a.weights + token * a.chosen;
  float score[DJ_GATE_MAX_EXPERTS], rank[DJ_GATE_MAX_EXPERTS];
  bool taken[DJ_GATE_MAX_EXPERTS] = {};
  for (int64_t e = 0; e < a.experts; ++e) {
    score[e] = root(softplus(logits[e]));
    rank[e] = score[e] + bias[e];
  }
  for (int64_t j = 0; j < a.chosen; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < a.experts; ++e)
      if (!taken[e] && (best < 0 || rank[e] > rank[best])) best = e;
    taken[best] = true;
  }
  float sum = 0.0f;
  for (int64_t e = 0, j = 0; e < a.experts; ++e)
    if (taken[e]) {
      ids[j] = (int32_t)e;
      weights[j++] = score[e];
      sum = sum + score[e];
    }
  for (int64_t j = 0; j < a.chosen; ++j)
    weights[j] = (a.chosen > 1 ? quotient(weights[j], sum + 1e-20f) : weights[j]) * a.scale;
}

}  // namespace

const char* dj_cpu_gate(const dj_gate* a, void* stream) {
  if (a->experts > DJ_GATE_MAX_EXPERTS) return "more than 512 experts";
  if (a->chosen < 1 || a->chosen > DJ_GATE_MAX_CHOSEN || a->chosen > a->experts) return "chosen is not 1 to 32 experts";
  dj::for_each(stream, a->tokens, 50 * a->experts, [&](int64_t token) { gate(*a, token); });
  return nullptr;
}
