#include "ffi/ops/linear.h"

#include "ffi/handlers/handler.h"

namespace {

using namespace dj;
using Run = decltype(dj_cpu_linear);

template <Run run>
ffi::Error Linear(Stream stream, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> weight, ffi::Buffer<ffi::S32> matrix,
                  ffi::Buffer<ffi::S32> used, ffi::Buffer<ffi::S32> first, int32_t n_of_matrix, int32_t format,
                  ffi::Result<ffi::Buffer<ffi::F32>> out) {
  Checks checks("linear");
  checks.shape("x", x, {-1, -1, -1}).shape("out", *out, {-1, -1, -1}).shape("weight", weight, {-1, -1});
  checks.that(format == DJ_WEIGHT_FP8 || format == DJ_WEIGHT_FP4, "format", std::to_string(format), "0 or 1");
  if (checks.failed()) return checks.error();
  const int64_t groups = x.dimensions()[0], rows = x.dimensions()[1], k = x.dimensions()[2], n = out->dimensions()[2];
  const bool fp4 = format == DJ_WEIGHT_FP4;
  const int64_t bytes = (fp4 ? n_of_matrix * k / 2 : n_of_matrix * k) + (fp4 ? n_of_matrix : (n_of_matrix + 31) / 32) * (k / 32);
  checks.that(k % 32 == 0, "x", std::to_string(k) + " columns", "a multiple of 32");
  checks.shape("weight", weight, {-1, bytes}).shape("out", *out, {groups, rows, n});
  checks.shape("matrix", matrix, {groups}).shape("used", used, {groups}).shape("first", first, {groups});
  if (checks.failed()) return checks.error();
  const dj_linear args = {
      .x = x.typed_data(),
      .weight = weight.typed_data(),
      .matrix = matrix.typed_data(),
      .used = used.typed_data(),
      .first = first.typed_data(),
      .out = out->typed_data(),
      .groups = groups,
      .rows = rows,
      .k = k,
      .n = n,
      .matrices = weight.dimensions()[0],
      .n_of_matrix = n_of_matrix,
      .format = (dj_weight_format)format,
  };
  return finish("linear", run(&args, stream.handle()));
}

}  // namespace

DJ_CPU_HANDLER(linear, Linear,
               .Arg<ffi::Buffer<ffi::F32>>()
                   .Arg<ffi::Buffer<ffi::U8>>()
                   .Arg<ffi::Buffer<ffi::S32>>()
                   .Arg<ffi::Buffer<ffi::S32>>()
                   .Arg<ffi::Buffer<ffi::S32>>()
                   .Attr<int32_t>("n_of_matrix")
                   .Attr<int32_t>("format")
                   .Ret<ffi::Buffer<ffi::F32>>());
