#include "core/value_graph.h"

#include <algorithm>
#include <cstdint>
#include <set>
#include <utility>

namespace torchtitan_ext::core {
namespace {

void append_length(std::string& text, size_t length) {
  for (int shift = 0; shift < 32; shift += 8) text.push_back(static_cast<char>(static_cast<uint32_t>(length) >> shift));
}

}  // namespace

size_t ValueGraph::add_node() {
  nodes_.emplace_back();
  return nodes_.size() - 1;
}

void ValueGraph::describe(size_t node, std::string label, std::vector<Member> members, bool is_ordered) {
  nodes_[node] = {std::move(label), std::move(members), is_ordered};
}

std::string ValueGraph::digest() const {
  const std::vector<std::string> digests = digests_from_leaves();
  return digests[0].empty() ? digest_of_cycles(digests) : digests[0];
}

// The bytes are those of Python's marshal, version 2, for a tuple of bytes: digests in fingerprints stay what they were.
std::string ValueGraph::hash_parts(const std::vector<std::string_view>& parts) const {
  std::string bytes = "(";
  append_length(bytes, parts.size());
  for (const std::string_view part : parts) {
    bytes += 's';
    append_length(bytes, part.size());
    bytes += part;
  }
  return hash_(bytes);
}

std::string ValueGraph::digest_of(const Node& node, const std::vector<std::string>& names) const {
  std::vector<std::string_view> parts = {node.label};
  for (const Member& member : node.members) {
    const auto* const number = std::get_if<size_t>(&member);
    parts.emplace_back(number != nullptr ? names[*number] : std::get<std::string>(member));
  }
  if (!node.is_ordered) std::sort(parts.begin() + 1, parts.end());
  return hash_parts(parts);
}

std::vector<std::string> ValueGraph::digests_from_leaves() const {
  std::vector<std::string> digests(nodes_.size());
  std::vector<std::vector<size_t>> holders(nodes_.size());
  std::vector<size_t> num_unknown(nodes_.size());
  std::vector<size_t> ready;
  for (size_t node = 0; node < nodes_.size(); ++node) {
    for (const Member& member : nodes_[node].members) {
      if (const auto* const number = std::get_if<size_t>(&member)) {
        holders[*number].push_back(node);
        ++num_unknown[node];
      }
    }
    if (num_unknown[node] == 0) ready.push_back(node);
  }
  while (!ready.empty()) {
    const size_t node = ready.back();
    ready.pop_back();
    digests[node] = digest_of(nodes_[node], digests);
    for (const size_t holder : holders[node]) {
      if (--num_unknown[holder] == 0) ready.push_back(holder);
    }
  }
  return digests;
}

std::string ValueGraph::digest_of_cycles(const std::vector<std::string>& digests) const {
  std::vector<size_t> cyclic;
  for (size_t node = 0; node < digests.size(); ++node) {
    if (digests[node].empty()) cyclic.push_back(node);
  }
  std::vector<std::string> colours = digests;
  while (true) {
    std::vector<std::string> finer = digests;
    std::set<std::string_view> known;
    std::set<std::pair<std::string_view, std::string_view>> steps;
    for (const size_t node : cyclic) {
      finer[node] = digest_of(nodes_[node], colours);
      known.insert(colours[node]);
      steps.emplace(colours[node], finer[node]);
    }
    if (steps.size() == known.size()) {
      std::vector<std::string> table;
      for (const auto& [colour, next] : steps) table.push_back(std::string(colour).append(next));
      std::vector<std::string_view> parts = {"cycle", colours[0]};
      parts.insert(parts.end(), table.begin(), table.end());
      return hash_parts(parts);
    }
    colours = std::move(finer);
  }
}

}  // namespace torchtitan_ext::core
