#include "core/pickle_writer.h"

#include <bit>
#include <utility>

namespace torchtitan_ext::core {
namespace {

static_assert(std::endian::native == std::endian::little, "pickles are little-endian, and so is every GPU host");

constexpr size_t kFrameBytes = 64 << 10;  // as CPython's own pickler

}  // namespace

PickleWriter::PickleWriter() : out_("\x80\x04"), frame_(2 * kFrameBytes) {}  // PROTO 4

void PickleWriter::integer(int64_t value) {
  if (value >= 0 && value <= UINT8_MAX) {
    byte('K');  // BININT1
    byte(static_cast<uint8_t>(value));
  } else if (value >= 0 && value <= UINT16_MAX) {
    byte('M');  // BININT2
    little_endian(static_cast<uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    byte('J');  // BININT
    little_endian(static_cast<int32_t>(value));
  } else {
    byte(0x8a);  // LONG1
    byte(8);
    little_endian(value);
  }
}

void PickleWriter::number(double value) {
  byte('G');  // BINFLOAT, big-endian
  const auto bits = std::bit_cast<uint64_t>(value);
  for (int shift = 56; shift >= 0; shift -= 8) byte(static_cast<uint8_t>(bits >> shift));
}

void PickleWriter::bytes(std::string_view value) {
  byte(0x8e);  // BINBYTES8
  little_endian(static_cast<uint64_t>(value.size()));
  raw(value);
}

uint32_t PickleWriter::shared_text(std::string_view utf8, bool is_frequent) {
  const auto [known, is_new] = texts_.try_emplace(std::string(utf8), 0);
  if (!is_new) {
    get(known->second);
    return known->second;
  }
  if (utf8.size() <= UINT8_MAX) {
    byte(0x8c);  // SHORT_BINUNICODE
    byte(static_cast<uint8_t>(utf8.size()));
  } else {
    byte(0x8d);  // BINUNICODE8
    little_endian(static_cast<uint64_t>(utf8.size()));
  }
  raw(utf8);
  return known->second = put(is_frequent);
}

void PickleWriter::begin(PlainKind kind, size_t num_members) {
  if (kind == PlainKind::kList) op(PickleOp::kEmptyList);
  if (kind == PlainKind::kDict) op(PickleOp::kEmptyDict);
  if (num_members > 0) op(PickleOp::kMark);
}

void PickleWriter::end(PlainKind kind, size_t num_members) {
  if (kind == PlainKind::kTuple) {
    op(num_members > 0 ? PickleOp::kTuple : PickleOp::kEmptyTuple);
  } else if (num_members > 0) {
    op(kind == PlainKind::kList ? PickleOp::kAppends : PickleOp::kSetItems);
  }
}

uint32_t PickleWriter::put(bool is_frequent) {
  if (is_frequent && next_short_ < 256) {
    byte('q');  // BINPUT
    byte(static_cast<uint8_t>(next_short_));
    return next_short_++;
  }
  byte('r');  // LONG_BINPUT
  little_endian(next_long_);
  return next_long_++;
}

void PickleWriter::get(uint32_t number) {
  if (number < 256) {
    byte('h');  // BINGET
    byte(static_cast<uint8_t>(number));
  } else {
    byte('j');  // LONG_BINGET
    little_endian(number);
  }
}

void PickleWriter::end_large_frame() {
  if (num_in_frame_ >= kFrameBytes) end_frame();
}

std::string PickleWriter::take() {
  op(PickleOp::kStop);
  end_frame();
  return std::move(out_);
}

void PickleWriter::end_frame() {
  const uint64_t num_bytes = std::exchange(num_in_frame_, 0);
  out_.push_back(static_cast<char>(0x95));  // FRAME
  out_.append(reinterpret_cast<const char*>(&num_bytes), sizeof(num_bytes));
  out_.append(frame_.data(), num_bytes);
}

}  // namespace torchtitan_ext::core
