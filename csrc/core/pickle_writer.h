// Writes a pickle stream of protocol 4, which every Python from 3.4 on loads.
//
// The memo has 256 short numbers, for what stands in the stream again and again; the others take four bytes more. Texts
// that were written before are taken from the memo.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torchtitan_ext::core {

enum class PickleOp : uint8_t {
  kMark = '(',
  kStop = '.',
  kEmptyTuple = ')',
  kTuple1 = 0x85,
  kTuple = 't',
  kEmptyList = ']',
  kAppends = 'e',
  kEmptyDict = '}',
  kSetItems = 'u',
  kReduce = 'R',
  kNewObject = 0x81,
  kBuild = 'b',
  kStackGlobal = 0x93,
};

// The kinds of plain values: None, numbers, texts, and tuples, lists and dicts of them. In the tables of an index kSame
// stands for a container that was there before.
enum class PlainKind : uint8_t { kNone, kBool, kInt, kFloat, kText, kBytes, kTuple, kList, kDict, kSame };

class PickleWriter {
 public:
  PickleWriter();

  void none() { byte('N'); }
  void boolean(bool value) { byte(value ? 0x88 : 0x89); }
  void integer(int64_t value);
  void number(double value);
  void text(std::string_view utf8) { shared_text(utf8, false); }
  void bytes(std::string_view value);
  // A kTuple, kList or kDict and its members, keys and values in turn.
  void begin(PlainKind kind, size_t num_members);
  void end(PlainKind kind, size_t num_members);

  void op(PickleOp operation) { byte(static_cast<uint8_t>(operation)); }
  // The number of a text in the memo; writes it, or what takes it from there.
  uint32_t shared_text(std::string_view utf8, bool is_frequent);
  // Remembers the value on top of the stack under a number, a short one for what is frequent, and takes it from there.
  uint32_t put(bool is_frequent);
  void get(uint32_t number);
  // To be called between values now and then: readers take in a frame at a time.
  void end_large_frame();
  // Ends the stream.
  std::string take();

 private:
  void byte(uint8_t value) {
    if (num_in_frame_ == frame_.size()) frame_.resize(2 * frame_.size());
    frame_[num_in_frame_++] = static_cast<char>(value);
  }
  void raw(std::string_view bytes) {
    while (frame_.size() - num_in_frame_ < bytes.size()) frame_.resize(2 * frame_.size());
    bytes.copy(frame_.data() + num_in_frame_, bytes.size());
    num_in_frame_ += bytes.size();
  }
  template <typename Number>
  void little_endian(Number value) {
    raw({reinterpret_cast<const char*>(&value), sizeof(Number)});
  }
  void end_frame();

  std::string out_;          // frames that have ended
  std::vector<char> frame_;  // room for one, of which a part is taken
  size_t num_in_frame_ = 0;
  uint32_t next_short_ = 0;
  uint32_t next_long_ = 256;
  std::unordered_map<std::string, uint32_t> texts_;
};

}  // namespace torchtitan_ext::core
