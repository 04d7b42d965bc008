// What a launch needs beside its kernel: torch's device and torch's current stream, for kernels that are not linked with
// CUDA torch.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "ops/run_tables.h"

namespace torchtitan_ext::ops {

// A failed call leaves its error behind for the next one that asks; it is told here, once.
inline void check_cuda(cudaError_t error, const char* where) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(where) + ": CUDA says: " + cudaGetErrorString(error));
}

// Asks whether the launch of a kernel with this table as its argument failed.
template <typename SomeTable>
void check_launch(const SomeTable&, const char* where) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return;
  int driver_version = 0;
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess) driver_version = 0;
  throw std::runtime_error(launch_error(where, cudaGetErrorString(error), sizeof(SomeTable), driver_version));
}

// Makes a device current for this runtime, which is not torch's, for as long as it lives. A thread has one current
// context, whatever runtime set it: where that is of the device already, as under torch's guard, nothing is done, so
// that a context of the caller's own (a green one) stays. Else what was current comes back at the end.
class CurrentDevice {
 public:
  CurrentDevice(int32_t device_index, const char* where) {
    const Driver& driver = Driver::instance();
    int current_index = -1;
    if (driver.get_current(&before_) == 0 && before_ != nullptr && driver.get_device(&current_index) == 0 &&
        current_index == device_index) {
      return;
    }
    check_cuda(cudaSetDevice(device_index), where);
    is_changed_ = true;
  }
  ~CurrentDevice() {
    if (is_changed_) Driver::instance().set_current(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  // A CUDA tensor exists, so the driver's library is loaded.
  struct Driver {
    int (*get_current)(void** context);
    int (*set_current)(void* context);
    int (*get_device)(int* device);

    static const Driver& instance() {
      static const Driver found = [] {
        void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        const auto find = [library](const char* name) { return library == nullptr ? nullptr : dlsym(library, name); };
        const Driver driver = {reinterpret_cast<int (*)(void**)>(find("cuCtxGetCurrent")),
                               reinterpret_cast<int (*)(void*)>(find("cuCtxSetCurrent")),
                               reinterpret_cast<int (*)(int*)>(find("cuCtxGetDevice"))};
        if (driver.get_current == nullptr || driver.set_current == nullptr || driver.get_device == nullptr) {
          throw std::runtime_error("torchtitan_ext: the CUDA driver is not loaded; please report");
        }
        return driver;
      }();
      return found;
    }
  };

  void* before_ = nullptr;
  bool is_changed_ = false;
};

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
