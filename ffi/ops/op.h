// What all op headers share. Plain C: no type of CUDA, of XLA or of Python crosses this line, so that a CPU, a GPU and an
// NPU build implement the same functions.
#ifndef DEEPINFER_OPS_OP_H_
#define DEEPINFER_OPS_OP_H_

#include <stdint.h>

// Element types of activations. Packed bytes are uint8_t, indices int32_t.
typedef enum { DJ_F32 = 0, DJ_BF16 = 1 } dj_dtype;

// How a packed row of n channels is laid out: the codes of all channels, then their scales.
typedef enum {
  DJ_ROW_FP8 = 0,       // n e4m3 codes, n / 32 E8M0 scales
  DJ_ROW_FP4_E4M3 = 1,  // n / 2 bytes of e2m1 pairs (even channel in the low nibble), n / 16 e4m3 scales
  DJ_ROW_FP4_E8M0 = 2,  // n / 2 bytes of e2m1 pairs, n / 32 E8M0 scales
} dj_row_format;

#ifdef __CUDACC__
#define DJ_BOTH __host__ __device__
#else
#define DJ_BOTH
#endif

static inline DJ_BOTH int64_t dj_row_bytes(dj_row_format format, int64_t n) {
  return format == DJ_ROW_FP8 ? n + n / 32 : n / 2 + n / (format == DJ_ROW_FP4_E4M3 ? 16 : 32);
}

// An op is `const char* dj_<backend>_<op>(const dj_<op>* args, void* stream)`. It gives NULL, or why it cannot serve the
// call (a string that lives forever); then nothing was written. It allocates nothing and, on a GPU, does not wait.
//
// `stream` is a cudaStream_t on a GPU. On a CPU it is a dj_pool, or NULL for the calling thread alone.
typedef struct {
  void* self;
  int32_t threads;
  // Runs task(context, i) for every i in [0, count), in any order, and returns when all have ended.
  void (*run)(void* self, int64_t count, void (*task)(void* context, int64_t i), void* context);
} dj_pool;

#endif  // DEEPINFER_OPS_OP_H_
