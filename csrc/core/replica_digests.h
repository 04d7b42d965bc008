// Do ranks that should hold the same values hold the same? Found by digests that travel beside the key tables.
//
// A rank sends, per kind, either the different digests that there are and for each key which of them (a thousand step
// counters of one value are one digest), or, where nearly all differ, five bytes of each. What is shorter than 16 bytes
// is no digest but a value (a step counter) and travels whole. Ranks are compared per class of keys by one 16-byte sum
// over its keys, which does not depend on their order; only where these differ are keys looked at.
//
// Which ranks should hold the same? Of an object and of a plain tensor all that have the key. Of a tensor on a mesh those
// that its placements make replicas; and, where the key is a tensor on each of several meshes, those with equal boxes on
// all of them, which is presumed: FSDP2 over TP holds so what its TP plan leaves out, and hand-made TP what it cut.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/agreement.h"

namespace torchtitan_ext::core {

// The message of one section: the digest of each key, empty for a key that is not compared.
std::string encode_digests(const std::vector<uint32_t>& kind_of, size_t num_kinds,
                           const std::vector<std::string_view>& digests);

class ReplicaDigests {
 public:
  // After `joint.agree`. The table must outlive this.
  explicit ReplicaDigests(const JointTable& joint)
      : joint_(joint), keys_of_kind_(joint.sections().size()), positions_(joint.sections().size()) {}

  // The number of a message about a section; an equal message about the same section is worth one call. Throws
  // WireError.
  size_t add_message(size_t section, std::string_view bytes);
  // The messages of the next rank, one per section of it.
  void add_rank(const std::vector<size_t>& messages);

  struct Side {
    int64_t rank = 0;
    std::string digest;   // empty for none
    bool is_cut = false;  // the digest is the beginning of one
  };
  struct Difference {
    uint32_t key = 0;
    Side first;
    Side second;
    bool is_presumed = false;  // the ranks are on different meshes, and replicas by presumption only
  };
  // Keys in increasing order; those of classes in trouble are left out.
  struct Comparison {
    std::vector<Difference> differing;  // one per key
    // Keys of tensors on several meshes: those that every rank may write, because all hold the same in the same layout;
    std::vector<uint32_t> equal;
    // and those that cannot be compared: their layouts differ, or some rank sent no digest.
    std::vector<uint32_t> uncompared;
  };
  Comparison compare() const;

 private:
  using Sum = std::array<uint64_t, 2>;
  // Of the keys of one class in one message.
  struct ClassSum {
    Sum whole{};
    Sum begin{};  // of digests the first bytes only: a message that has no more can be compared with one that has
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

  // Members of a class that should hold the same.
  struct Group {
    std::vector<const Member*> members;
    std::vector<size_t> ends;  // of those of each replica
  };

  std::vector<Group> groups_of(const KeyClass& of_keys) const;
  void compare(const KeyClass& of_keys, Comparison& found) const;
  const Message& message_of(const Member& member) const;
  std::string_view digest_of(const Member& member, uint32_t key, bool& is_short) const;
  std::optional<Difference> find_difference(uint32_t key, std::span<const Member* const> members) const;
  std::optional<Difference> find_difference(uint32_t key, const std::vector<const Group*>& groups) const;
  bool has_digest(const Member& member, uint32_t key) const;
  bool is_lacking(uint32_t key, const std::vector<Group>& groups) const;
  ClassSum sum_of(const KeyClass& of_keys, const Member& member) const;
  // Whether all have equal digests, and a digest of every key.
  std::pair<bool, bool> look_at(const KeyClass& of_keys, const Group& group, bool counts_digests) const;
  const std::unordered_map<uint32_t, uint32_t>& positions_in(uint32_t section) const;

  const JointTable& joint_;
  std::deque<Message> messages_;  // a deque: views into their bytes stay
  std::vector<std::vector<size_t>> messages_of_rank_;
  std::vector<std::vector<std::vector<uint32_t>>> keys_of_kind_;           // per section, made when asked for
  mutable std::vector<std::unordered_map<uint32_t, uint32_t>> positions_;  // of keys in a section, made when asked for
};

}  // namespace torchtitan_ext::core
