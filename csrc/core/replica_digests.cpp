#include "core/replica_digests.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <unordered_set>

#include "core/check.h"
#include "core/wire.h"

namespace torchtitan_ext::core {
namespace {

enum Mode : uint8_t { kNoDigests, kTable, kBeginnings };

// Fewer different digests than this travel whole.
constexpr size_t kMaxTable = 32;
// A replica that differs by accident is overlooked once in 2^40 times.
constexpr size_t kBeginningBytes = 5;

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

// The ranks that should hold the same of a class: of an object and a plain tensor all, of others those of equal boxes.
std::vector<std::vector<const Member*>> replica_groups(const World& world, const KeyClass& of_keys) {
  std::vector<std::vector<const Member*>> groups;
  if (of_keys.is_plain || world.kind_of(of_keys).type == EntryType::kObject) {
    for (const Member& member : of_keys.members)
      (groups.empty() ? groups.emplace_back() : groups[0]).push_back(&member);
    return groups;
  }
  std::unordered_map<int64_t, const Member*> member_of;
  for (const Member& member : of_keys.members) member_of[member.rank] = &member;
  std::map<std::vector<Sizes>, size_t> positions;
  for (const Replica& replica : of_keys.replicas) {
    for (const HeldShard& shard : replica.shards) {
      size_t position = groups.size();
      if (of_keys.replicas.size() > 1) {
        std::vector<Sizes> boxes;
        for (const Chunk& box : shard.boxes) {
          boxes.push_back(box.offsets);
          boxes.push_back(box.sizes);
        }
        position = positions.try_emplace(std::move(boxes), groups.size()).first->second;
      }
      if (position == groups.size()) groups.emplace_back();
      for (const int64_t rank : shard.ranks) groups[position].push_back(member_of.at(rank));
    }
  }
  return groups;
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
      are_long = are_long && digest.size() >= kBeginningBytes;
      if (!digest.empty() && table.try_emplace(digest, table.size() + 1).second) in_order.push_back(digest);
    }
    if (table.empty()) {
      out.put(kNoDigests);
    } else if (table.size() < kMaxTable || !are_long) {
      out.put(kTable);
      out.put(in_order.size());
      for (const std::string_view digest : in_order) out.put_string(digest);
      for (const std::string_view digest : members) out.put(digest.empty() ? 0 : table[digest]);
    } else {
      out.put(kBeginnings);
      for (const std::string_view digest : members) out.append(digest.substr(0, kBeginningBytes));
    }
  }
  return out.take();
}

bool ReplicaDigests::ClassSum::operator==(const ClassSum& other) const {
  if (num_digests != other.num_digests) return false;
  return is_short || other.is_short ? begin == other.begin : whole == other.whole;
}

size_t ReplicaDigests::add_message(size_t section, std::string_view bytes) {
  const Section& of = world_.sections().at(section);
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
    const size_t mode = in.get_index("mode", 3);
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
    }
  }
  in.finish();
  return messages_.size() - 1;
}

void ReplicaDigests::add_rank(const std::vector<size_t>& messages) {
  const auto rank = static_cast<int64_t>(messages_of_rank_.size());
  const std::vector<size_t>& sections = world_.sections_of(rank);
  bool fits = messages.size() == sections.size();
  for (size_t index = 0; fits && index < messages.size(); ++index) {
    fits = messages_.at(messages[index]).section == sections[index];
  }
  if (!fits) throw WireError(concat("digests: those of rank ", rank, " are not about its own keys"));
  messages_of_rank_.push_back(messages);
}

const ReplicaDigests::Message& ReplicaDigests::message_of(const Member& member) const {
  const std::vector<size_t>& sections = world_.sections_of(member.rank);
  const auto position = std::find(sections.begin(), sections.end(), member.section) - sections.begin();
  return messages_[messages_of_rank_.at(static_cast<size_t>(member.rank))[static_cast<size_t>(position)]];
}

const std::unordered_map<uint32_t, uint32_t>& ReplicaDigests::positions_in(uint32_t section) const {
  auto& positions = positions_[section];
  if (positions.empty()) {
    const std::vector<uint32_t>& keys = world_.sections()[section].keys;
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
    add_to(sum.begin, key, digest.substr(0, kBeginningBytes));
  }
  return sum;
}

bool ReplicaDigests::are_alike(const KeyClass& of_keys, const std::vector<const Member*>& members) const {
  const Message* before = &message_of(*members.front());
  const auto is_other = [&](const Member* member) { return &message_of(*member) != before; };
  if (std::none_of(members.begin(), members.end(), is_other)) return true;
  const ClassSum first = sum_of(of_keys, *members.front());
  std::unordered_set<const Message*> seen = {before};
  for (const Member* member : members) {
    if (seen.insert(&message_of(*member)).second && !(sum_of(of_keys, *member) == first)) return false;
  }
  return true;
}

std::optional<ReplicaDigests::Difference> ReplicaDigests::find_difference(
    uint32_t key, const std::vector<const Member*>& members) const {
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
    const size_t length = is_short || first_is_short ? kBeginningBytes : std::string_view::npos;
    if (other.substr(0, length) == of_first.substr(0, length)) continue;
    return Difference{key, first->rank, member->rank, std::string(of_first), std::string(other)};
  }
  return std::nullopt;
}

std::vector<ReplicaDigests::Difference> ReplicaDigests::differing() const {
  std::vector<Difference> differences;
  for (const KeyClass& of_keys : world_.classes()) {
    if (of_keys.trouble) continue;
    std::vector<std::vector<const Member*>> groups = replica_groups(world_, of_keys);
    std::erase_if(groups, [&](const auto& members) { return members.size() < 2 || are_alike(of_keys, members); });
    for (const uint32_t key : of_keys.keys) {
      for (const auto& members : groups) {
        if (auto difference = find_difference(key, members)) {
          differences.push_back(std::move(*difference));
          break;
        }
      }
    }
  }
  std::sort(differences.begin(), differences.end(),
            [](const Difference& a, const Difference& b) { return a.key < b.key; });
  return differences;
}

std::vector<uint32_t> ReplicaDigests::uncompared() const {
  std::vector<uint32_t> keys;
  for (const KeyClass& of_keys : world_.classes()) {
    if (of_keys.trouble || of_keys.is_plain || of_keys.replicas.size() < 2) continue;
    const auto groups = replica_groups(world_, of_keys);
    for (const uint32_t key : of_keys.keys) {
      const auto lacks = [&](const Member* member) {
        bool is_short = false;
        return digest_of(*member, key, is_short).empty();
      };
      const bool is_compared = std::none_of(groups.begin(), groups.end(), [&](const auto& members) {
        return std::any_of(members.begin(), members.end(), lacks);
      });
      if (!is_compared) keys.push_back(key);
    }
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace torchtitan_ext::core
