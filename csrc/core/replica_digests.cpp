#include "core/replica_digests.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_set>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

enum Mode : uint8_t { kNoDigests, kTable, kBeginnings, kMixed };

// Fewer different digests than this travel whole.
constexpr size_t kMaxTable = 32;
// A replica that differs by accident is overlooked once in 2^40 times.
constexpr size_t kBeginningBytes = 5;
// What is shorter is a value, of which nothing may be left out.
constexpr size_t kDigestBytes = 16;

// The part of a digest that always travels.
std::string_view beginning_of(std::string_view digest) {
  return digest.size() < kDigestBytes ? digest : digest.substr(0, kBeginningBytes);
}

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 31);
}

void add_to(std::array<uint64_t, 2>& sum, uint32_t key, std::string_view digest) {
  for (uint64_t lane = 0; lane < 2; ++lane) {
    uint64_t hash = mix(lane + 1, key);
    for (size_t begin = 0; begin < digest.size(); begin += 8) {
      uint64_t word = 0;
      std::memcpy(&word, digest.data() + begin, std::min<size_t>(8, digest.size() - begin));
      hash = mix(hash, word);
    }
    sum[lane] += mix(mix(hash, digest.size()), 0);
  }
}

}  // namespace

std::string encode_digests(const std::vector<uint32_t>& kind_of, size_t num_kinds,
                           const std::vector<std::string_view>& digests) {
  WireWriter out;
  std::vector<std::vector<std::string_view>> of_kind(num_kinds);
  for (size_t key = 0; key < kind_of.size(); ++key) of_kind.at(kind_of[key]).push_back(digests[key]);
  for (const auto& members : of_kind) {
    std::map<std::string_view, uint64_t> table;
    std::vector<std::string_view> in_order;
    bool are_long = true;
    for (const std::string_view digest : members) {
      are_long = are_long && digest.size() >= kDigestBytes;
      if (!digest.empty() && table.try_emplace(digest, table.size() + 1).second) in_order.push_back(digest);
    }
    if (table.empty()) {
      out.put(kNoDigests);
    } else if (table.size() < kMaxTable) {
      out.put(kTable);
      out.put(in_order.size());
      for (const std::string_view digest : in_order) out.put_string(digest);
      for (const std::string_view digest : members) out.put(digest.empty() ? 0 : table[digest]);
    } else if (are_long) {
      out.put(kBeginnings);
      for (const std::string_view digest : members) out.append(beginning_of(digest));
    } else {
      out.put(kMixed);
      for (const std::string_view digest : members) {
        out.put(std::min(digest.size(), kDigestBytes));
        out.append(beginning_of(digest));
      }
    }
  }
  return out.take();
}

bool ReplicaDigests::ClassSum::operator==(const ClassSum& other) const {
  if (num_digests != other.num_digests) return false;
  return is_short || other.is_short ? begin == other.begin : whole == other.whole;
}

size_t ReplicaDigests::add_message(size_t section, std::string_view bytes) {
  const Section& of = joint_.sections().at(section);
  const std::vector<uint32_t>& kind_of = of.columns.kind_of;
  std::vector<std::vector<uint32_t>>& keys_of_kind = keys_of_kind_[section];
  if (keys_of_kind.empty()) {
    keys_of_kind.resize(of.columns.kinds.size());
    for (uint32_t key = 0; key < kind_of.size(); ++key) keys_of_kind[kind_of[key]].push_back(key);
  }
  Message& message = messages_.emplace_back();
  message.section = section;
  message.bytes = bytes;
  message.digests.resize(kind_of.size());
  message.is_short.assign(kind_of.size(), false);
  WireReader in(message.bytes, "digests");
  for (const std::vector<uint32_t>& keys : keys_of_kind) {
    const size_t mode = in.get_index("mode", 4);
    if (mode == kTable) {
      const size_t num_digests = in.get_count("table");
      std::vector<std::string_view> table = {{}};
      for (size_t index = 0; index < num_digests; ++index) table.push_back(in.get_string("digest"));
      for (const uint32_t key : keys) message.digests[key] = table[in.get_index("digest of a key", table.size())];
    } else if (mode == kBeginnings) {
      for (const uint32_t key : keys) {
        message.digests[key] = in.get_bytes("beginning of a digest", kBeginningBytes);
        message.is_short[key] = true;
      }
    } else if (mode == kMixed) {
      for (const uint32_t key : keys) {
        const size_t num_bytes = in.get_index("bytes of a digest", kDigestBytes + 1);
        message.is_short[key] = num_bytes == kDigestBytes;
        message.digests[key] = in.get_bytes("digest", message.is_short[key] ? kBeginningBytes : num_bytes);
      }
    }
  }
  in.finish();
  return messages_.size() - 1;
}

void ReplicaDigests::add_rank(const std::vector<size_t>& messages) {
  const auto rank = static_cast<int64_t>(messages_of_rank_.size());
  const std::vector<size_t>& sections = joint_.sections_of(rank);
  bool fits = messages.size() == sections.size();
  for (size_t index = 0; fits && index < messages.size(); ++index) {
    fits = messages_.at(messages[index]).section == sections[index];
  }
  if (!fits) throw WireError(concat("digests: those of rank ", rank, " are not about its own keys"));
  messages_of_rank_.push_back(messages);
}

const ReplicaDigests::Message& ReplicaDigests::message_of(const Member& member) const {
  const std::vector<size_t>& sections = joint_.sections_of(member.rank);
  const auto position = std::find(sections.begin(), sections.end(), member.section) - sections.begin();
  return messages_[messages_of_rank_.at(static_cast<size_t>(member.rank))[static_cast<size_t>(position)]];
}

const std::unordered_map<uint32_t, uint32_t>& ReplicaDigests::positions_in(uint32_t section) const {
  auto& positions = positions_[section];
  if (positions.empty()) {
    const std::vector<uint32_t>& keys = joint_.sections()[section].keys;
    for (uint32_t position = 0; position < keys.size(); ++position) positions[keys[position]] = position;
  }
  return positions;
}

std::string_view ReplicaDigests::digest_of(const Member& member, uint32_t key, bool& is_short) const {
  const Message& message = message_of(member);
  const uint32_t position = positions_in(member.section).at(key);
  is_short = message.is_short[position];
  return message.digests[position];
}

ReplicaDigests::ClassSum ReplicaDigests::sum_of(const KeyClass& of_keys, const Member& member) const {
  const Message& message = message_of(member);
  const auto& positions = positions_in(member.section);
  ClassSum sum;
  for (const uint32_t key : of_keys.keys) {
    const uint32_t position = positions.at(key);
    const std::string_view digest = message.digests[position];
    if (digest.empty()) continue;
    ++sum.num_digests;
    sum.is_short = sum.is_short || message.is_short[position];
    add_to(sum.whole, key, digest);
    add_to(sum.begin, key, beginning_of(digest));
  }
  return sum;
}

std::vector<ReplicaDigests::Group> ReplicaDigests::groups_of(const KeyClass& of_keys) const {
  std::vector<Group> groups;
  if (of_keys.is_plain || joint_.kind_of(of_keys).type == EntryType::kObject) {
    Group& all = groups.emplace_back();
    for (const Member& member : of_keys.members) all.members.push_back(&member);
    all.ends.push_back(all.members.size());
    return groups;
  }
  std::unordered_map<int64_t, const Member*> member_of;
  for (const Member& member : of_keys.members) member_of[member.rank] = &member;
  for (const std::vector<const HeldShard*>& shards : equal_shards(of_keys)) {
    Group& group = groups.emplace_back();
    for (const HeldShard* shard : shards) {
      for (const int64_t rank : shard->ranks) group.members.push_back(member_of.at(rank));
      group.ends.push_back(group.members.size());
    }
  }
  return groups;
}

std::pair<bool, bool> ReplicaDigests::look_at(const KeyClass& of_keys, const Group& group, bool counts_digests) const {
  const Message* const first = &message_of(*group.members.front());
  const auto is_other = [&](const Member* member) { return &message_of(*member) != first; };
  const bool is_one_message = std::none_of(group.members.begin(), group.members.end(), is_other);
  if (is_one_message && !counts_digests) return {true, false};
  const ClassSum of_first = sum_of(of_keys, *group.members.front());
  bool are_alike = true;
  bool are_complete = of_first.num_digests == of_keys.keys.size();
  std::unordered_set<const Message*> seen = {first};
  for (const Member* member : group.members) {
    if (is_one_message || !(are_alike || (counts_digests && are_complete))) break;
    if (!seen.insert(&message_of(*member)).second) continue;
    const ClassSum sum = sum_of(of_keys, *member);
    are_alike = are_alike && sum == of_first;
    are_complete = are_complete && sum.num_digests == of_keys.keys.size();
  }
  return {are_alike, are_complete};
}

std::optional<ReplicaDigests::Difference> ReplicaDigests::find_difference(
    uint32_t key, std::span<const Member* const> members) const {
  const Member* first = nullptr;
  std::string_view of_first;
  bool first_is_short = false;
  for (const Member* member : members) {
    of_first = digest_of(*member, key, first_is_short);
    if (of_first.empty()) continue;
    first = member;
    break;
  }
  if (first == nullptr) return std::nullopt;
  for (const Member* member : members) {
    bool is_short = false;
    const std::string_view other = digest_of(*member, key, is_short);
    const bool is_equal =
        is_short || first_is_short ? beginning_of(other) == beginning_of(of_first) : other == of_first;
    if (is_equal) continue;
    return Difference{
        key, {first->rank, std::string(of_first), first_is_short}, {member->rank, std::string(other), is_short}, false};
  }
  return std::nullopt;
}

std::optional<ReplicaDigests::Difference> ReplicaDigests::find_difference(
    uint32_t key, const std::vector<const Group*>& groups) const {
  for (const Group* group : groups) {
    size_t begin = 0;
    for (const size_t end : group->ends) {
      if (auto difference = find_difference(key, std::span(group->members).subspan(begin, end - begin))) {
        return difference;
      }
      begin = end;
    }
  }
  for (const Group* group : groups) {
    // A rank without a digest has not been compared with other meshes, and does not differ from them.
    std::vector<const Member*> compared = group->members;
    std::erase_if(compared, [&](const Member* member) { return !has_digest(*member, key); });
    if (auto difference = find_difference(key, compared)) {
      difference->is_presumed = true;
      return difference;
    }
  }
  return std::nullopt;
}

bool ReplicaDigests::has_digest(const Member& member, uint32_t key) const {
  bool is_short = false;
  return !digest_of(member, key, is_short).empty();
}

bool ReplicaDigests::is_lacking(uint32_t key, const std::vector<Group>& groups) const {
  const auto lacks = [&](const Member* member) { return !has_digest(*member, key); };
  return std::any_of(groups.begin(), groups.end(), [&](const Group& group) {
    return std::any_of(group.members.begin(), group.members.end(), lacks);
  });
}

void ReplicaDigests::compare(const KeyClass& of_keys, Comparison& found) const {
  const bool is_on_several = !of_keys.is_plain && of_keys.replicas.size() > 1;
  const std::vector<Group> groups = groups_of(of_keys);
  std::vector<const Group*> unlike;
  bool are_complete = true;
  for (const Group& group : groups) {
    if (group.members.size() < 2 && !is_on_several) continue;
    const auto [are_alike, is_complete] = look_at(of_keys, group, is_on_several);
    if (!are_alike) unlike.push_back(&group);
    are_complete = are_complete && is_complete;
  }
  if (unlike.empty() && !is_on_several) return;

  const auto is_on_mesh = [&](const Member& member) { return joint_.kind_of(member).kind.mesh != Kind::kPlain; };
  const bool is_presumed = std::all_of(of_keys.members.begin(), of_keys.members.end(), is_on_mesh);
  const auto is_everywhere = [&](const Group& group) { return group.ends.size() == of_keys.replicas.size(); };
  const auto has_other_steps = [&](const Replica& replica) { return replica.steps != of_keys.replicas.front().steps; };
  const bool are_comparable = std::all_of(groups.begin(), groups.end(), is_everywhere);
  const bool are_of_one_layout = std::none_of(of_keys.replicas.begin(), of_keys.replicas.end(), has_other_steps);
  const bool is_empty = num_elements(joint_.kind_of(of_keys).shape) == 0;
  for (const uint32_t key : of_keys.keys) {
    if (auto difference = find_difference(key, unlike)) {
      difference->is_presumed = difference->is_presumed && is_presumed;
      found.differing.push_back(std::move(*difference));
    } else if (is_on_several && (!are_comparable || (!are_complete && !is_empty && is_lacking(key, groups)))) {
      found.uncompared.push_back(key);
    } else if (is_on_several && are_of_one_layout) {
      found.equal.push_back(key);
    }
  }
}

ReplicaDigests::Comparison ReplicaDigests::compare() const {
  Comparison found;
  for (const KeyClass& of_keys : joint_.classes()) {
    if (!of_keys.trouble) compare(of_keys, found);
  }
  std::sort(found.differing.begin(), found.differing.end(),
            [](const Difference& a, const Difference& b) { return a.key < b.key; });
  std::sort(found.equal.begin(), found.equal.end());
  std::sort(found.uncompared.begin(), found.uncompared.end());
  return found;
}

}  // namespace torchtitan_ext::core
