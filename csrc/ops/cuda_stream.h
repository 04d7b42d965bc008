// torch's current CUDA stream, for kernels that are not linked with CUDA torch.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace torchtitan_ext::ops {

inline void check_cuda(cudaError_t error, const char* where) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(where) + ": CUDA says: " + cudaGetErrorString(error));
}

// A CUDA tensor exists, so libtorch_cuda.so is loaded and has the symbol.
inline cudaStream_t current_stream(int32_t device_index) {
  using GetStream = int32_t (*)(int32_t device_index, void** stream);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr
                              : reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (get_stream == nullptr || get_stream(device_index, &stream) != 0) {
    throw std::runtime_error("torchtitan_ext: this torch does not give its current CUDA stream; please report");
  }
  return static_cast<cudaStream_t>(stream);
}

}  // namespace torchtitan_ext::ops
