// The Python module `deepinfer_jax._custom_calls`: handlers to register, and what this build and this machine have.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ffi/handlers/handler.h"

#ifdef DEEPINFER_CUDA
#include <cuda_runtime_api.h>
#endif

namespace dj {

namespace py = pybind11;

// [(op, platform, handler)] of everything that was built.
py::list target_list() {
  py::list found;
  for (const Target& t : targets())
    found.append(py::make_tuple(t.name, t.platform, py::capsule(reinterpret_cast<void*>(t.handler))));
  return found;
}

// What the CUDA part was compiled for and what it finds: empty without one.
py::dict cuda() {
  py::dict found;
#ifdef DEEPINFER_CUDA
  found["architectures"] = DEEPINFER_CUDA_ARCHITECTURES;
  found["compiled_with"] = CUDART_VERSION;
  int driver = 0, count = 0;
  cudaDriverGetVersion(&driver);
  found["driver"] = driver;
  const cudaError_t error = cudaGetDeviceCount(&count);
  found["error"] = error == cudaSuccess ? "" : cudaGetErrorString(error);
  py::list devices;
  for (int i = 0; i < count && error == cudaSuccess; ++i) {
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, i) == cudaSuccess) devices.append(py::make_tuple(p.name, p.major, p.minor));
  }
  found["devices"] = devices;
#endif
  return found;
}

}  // namespace dj

PYBIND11_MODULE(_custom_calls, m) {
  m.doc() = "Typed XLA FFI handlers of deepinfer_jax.";
  m.def("targets", &dj::target_list);
  m.def("cuda", &dj::cuda);
}
