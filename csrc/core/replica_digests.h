// Do ranks that should hold the same values hold the same? Found by digests that travel beside the key tables.
//
// A rank sends, per kind, either the different digests that there are and for each key which of them (a thousand step
// counters of one value are one digest), or, where nearly all differ, five bytes of each. Ranks are compared per class
// of keys by one 16-byte sum over its keys, which does not depend on their order; only where these differ are keys
// looked at.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "core/agreement.h"

namespace torchtitan_ext::core {

// The message of one section: the digest of each key, empty for a key that is not compared.
std::string encode_digests(const std::vector<uint32_t>& kind_of, size_t num_kinds,
                           const std::vector<std::string_view>& digests);

class ReplicaDigests {
 public:
  // After `world.agree`. The world must outlive this.
  explicit ReplicaDigests(const World& world)
      : world_(world), keys_of_kind_(world.sections().size()), positions_(world.sections().size()) {}

  // The number of a message about a section; an equal message about the same section is worth one call. Throws
  // WireError.
  size_t add_message(size_t section, std::string_view bytes);
  // The messages of the next rank, one per section of it.
  void add_rank(const std::vector<size_t>& messages);

  struct Difference {
    uint32_t key = 0;
    int64_t first = 0;  // ranks
    int64_t second = 0;
    std::string first_digest;  // empty for none
    std::string second_digest;
  };
  // One per key whose replicas differ, in the order of keys; keys of classes in trouble are left out.
  std::vector<Difference> differing() const;
  // Keys that stand for tensors on several meshes of which some rank sent no digest.
  std::vector<uint32_t> uncompared() const;

 private:
  using Sum = std::array<uint64_t, 2>;
  // Of the keys of one class in one message.
  struct ClassSum {
    Sum whole{};
    Sum begin{};  // of the first bytes only: a message that has no more can be compared with one that has
    uint32_t num_digests = 0;
    bool is_short = false;
    bool operator==(const ClassSum& other) const;
  };
  struct Message {
    size_t section = 0;
    std::string bytes;
    std::vector<std::string_view> digests;  // per key, into the bytes
    std::vector<bool> is_short;             // per key
  };

  const Message& message_of(const Member& member) const;
  std::string_view digest_of(const Member& member, uint32_t key, bool& is_short) const;
  std::optional<Difference> find_difference(uint32_t key, const std::vector<const Member*>& members) const;
  ClassSum sum_of(const KeyClass& of_keys, const Member& member) const;
  bool are_alike(const KeyClass& of_keys, const std::vector<const Member*>& members) const;
  const std::unordered_map<uint32_t, uint32_t>& positions_in(uint32_t section) const;

  const World& world_;
  std::deque<Message> messages_;  // a deque: views into their bytes stay
  std::vector<std::vector<size_t>> messages_of_rank_;
  std::vector<std::vector<std::vector<uint32_t>>> keys_of_kind_;           // per section, made when asked for
  mutable std::vector<std::unordered_map<uint32_t, uint32_t>> positions_;  // of keys in a section, made when asked for
};

}  // namespace torchtitan_ext::core
