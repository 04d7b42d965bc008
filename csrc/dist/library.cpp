// Under which keys the kernels of csrc/dist stand.
#include <torch/library.h>

#include "dist/kernels.h"
#include "dist/planned_exchange.h"

namespace torchtitan_ext::dist {
namespace {

void register_kernels(torch::Library& library) {
  library.impl("broadcast_coalesced_", torch::CppFunction::makeFromBoxedFunction<&broadcast_coalesced_>());
  library.impl("check_broadcast", torch::CppFunction::makeFromBoxedFunction<&check_broadcast>());
  library.impl("exchange_runs_", torch::CppFunction::makeFromBoxedFunction<&exchange_runs_>());
}

TORCH_LIBRARY_FRAGMENT(torchtitan_ext, library) {
  library.class_<PlannedExchange>("PlannedExchange")
      .def(
          torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>, at::Tensor, at::Tensor, std::string, int64_t>())
      .def("run", &PlannedExchange::run);
}

// Of other layouts too, to refuse them in one sentence.
TORCH_LIBRARY_IMPL(torchtitan_ext, CPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, CUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, SparseCsrCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, QuantizedCUDA, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, MkldnnCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCPU, library) { register_kernels(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, NestedTensorCUDA, library) { register_kernels(library); }

// Devices without a kernel are refused on all ranks.
TORCH_LIBRARY_IMPL(torchtitan_ext, PrivateUse1, library) {
  library.impl("exchange_runs_", torch::CppFunction::makeFromBoxedFunction<&exchange_runs_>());
}

// The check sees lazy views as they are. What the dispatcher does by default is to resolve them on the way in.
void see_lazy_views(torch::Library& library) { library.impl("check_broadcast", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(torchtitan_ext, Conjugate, library) { see_lazy_views(library); }
TORCH_LIBRARY_IMPL(torchtitan_ext, Negative, library) { see_lazy_views(library); }

}  // namespace
}  // namespace torchtitan_ext::dist
