// Takes a plain value apart: None, numbers, texts, and tuples, lists and dicts of them.
#pragma once

#include <cstdint>
#include <string_view>

namespace torchtitan_ext::core {

enum class PlainKind : uint8_t { kNone, kBool, kInt, kFloat, kText, kBytes, kTuple, kList, kDict, kSame };

class PlainSink {
 public:
  virtual ~PlainSink() = default;
  virtual void none() = 0;
  virtual void boolean(bool value) = 0;
  virtual void integer(int64_t value) = 0;
  virtual void number(double value) = 0;
  virtual void text(std::string_view utf8) = 0;
  virtual void bytes(std::string_view value) = 0;
  // A kTuple, kList or kDict and its members, keys and values in turn.
  virtual void begin(PlainKind kind, size_t num_members) = 0;
  virtual void end(PlainKind kind, size_t num_members) = 0;
  // The container that has just ended, to stand in other places too: a number for `same`.
  virtual uint32_t share() = 0;
  virtual void same(uint32_t shared) = 0;
};

}  // namespace torchtitan_ext::core
