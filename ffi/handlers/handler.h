// What the typed XLA FFI handlers share: the stream of either platform, argument checks, and registration.
#ifndef DEEPINFER_HANDLERS_HANDLER_H_
#define DEEPINFER_HANDLERS_HANDLER_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/ops/op.h"
#include "xla/ffi/api/ffi.h"

struct CUstream_st;

namespace dj {

namespace ffi = xla::ffi;

// The stream that an op gets: a cudaStream_t as it is, or XLA's threads as a dj_pool.
class Stream {
 public:
  Stream(CUstream_st* stream) : handle_(stream) {}  // NOLINT: the two conversions are the point
  Stream(ffi::ThreadPool threads);                  // NOLINT
  void* handle() { return pool_.self != nullptr ? &pool_ : handle_; }

 private:
  void* handle_ = nullptr;
  std::shared_ptr<ffi::ThreadPool> threads_;
  dj_pool pool_ = {};
};

// Collects what is wrong with the arguments of a call; all faults are reported together.
class Checks {
 public:
  explicit Checks(const char* op) : text_(op) {}

  // dims: the expected sizes; -1 allows any.
  template <typename Buffer>
  Checks& shape(const char* name, const Buffer& buffer, std::vector<int64_t> dims) {
    const auto found = buffer.dimensions();
    bool same = found.size() == dims.size();
    for (size_t i = 0; same && i < dims.size(); ++i) same = dims[i] < 0 || dims[i] == found[i];
    if (!same) fault(name, "shape " + list({found.begin(), found.end()}), list(std::move(dims)));
    return *this;
  }

  template <typename Buffer>
  Checks& type(const char* name, const Buffer& buffer, std::initializer_list<ffi::DataType> allowed) {
    for (const auto one : allowed)
      if (buffer.element_type() == one) return *this;
    return fault(name, "XLA type " + std::to_string((int)buffer.element_type()), "another (see its op header)");
  }

  // The buffer must start at a multiple of `bytes`: kernels load that much at once.
  template <typename Buffer>
  Checks& aligned(const char* name, const Buffer& buffer, uintptr_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(buffer.untyped_data());
    if (at % bytes != 0) fault(name, "an address of remainder " + std::to_string(at % bytes), "a multiple of " + std::to_string(bytes));
    return *this;
  }

  Checks& that(bool holds, const char* name, const std::string& found, const std::string& expected) {
    return holds ? *this : fault(name, found, expected);
  }

  Checks& fault(const char* name, const std::string& found, const std::string& expected) {
    text_ += std::string(failed_ ? "; " : ": ") + name + ": found " + found + ", expected " + expected;
    failed_ = true;
    return *this;
  }

  bool failed() const { return failed_; }
  ffi::Error error() const { return ffi::Error::InvalidArgument(text_); }

 private:
  static std::string list(std::vector<int64_t> dims) {
    std::string text = "[";
    for (size_t i = 0; i < dims.size(); ++i)
      text += (i ? ", " : "") + (dims[i] < 0 ? std::string("any") : std::to_string(dims[i]));
    return text + "]";
  }

  std::string text_;
  bool failed_ = false;
};

inline dj_dtype dtype_of(ffi::DataType type) { return type == ffi::DataType::BF16 ? DJ_BF16 : DJ_F32; }

// A buffer that an op updates comes in and goes out under one address, if the caller aliased and donated it. Otherwise XLA
// has made a copy of its own under the result's address; then nothing has to be done here either.
template <typename In, typename Out>
Checks& same_buffer(Checks& checks, const char* name, const In& in, const Out& out) {
  return checks.that(in.untyped_data() == out->untyped_data(), name, "two buffers", "input and result aliased");
}

inline ffi::Error finish(const char* op, const char* why) {
  if (why == nullptr) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kUnimplemented, std::string(op) + ": " + why);
}

// One handler of the table that the module exports.
struct Target {
  const char* name;
  const char* platform;  // as JAX names them: "cpu" or "CUDA"
  XLA_FFI_Handler* handler;
};

// The table. Every handler file adds its own lines (DJ_HANDLERS), so no list of ops has to be kept.
std::vector<Target>& targets();

struct Registration {
  Registration(std::initializer_list<Target> lines) { targets().insert(targets().end(), lines); }
};

}  // namespace dj

// DJ_HANDLERS(op, Impl, args): handlers `<op>_cpu` and, in a CUDA build, `<op>_cuda`, of Impl<dj_cpu_op> and Impl<dj_cuda_op>.
// `args` is a chain of .Arg, .Attr and .Ret. Impl takes a Stream first. Each can be captured into a command buffer.
#define DJ_HANDLER_(name, impl, stream, args) \
  XLA_FFI_DEFINE_HANDLER(name, impl, ::xla::ffi::Ffi::Bind().Ctx<stream>() args, {::xla::ffi::Traits::kCmdBufferCompatible})

#ifdef DEEPINFER_CUDA
#define DJ_HANDLERS(op, Impl, args)                                                               \
  DJ_HANDLER_(k_##op##_cpu, Impl<dj_cpu_##op>, ::xla::ffi::ThreadPool, args);                     \
  DJ_HANDLER_(k_##op##_cuda, Impl<dj_cuda_##op>, ::xla::ffi::PlatformStream<CUstream_st*>, args); \
  static const ::dj::Registration k_##op##_lines({{#op, "cpu", k_##op##_cpu}, {#op, "CUDA", k_##op##_cuda}})
#else
#define DJ_HANDLERS(op, Impl, args)                                           \
  DJ_HANDLER_(k_##op##_cpu, Impl<dj_cpu_##op>, ::xla::ffi::ThreadPool, args); \
  static const ::dj::Registration k_##op##_lines({{#op, "cpu", k_##op##_cpu}})
#endif

// The same for an op that has no CUDA kernel.
#define DJ_CPU_HANDLER(op, Impl, args)                                        \
  DJ_HANDLER_(k_##op##_cpu, Impl<dj_cpu_##op>, ::xla::ffi::ThreadPool, args); \
  static const ::dj::Registration k_##op##_lines({{#op, "cpu", k_##op##_cpu}})

#endif  // DEEPINFER_HANDLERS_HANDLER_H_
