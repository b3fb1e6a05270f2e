// Products of float32 rows with FP8 or FP4 weights that stay packed, in groups that each have a matrix of their own.
#ifndef DEEPINFER_OPS_LINEAR_H_
#define DEEPINFER_OPS_LINEAR_H_

#include "ffi/ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

// How a weight of [n, k] is packed: all codes, then all E8M0 scales.
typedef enum {
  DJ_WEIGHT_FP8 = 0,  // e4m3 codes [n, k], a scale per 32 x 32 of them
  DJ_WEIGHT_FP4 = 1,  // e2m1 pairs [n, k / 2] (even column in the low nibble), a scale per row and 32 columns
} dj_weight_format;

typedef struct {
  const float* x;         // [groups, rows, k]
  const uint8_t* weight;  // [matrices, bytes of a packed weight of n_of_matrix rows]
  const int32_t* matrix;  // [groups] which matrix; negative: the group's results are 0
  const int32_t* used;    // [groups] rows that count, the first ones; results of the others are 0
  const int32_t* first;   // [groups] first row of the matrix that is used, a multiple of 32
  float* out;             // [groups, rows, n]
  int64_t groups, rows, k, n, matrices, n_of_matrix;
  dj_weight_format format;
} dj_linear;

const char* dj_cpu_linear(const dj_linear* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // DEEPINFER_OPS_LINEAR_H_
