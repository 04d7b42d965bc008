#include "storage/tensor_pickle.h"

#include <limits>
#include <utility>

#include "storage/bytes.h"

namespace torchtitan_ext::storage {
namespace {

// Opcodes of protocol 2, by their names in Python's pickletools.
constexpr char kProto = '\x80', kGlobal = 'c', kMark = '(', kBinUnicode = 'X', kShortBinUnicode = '\x8c';
constexpr char kBinInt = 'J', kBinInt1 = 'K', kBinInt2 = 'M', kLong1 = '\x8a';
constexpr char kEmptyTuple = ')', kTuple = 't', kTuple1 = '\x85', kTuple2 = '\x86', kTuple3 = '\x87';
constexpr char kNewTrue = '\x88', kNewFalse = '\x89', kBinPersId = 'Q', kReduce = 'R', kStop = '.';
constexpr char kBinPut = 'q', kLongBinPut = 'r', kMemoize = '\x94', kFrame = '\x95';

constexpr std::string_view kRebuild = "torch._utils\n_rebuild_tensor_v2\n";
constexpr std::string_view kRebuildWithDtype = "torch._utils\n_rebuild_tensor_v3\n";
constexpr std::string_view kUntyped = "torch.storage\nUntypedStorage\n";
constexpr std::string_view kOrderedDict = "collections\nOrderedDict\n";

void put_text(ByteWriter& out, std::string_view text) { out.number(kBinUnicode).text(text); }

void put_global(ByteWriter& out, std::string_view module, std::string_view name) {
  out.number(kGlobal).raw(module).raw("\n").raw(name).raw("\n");
}

void put_int(ByteWriter& out, int64_t value) {
  if (value <= 0xff) {
    out.number(kBinInt1).number(static_cast<uint8_t>(value));
  } else if (value <= 0xffff) {
    out.number(kBinInt2).number(static_cast<uint16_t>(value));
  } else if (value <= std::numeric_limits<int32_t>::max()) {
    out.number(kBinInt).number(static_cast<int32_t>(value));
  } else {
    out.number(kLong1).number(uint8_t{8}).number(value);
  }
}

void put_tuple(ByteWriter& out, std::span<const int64_t> values) {
  constexpr char kShort[] = {kEmptyTuple, kTuple1, kTuple2, kTuple3};
  if (values.size() > 3) out.number(kMark);
  for (const int64_t value : values) put_int(out, value);
  out.number(values.size() > 3 ? kTuple : kShort[values.size()]);
}

// Walks a pickle opcode by opcode, past everything that only fills the memo. After the first thing that does not match
// `ok()` is false and nothing matches any more.
class Matcher {
 public:
  explicit Matcher(std::string_view bytes) : rest_(bytes) {}

  bool ok() const { return ok_; }
  char peek() {
    skip_memo();
    return ok_ && !rest_.empty() ? rest_[0] : '\0';
  }
  bool accept(char opcode) {
    if (peek() != opcode || rest_.empty()) return false;
    rest_.remove_prefix(1);
    return true;
  }
  void expect(char opcode) {
    if (!accept(opcode)) ok_ = false;
  }
  // Module and name, each with its newline.
  std::string_view global() {
    expect(kGlobal);
    const size_t module_end = rest_.find('\n');
    const size_t name_end = module_end == rest_.npos ? rest_.npos : rest_.find('\n', module_end + 1);
    return ok_ && name_end != rest_.npos ? take(name_end + 1) : fail();
  }
  void global(std::string_view expected) {
    if (global() != expected) ok_ = false;
  }
  std::string_view text() {
    if (accept(kShortBinUnicode)) return take(number<uint8_t>());
    expect(kBinUnicode);
    return take(number<uint32_t>());
  }
  int64_t integer() {
    if (accept(kBinInt1)) return number<uint8_t>();
    if (accept(kBinInt2)) return number<uint16_t>();
    if (accept(kBinInt)) return number<int32_t>();
    expect(kLong1);
    return long_integer(number<uint8_t>());
  }
  core::Sizes tuple() {
    core::Sizes values;
    if (accept(kEmptyTuple)) return values;
    const bool is_marked = accept(kMark);
    constexpr char kShort[] = {kTuple1, kTuple2, kTuple3};
    while (ok_ && values.size() <= kMaxDims) {
      values.push_back(integer());
      if (is_marked ? accept(kTuple) : values.size() <= 3 && accept(kShort[values.size() - 1])) return values;
      if (!is_marked && values.size() == 3) break;
    }
    ok_ = false;
    return {};
  }

 private:
  static constexpr size_t kMaxDims = 64;

  void skip_memo() {
    while (!rest_.empty()) {
      const char opcode = rest_[0];
      const size_t length = opcode == kBinPut || opcode == kProto ? 2
                            : opcode == kLongBinPut               ? 5
                            : opcode == kMemoize                  ? 1
                            : opcode == kFrame                    ? 9
                                                                  : 0;
      if (length == 0) return;
      if (length > rest_.size()) {
        fail();
        return;
      }
      rest_.remove_prefix(length);
    }
  }
  std::string_view take(size_t num_bytes) {
    if (!ok_ || num_bytes > rest_.size()) return fail();
    const std::string_view taken = rest_.substr(0, num_bytes);
    rest_.remove_prefix(num_bytes);
    return taken;
  }
  template <typename Number>
  Number number() {
    Number value = 0;
    const std::string_view raw = take(sizeof(Number));
    if (ok_) std::memcpy(&value, raw.data(), sizeof(Number));
    return value;
  }
  int64_t long_integer(size_t num_bytes) {
    const std::string_view raw = take(num_bytes);
    if (num_bytes > sizeof(int64_t)) ok_ = false;
    if (!ok_ || raw.empty()) return 0;
    int64_t value = raw.back() < 0 ? -1 : 0;  // two's complement, as many bytes as it needs
    std::memcpy(&value, raw.data(), raw.size());
    return value;
  }
  std::string_view fail() {
    ok_ = false;
    rest_ = {};
    return {};
  }

  std::string_view rest_;
  bool ok_ = true;
};

// "torch\nFloatStorage\n" -> "FloatStorage"; nothing for other modules.
std::optional<std::string> name_in_torch(std::string_view global) {
  constexpr std::string_view kModule = "torch\n";
  if (!global.starts_with(kModule) || global.size() < kModule.size() + 2) return std::nullopt;
  return std::string(global.substr(kModule.size(), global.size() - kModule.size() - 1));
}

}  // namespace

std::string pickle_tensor(const ElementType& type, std::span<const int64_t> sizes) {
  const int64_t num_elements = core::num_elements(sizes);
  const bool has_dtype = !type.dtype.empty();
  const core::Sizes strides = core::row_major_strides(sizes);
  ByteWriter out;
  out.number(kProto).number(uint8_t{2});
  out.number(kGlobal).raw(has_dtype ? kRebuildWithDtype : kRebuild).number(kMark).number(kMark);
  put_text(out, "storage");
  put_global(out, has_dtype ? "torch.storage" : "torch", type.storage_class);
  put_text(out, "0");
  put_text(out, "cpu");
  put_int(out, has_dtype ? core::checked_mul(num_elements, type.item_bytes) : num_elements);
  out.number(kTuple).number(kBinPersId);
  put_int(out, 0);
  put_tuple(out, sizes);
  put_tuple(out, strides);
  out.number(kNewFalse).number(kGlobal).raw(kOrderedDict).number(kEmptyTuple).number(kReduce);
  if (has_dtype) put_global(out, "torch", type.dtype);
  out.number(kTuple).number(kReduce).number(kStop);
  return out.take();
}

std::optional<PickledTensor> match_tensor_pickle(std::string_view bytes) {
  Matcher in(bytes);
  PickledTensor found;
  StoredTensor& tensor = found.tensor;
  const std::string_view rebuild = in.global();
  const bool has_dtype = rebuild == kRebuildWithDtype;
  if (!has_dtype && rebuild != kRebuild) return std::nullopt;
  in.expect(kMark);
  in.expect(kMark);
  if (in.text() != "storage") return std::nullopt;
  const std::string_view storage = in.global();
  tensor.type.storage_class = storage == kUntyped ? "UntypedStorage" : name_in_torch(storage).value_or("");
  if (tensor.type.storage_class.empty() || has_dtype != (storage == kUntyped)) return std::nullopt;
  found.storage_key = in.text();
  in.text();  // where the storage was; it is on the CPU now
  in.integer();
  in.expect(kTuple);
  in.expect(kBinPersId);
  tensor.storage_offset = in.integer();
  tensor.sizes = in.tuple();
  tensor.strides = in.tuple();
  if (in.peek() == kNewTrue) {
    in.accept(kNewTrue);
  } else {
    in.expect(kNewFalse);
  }
  in.global(kOrderedDict);
  in.expect(kEmptyTuple);
  in.expect(kReduce);
  if (has_dtype) tensor.type.dtype = name_in_torch(in.global()).value_or("");
  in.expect(kTuple);
  in.expect(kReduce);
  in.expect(kStop);
  if (!in.ok() || tensor.sizes.size() != tensor.strides.size() || (has_dtype && tensor.type.dtype.empty())) {
    return std::nullopt;
  }
  for (const int64_t size : tensor.sizes) {
    if (size < 0) return std::nullopt;
  }
  for (const int64_t stride : tensor.strides) {
    if (stride < 0) return std::nullopt;
  }
  if (tensor.storage_offset < 0) return std::nullopt;
  return found;
}

}  // namespace torchtitan_ext::storage
