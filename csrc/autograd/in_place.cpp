// What autograd must know of an op in place, in front of its kernel: without a bump of the version counters, backward
// uses overwritten values in silence. LibTorch's stable ABI has neither version counters nor requires_grad, so this
// file uses the full C++ API of torch and is built per minor version of it; op_library.py stands in where it is
// missing.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include "ops/python_lock.h"

namespace torchtitan_ext::autograd {
namespace {

template <typename Visit>
void visit_tensors(const c10::IValue& argument, const Visit& visit) {
  if (argument.isTensor()) {
    visit(argument.toTensor());
  } else if (argument.isTensorList()) {
    for (const c10::IValue& item : argument.toListRef()) visit(item.toTensor());
  }
}

std::string name_of(const c10::FunctionSchema& schema) { return schema.name().substr(schema.name().rfind(':') + 1); }

void refuse_gradients(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  const bool backward = at::GradMode::is_enabled();
  const bool forward = c10::AutogradState::get_tls_state().get_fw_grad_mode();
  if (!backward && !forward) return;
  for (const c10::IValue& argument : arguments) {
    visit_tensors(argument, [&](const at::Tensor& tensor) {
      TORCH_CHECK(!backward || !tensor.requires_grad(), name_of(schema),
                  " is not differentiable: an argument requires grad; call it under torch.no_grad(), or use the form "
                  "without the final underscore");
      TORCH_CHECK(!forward || !tensor._fw_grad(0).defined(), name_of(schema),
                  " is not differentiable: an argument has a forward gradient; use the form without the final "
                  "underscore");
    });
  }
}

// As torch's own ops in place refuse it: such a tensor has no version counter. Collectives fill it all the same, as
// torch.distributed's do.
void refuse_inference_tensor(const c10::FunctionSchema& schema, const std::string& argument, const at::Tensor& tensor) {
  const bool is_collective = name_of(schema) == "broadcast_coalesced_" || name_of(schema) == "exchange_runs_";
  TORCH_CHECK(!tensor.is_inference() || c10::InferenceMode::is_enabled() || is_collective, name_of(schema),
              " cannot write: ", argument,
              " was made in inference mode and is written outside of it; call under torch.inference_mode(), or clone() "
              "it first");
}

// The tensors themselves, not the list that holds them: kernels on the stable ABI move its tensors out.
std::vector<at::Tensor> written_by(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> written;
  for (size_t index = 0; index < arguments.size(); ++index) {
    const c10::AliasInfo* alias = schema.arguments()[index].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    visit_tensors(arguments[index], [&](const at::Tensor& tensor) {
      // Some versions of torch write through such a view, others refuse with a page of text.
      TORCH_CHECK_VALUE(!tensor.is_conj() && !tensor.is_neg(), name_of(schema), ": ", schema.arguments()[index].name(),
                        " is a lazily conjugated or negated view; pass what it views");
      refuse_inference_tensor(schema, schema.arguments()[index].name(), tensor);
      written.push_back(tensor);
    });
  }
  return written;
}

// Tells the other ranks, which would wait for this one: the op itself, with nothing but its refusal as the digest.
void refuse_on_all_ranks(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  constexpr int64_t kRefused = -1;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t index = 0; index < arguments.size(); ++index) {
    c10::IValue& value = (*stack)[first + index];
    if (value.isTensorList()) value = std::vector<at::Tensor>();
    if (arguments[index].name() == "digest") value = kRefused;
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  try {
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  } catch (const std::exception&) {  // it always raises: the caller has the reason
  }
}

void in_place(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const at::ArrayRef<c10::IValue> arguments = torch::jit::last(*stack, schema.arguments().size());
  std::vector<at::Tensor> written;
  try {
    refuse_gradients(schema, arguments);
    written = written_by(schema, arguments);
  } catch (...) {
    if (name_of(schema) == "exchange_runs_") refuse_on_all_ranks(op, keys, stack);
    throw;
  }
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
  }
  ops::give_back(std::move(written));
}

TORCH_LIBRARY_IMPL(torchtitan_ext, ADInplaceOrView, library) {
  for (const char* name : {"unpack_shard_", "unpack_shards_", "flatten_into_", "unflatten_tensors_",
                           "broadcast_coalesced_", "exchange_runs_"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_place>());
  }
}

}  // namespace
}  // namespace torchtitan_ext::autograd
