// Little-endian numbers and texts, written to and read from a buffer. The reader checks every bound.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "storage/errors.h"

namespace torchtitan_ext::storage {

static_assert(std::endian::native == std::endian::little, "the format is little-endian, and so is every GPU host");

class ByteWriter {
 public:
  template <typename Number>
  ByteWriter& number(Number value) {
    static_assert(std::is_integral_v<Number>);
    char raw[sizeof(Number)];
    std::memcpy(raw, &value, sizeof(Number));
    bytes_.append(raw, sizeof(Number));
    return *this;
  }
  ByteWriter& raw(std::string_view bytes) {
    bytes_.append(bytes);
    return *this;
  }
  // Its length as u32, then the bytes.
  ByteWriter& text(std::string_view bytes) { return number(static_cast<uint32_t>(bytes.size())).raw(bytes); }
  ByteWriter& pad_to(size_t multiple) {
    bytes_.append((multiple - bytes_.size() % multiple) % multiple, '\0');
    return *this;
  }

  size_t size() const { return bytes_.size(); }
  const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads `bytes`, which begin at byte `base` of the file that `where` names. Throws FormatError.
class ByteReader {
 public:
  ByteReader(std::string_view bytes, std::string where, int64_t base = 0)
      : bytes_(bytes), where_(std::move(where)), base_(base) {}

  template <typename Number>
  Number number() {
    Number value;
    std::memcpy(&value, raw(sizeof(Number)).data(), sizeof(Number));
    return value;
  }
  std::string_view raw(uint64_t num_bytes) {
    if (num_bytes > bytes_.size() - position_) {
      throw_format_error(where_, byte(), "ends too early: ", bytes_.size() - position_, " bytes are left, expected ",
                         num_bytes);
    }
    const std::string_view taken = bytes_.substr(position_, num_bytes);
    position_ += num_bytes;
    return taken;
  }
  std::string_view text() { return raw(number<uint32_t>()); }
  // A count of things that take at least `item_bytes` each: never more than the bytes that are left.
  uint64_t count(uint64_t value, uint64_t item_bytes) {
    if (value > left() / item_bytes)
      throw_format_error(where_, byte(), "says ", value, " entries, has no room for them");
    return value;
  }

  uint64_t left() const { return bytes_.size() - position_; }
  int64_t byte() const { return base_ + static_cast<int64_t>(position_); }
  const std::string& where() const { return where_; }

 private:
  std::string_view bytes_;
  std::string where_;
  int64_t base_;
  uint64_t position_ = 0;
};

}  // namespace torchtitan_ext::storage
