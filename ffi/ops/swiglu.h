// SwiGLU with a limit, times a weight per row, rounded to the activations' type and quantised to packed FP8 rows.
#ifndef DEEPINFER_OPS_SWIGLU_H_
#define DEEPINFER_OPS_SWIGLU_H_

#include "ffi/ops/op.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const void* gate_up;   // [rows, 2 * width] of `dtype`: gates, then ups
  const float* weight;   // [rows]
  uint8_t* packed;       // [rows, dj_row_bytes(DJ_ROW_FP8, width)]
  int64_t rows, width;   // width a multiple of 32
  float limit;           // gates at most, ups within +- this; 0 is none
  dj_dtype dtype;
} dj_swiglu;

const char* dj_cpu_swiglu(const dj_swiglu* args, void* stream);
const char* dj_cuda_swiglu(const dj_swiglu* args, void* stream);

#ifdef __cplusplus
}
#endif

#endif  // DEEPINFER_OPS_SWIGLU_H_
