// Which optimizer keys does a flat state dict want that a checkpoint lacks?
//
// The flat form has `param_groups.<fqn>.<option>` and `state.<fqn>.<name>`, maybe behind a prefix such as `optimizer.`.
// Fqns and names of states have dots, options have none. A state belongs to the longest fqn that has options.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace torchtitan_ext::core {

struct OptionGaps {
  std::vector<std::string> fillable;  // wanted options that no saved parameter has
  // Those of parameters without any saved key, by fqn, in the order of their first keys.
  std::vector<std::pair<std::string, std::vector<std::string>>> missing;
  std::vector<std::string> incomplete;  // other wanted keys that are missing
  std::vector<std::string> dropped;     // saved options that no parameter wants
};

// All lists are sorted. Keys of other forms are ignored.
OptionGaps find_option_gaps(std::vector<std::string> saved, std::vector<std::string> wanted);

}  // namespace torchtitan_ext::core
