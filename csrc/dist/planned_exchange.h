// An exchange that is checked and planned once and runs many times, as the kept plan of a transfer does: of thousands of small
// tensors, checks and plan take longer than the transfer. `exchange_runs_` is one that runs once.
#pragma once

#include <torch/custom_class.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace torchtitan_ext::dist {

class PlannedExchange : public torch::CustomClassHolder {
 public:
  // The arguments of `exchange_runs_`, which this keeps. What is wrong with them is raised by `run`, on all ranks. The tensors
  // must not get other memory.
  PlannedExchange(std::vector<at::Tensor> sources, std::vector<at::Tensor> targets, at::Tensor sends,
                  at::Tensor receives, std::string group_name, int64_t bucket_bytes);
  ~PlannedExchange() override;

  // Collective. Refuses tensors that require grad, and bumps the version counters of what was written.
  void run(int64_t digest, double timeout_seconds);
  // The same for the operator, of which csrc/autograd does these two.
  void run_below_autograd(int64_t digest, double timeout_seconds);

 private:
  struct State;
  void refuse_gradients() const;
  std::unique_ptr<State> state_;
};

}  // namespace torchtitan_ext::dist
