// Bytes that ranks send each other while they plan: integers of variable length, one after the other.
//
// The reader trusts nothing. Every read is checked against the end of the message, and a count is refused where the
// message has fewer bytes left than that many items need, so nothing is allocated that the message does not back. What
// goes wrong is a WireError that names the message, the byte and the field.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

#include "core/chunk.h"

namespace torchtitan_ext::core {

class WireError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class WireWriter {
 public:
  // Seven bits a byte, the lowest first; the top bit says that more follow.
  void put(uint64_t value);
  // Small numbers of either sign take few bytes: 0, -1, 1, -2 become 0, 1, 2, 3.
  void put_signed(int64_t value);
  void put_sizes(const Sizes& sizes);  // how many, then each
  void put_string(std::string_view text);
  void append(std::string_view bytes) { bytes_.append(bytes); }

  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class WireReader {
 public:
  // `what` names the message in errors. The bytes must outlive the reader.
  WireReader(std::string_view bytes, std::string_view what) : bytes_(bytes), what_(what) {}

  uint64_t get(const char* field);
  int64_t get_signed(const char* field);
  // A number below `limit`.
  size_t get_index(const char* field, size_t limit);
  // How many items follow, each of at least `bytes_each` bytes.
  size_t get_count(const char* field, size_t bytes_each = 1);
  Sizes get_sizes(const char* field);
  std::string_view get_bytes(const char* field, size_t num_bytes);
  std::string_view get_string(const char* field);
  // Throws where bytes are left over.
  void finish() const;

  size_t num_left() const { return bytes_.size() - position_; }
  [[noreturn]] void fail(const char* field, const std::string& why) const;

 private:
  std::string_view bytes_;
  std::string_view what_;
  size_t position_ = 0;
};

}  // namespace torchtitan_ext::core
