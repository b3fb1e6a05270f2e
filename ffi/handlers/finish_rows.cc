#include "ffi/ops/finish_rows.h"

#include "ffi/handlers/handler.h"

namespace {

using namespace dj;
using Run = decltype(dj_cpu_finish_rows);

template <Run run>
ffi::Error FinishRows(Stream stream, ffi::AnyBuffer x, ffi::Buffer<ffi::F32> weight, ffi::Buffer<ffi::F32> cos,
                      ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> index, ffi::Buffer<ffi::U8> pool, float eps,
                      int32_t format, ffi::Result<ffi::Buffer<ffi::U8>> packed, ffi::Result<ffi::Buffer<ffi::U8>> updated) {
  Checks checks("finish_rows");
  checks.type("x", x, {ffi::F32, ffi::BF16}).shape("x", x, {-1, -1});
  checks.that(format >= DJ_ROW_FP8 && format <= DJ_ROW_FP4_E8M0, "format", std::to_string(format), "0, 1 or 2");
  if (checks.failed()) return checks.error();
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  checks.that(width % 32 == 0, "x", "width " + std::to_string(width), "a multiple of 32");
  const int64_t bytes = dj_row_bytes((dj_row_format)format, width);
  checks.shape("weight", weight, {width}).shape("cos", cos, {rows, -1}).shape("index", index, {rows});
  checks.shape("pool", pool, {-1, bytes}).shape("packed", *packed, {rows, bytes});
  if (checks.failed()) return checks.error();
  const int64_t half = cos.dimensions()[1], pool_rows = pool.dimensions()[0];
  checks.shape("sin", sin, {rows, half}).shape("updated", *updated, {pool_rows, bytes});
  checks.that(2 * half <= width, "cos", std::to_string(half) + " pairs", "at most half of the width");
  checks.aligned("x", x, 16).aligned("weight", weight, 16).aligned("pool", pool, 16).aligned("packed", *packed, 16);
  same_buffer(checks, "pool", pool, updated);
  if (checks.failed()) return checks.error();
  const dj_finish_rows args = {
      .x = x.untyped_data(),
      .weight = weight.typed_data(),
      .cos = cos.typed_data(),
      .sin = sin.typed_data(),
      .index = index.typed_data(),
      .packed = packed->typed_data(),
      .pool = updated->typed_data(),
      .rows = rows,
      .width = width,
      .rope = 2 * half,
      .pool_rows = pool_rows,
      .eps = eps,
      .dtype = dtype_of(x.element_type()),
      .format = (dj_row_format)format,
  };
  return finish("finish_rows", run(&args, stream.handle()));
}

}  // namespace

DJ_HANDLERS(finish_rows, FinishRows,
            .Arg<ffi::AnyBuffer>()
                .Arg<ffi::Buffer<ffi::F32>>()
                .Arg<ffi::Buffer<ffi::F32>>()
                .Arg<ffi::Buffer<ffi::F32>>()
                .Arg<ffi::Buffer<ffi::S32>>()
                .Arg<ffi::Buffer<ffi::U8>>()
                .Attr<float>("eps")
                .Attr<int32_t>("format")
                .Ret<ffi::Buffer<ffi::U8>>()
                .Ret<ffi::Buffer<ffi::U8>>());
