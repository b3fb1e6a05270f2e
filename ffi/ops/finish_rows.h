// Finish rows for a cache: RMSNorm, rotate the last channels, quantise, and write packed bytes into a pool.
#ifndef DEEPINFER_OPS_FINISH_ROWS_H_
#define DEEPINFER_OPS_FINISH_ROWS_H_

#include "ffi/ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* x;        // [rows, width] of `dtype`
  const float* weight;  // [width] of the RMSNorm
  const float* cos;     // [rows, rope / 2]
  const float* sin;     // [rows, rope / 2]
  const int32_t* index; // [rows] row of the pool, negative: not written; distinct otherwise
  uint8_t* packed;      // [rows, dj_row_bytes(format, width)]: every row, written or not
  uint8_t* pool;        // [pool_rows, dj_row_bytes(format, width)]
  int64_t rows, width, rope, pool_rows;
  float eps;
  dj_dtype dtype;
  dj_row_format format;
} dj_finish_rows;

const char* dj_cpu_finish_rows(const dj_finish_rows* args, void* stream);
const char* dj_cuda_finish_rows(const dj_finish_rows* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // DEEPINFER_OPS_FINISH_ROWS_H_
