#include "core/wire.h"

#include "core/check.h"

namespace torchtitan_ext::core {

void WireWriter::put(uint64_t value) {
  while (value >= 0x80) {
    bytes_.push_back(static_cast<char>(value | 0x80));
    value >>= 7;
  }
  bytes_.push_back(static_cast<char>(value));
}

void WireWriter::put_signed(int64_t value) {
  put((static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63));
}

void WireWriter::put_sizes(const Sizes& sizes) {
  put(sizes.size());
  for (const int64_t size : sizes) put_signed(size);
}

void WireWriter::put_string(std::string_view text) {
  put(text.size());
  bytes_.append(text);
}

uint64_t WireReader::get(const char* field) {
  uint64_t value = 0;
  for (int shift = 0; shift < 64; shift += 7) {
    if (position_ == bytes_.size()) fail(field, "the message ends here");
    const auto byte = static_cast<uint8_t>(bytes_[position_++]);
    if (shift == 63 && byte > 1) break;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
  fail(field, "a number of more than 64 bits");
}

int64_t WireReader::get_signed(const char* field) {
  const uint64_t value = get(field);
  return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1);
}

size_t WireReader::get_index(const char* field, size_t limit) {
  const uint64_t value = get(field);
  if (value >= limit) fail(field, concat("got ", value, ", expected less than ", limit));
  return static_cast<size_t>(value);
}

size_t WireReader::get_count(const char* field, size_t bytes_each) {
  const uint64_t count = get(field);
  if (count > num_left() / bytes_each) {
    fail(field, concat("got a count of ", count, ", and ", num_left(), " bytes are left"));
  }
  return static_cast<size_t>(count);
}

Sizes WireReader::get_sizes(const char* field) {
  Sizes sizes(get_count(field));
  for (int64_t& size : sizes) size = get_signed(field);
  return sizes;
}

std::string_view WireReader::get_bytes(const char* field, size_t num_bytes) {
  if (num_bytes > num_left()) fail(field, concat("got ", num_bytes, " bytes, and ", num_left(), " are left"));
  const std::string_view bytes = bytes_.substr(position_, num_bytes);
  position_ += num_bytes;
  return bytes;
}

std::string_view WireReader::get_string(const char* field) { return get_bytes(field, get_count(field)); }

void WireReader::finish() const {
  if (num_left() > 0) fail("end", concat(num_left(), " bytes are left over"));
}

void WireReader::fail(const char* field, const std::string& why) const {
  throw WireError(concat(what_, ": broken at byte ", position_, " (", field, "): ", why,
                         "; run the same version of torchtitan_ext on every rank"));
}

}  // namespace torchtitan_ext::core
