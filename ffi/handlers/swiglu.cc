#include "ffi/ops/swiglu.h"

#include "ffi/handlers/handler.h"

namespace {

using namespace dj;
using Run = decltype(dj_cpu_swiglu);

template <Run run>
ffi::Error Swiglu(Stream stream, ffi::AnyBuffer gate_up, ffi::Buffer<ffi::F32> weight, float limit,
                  ffi::Result<ffi::Buffer<ffi::U8>> packed) {
  Checks checks("swiglu");
  checks.type("gate_up", gate_up, {ffi::F32, ffi::BF16}).shape("gate_up", gate_up, {-1, -1});
  if (checks.failed()) return checks.error();
  const int64_t rows = gate_up.dimensions()[0], width = gate_up.dimensions()[1] / 2;
  checks.that(gate_up.dimensions()[1] % 64 == 0, "gate_up", std::to_string(2 * width) + " columns", "a multiple of 64");
  checks.shape("weight", weight, {rows}).shape("packed", *packed, {rows, dj_row_bytes(DJ_ROW_FP8, width)});
  checks.aligned("gate_up", gate_up, 16).aligned("packed", *packed, 8);
  if (checks.failed()) return checks.error();
  const dj_swiglu args = {
      .gate_up = gate_up.untyped_data(),
      .weight = weight.typed_data(),
      .packed = packed->typed_data(),
      .rows = rows,
      .width = width,
      .limit = limit,
      .dtype = dtype_of(gate_up.element_type()),
  };
  return finish("swiglu", run(&args, stream.handle()));
}

}  // namespace

DJ_HANDLERS(swiglu, Swiglu,
            .Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::F32>>().Attr<float>("limit").Ret<ffi::Buffer<ffi::U8>>());
