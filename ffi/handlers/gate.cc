#include "ffi/ops/gate.h"

#include "ffi/handlers/handler.h"

namespace {

using namespace dj;
using Run = decltype(dj_cpu_gate);

template <Run run>
ffi::Error Gate(Stream stream, ffi::Buffer<ffi::F32> logits, ffi::Buffer<ffi::F32> bias, float scale,
                ffi::Result<ffi::Buffer<ffi::S32>> ids, ffi::Result<ffi::Buffer<ffi::F32>> weights) {
  Checks checks("gate");
  checks.shape("logits", logits, {-1, -1}).shape("bias", bias, {-1, -1}).shape("ids", *ids, {-1, -1});
  if (checks.failed()) return checks.error();
  const int64_t tokens = logits.dimensions()[0], experts = logits.dimensions()[1], chosen = ids->dimensions()[1];
  const int64_t bias_rows = bias.dimensions()[0];
  checks.shape("bias", bias, {bias_rows == 1 ? 1 : tokens, experts});
  checks.shape("ids", *ids, {tokens, chosen}).shape("weights", *weights, {tokens, chosen});
  if (checks.failed()) return checks.error();
  const dj_gate args = {
      .logits = logits.typed_data(),
      .bias = bias.typed_data(),
      .ids = ids->typed_data(),
      .weights = weights->typed_data(),
      .tokens = tokens,
      .experts = experts,
      .chosen = chosen,
      .bias_rows = bias_rows,
      .scale = scale,
  };
  return finish("gate", run(&args, stream.handle()));
}

}  // namespace

DJ_HANDLERS(gate, Gate,
            .Arg<ffi::Buffer<ffi::F32>>()
                .Arg<ffi::Buffer<ffi::F32>>()
                .Attr<float>("scale")
                .Ret<ffi::Buffer<ffi::S32>>()
                .Ret<ffi::Buffer<ffi::F32>>());
