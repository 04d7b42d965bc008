#include "core/option_gaps.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>

namespace torchtitan_ext::core {
namespace {

using Owner = std::pair<std::string_view, std::string_view>;  // prefix and fqn of a parameter

struct Option {
  Owner owner;
  std::string_view name;
};

// What stands before and after `word`, a part of a path with its dot, wherever it stands in a key; the shortest prefix
// first, and none at all last. Lines do not break within a key of the flat form.
std::vector<Owner> cuts_at(std::string_view key, std::string_view word) {
  std::vector<Owner> cuts;
  for (size_t dot = key.find('.'); dot != std::string_view::npos; dot = key.find('.', dot + 1)) {
    if (key.substr(dot + 1).starts_with(word))
      cuts.emplace_back(key.substr(0, dot + 1), key.substr(dot + 1 + word.size()));
  }
  if (key.starts_with(word)) cuts.emplace_back(key.substr(0, 0), key.substr(word.size()));
  std::erase_if(cuts, [](const Owner& cut) { return cut.first.find('\n') != std::string_view::npos; });
  return cuts;
}

std::optional<Option> option_of(std::string_view key) {
  for (const auto& [prefix, rest] : cuts_at(key, "param_groups.")) {
    const size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos || dot == 0 || dot + 1 == rest.size()) continue;
    const std::string_view fqn = rest.substr(0, dot);
    if (fqn.find('\n') == std::string_view::npos) return Option{{prefix, fqn}, rest.substr(dot + 1)};
  }
  return std::nullopt;
}

std::optional<Owner> owner_of_state(std::string_view key, const std::set<Owner>& owners) {
  for (auto [prefix, fqn] : cuts_at(key, "state.")) {
    if (fqn.empty() || fqn.find('\n') != std::string_view::npos) continue;
    for (size_t dot = fqn.rfind('.'); dot != std::string_view::npos; dot = fqn.rfind('.')) {
      fqn = fqn.substr(0, dot);
      if (owners.contains({prefix, fqn})) return Owner{prefix, fqn};
    }
    return std::nullopt;
  }
  return std::nullopt;
}

void sort_unique(std::vector<std::string>& keys) {
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
}

}  // namespace

OptionGaps find_option_gaps(std::vector<std::string> saved, std::vector<std::string> wanted) {
  sort_unique(saved);
  sort_unique(wanted);
  std::set<Owner> owners, known;
  std::set<Owner> saved_names, wanted_names;  // prefix and option
  for (const std::string& key : saved) {
    if (const auto option = option_of(key)) {
      owners.insert(option->owner);
      known.insert(option->owner);
      saved_names.emplace(option->owner.first, option->name);
    }
  }
  for (const std::string& key : wanted) {
    if (const auto option = option_of(key)) {
      owners.insert(option->owner);
      wanted_names.emplace(option->owner.first, option->name);
    }
  }
  OptionGaps gaps;
  for (const std::string& key : saved) {
    if (const auto owner = owner_of_state(key, owners)) known.insert(*owner);
    const auto option = option_of(key);
    if (option && !wanted_names.contains({option->owner.first, option->name})) gaps.dropped.push_back(key);
  }
  std::map<std::string_view, size_t> place_of;
  for (const std::string& key : wanted) {
    const auto option = option_of(key);
    const auto owner = option ? option->owner : owner_of_state(key, owners);
    if (!owner || std::binary_search(saved.begin(), saved.end(), key)) continue;
    if (!known.contains(*owner)) {
      const auto [place, is_new] = place_of.try_emplace(owner->second, gaps.missing.size());
      if (is_new) gaps.missing.emplace_back(owner->second, std::vector<std::string>());
      gaps.missing[place->second].second.push_back(key);
    } else if (option && !saved_names.contains({owner->first, option->name})) {
      gaps.fillable.push_back(key);
    } else {
      gaps.incomplete.push_back(key);
    }
  }
  return gaps;
}

}  // namespace torchtitan_ext::core
