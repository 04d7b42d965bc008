// Casts of elements against a slow oracle in float64, and boxes that are cast while they are read.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "storage/casts.h"
#include "storage/digest.h"
#include "storage/element_types.h"
#include "storage/file.h"
#include "storage/run_reader.h"

namespace torchtitan_ext::storage {
namespace {

// A dtype, by the bits of its exponent and fraction. Of float8_e4m3fn only the greatest magnitude is no number.
struct Float {
  std::string name;
  int item_bytes;
  int exponent_bits;
  int fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int least_exponent() const { return 1 - bias(); }
  double infinity() const { return std::ldexp(1.0, bias() + 1); }  // the first power of two that is out of range

  double number(uint64_t bits) const {
    const uint64_t fraction = bits & ((uint64_t{1} << fraction_bits) - 1);
    const int exponent = static_cast<int>(bits >> fraction_bits & ((uint64_t{1} << exponent_bits) - 1));
    const bool is_negative = (bits >> (8 * item_bytes - 1)) != 0;
    double magnitude = std::ldexp(static_cast<double>(fraction), least_exponent() - fraction_bits);
    if (exponent > 0) {
      magnitude =
          std::ldexp(static_cast<double>(fraction + (uint64_t{1} << fraction_bits)), exponent - bias() - fraction_bits);
    }
    if (name == "float8_e4m3fn") {
      if (exponent == 15 && fraction == 7) magnitude = std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == (1 << exponent_bits) - 1) {
      magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    }
    return is_negative ? -magnitude : magnitude;
  }

  // The nearest number that it has, of two the one with an even fraction.
  double nearest(double value) const {
    if (value == 0 || !std::isfinite(value)) return value;
    int exponent = 0;
    std::frexp(value, &exponent);  // value is less than 2^exponent
    const int step = std::max(exponent - 1, least_exponent()) - fraction_bits;
    const double rounded = std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
    if (std::abs(rounded) < infinity()) return std::copysign(rounded, value);
    return std::copysign(std::numeric_limits<double>::infinity(), value);
  }
};

const std::vector<Float> kSources{{"float8_e4m3fn", 1, 4, 3}, {"float8_e5m2", 1, 5, 2}, {"float16", 2, 5, 10},
                                  {"bfloat16", 2, 8, 7},      {"float32", 4, 8, 23},    {"float64", 8, 11, 52}};
const std::vector<Float> kTargets(kSources.begin() + 2, kSources.end());
const Float& kFloat32 = kSources[4];

uint64_t bits_at(const char* at, int item_bytes) {
  uint64_t bits = 0;
  std::memcpy(&bits, at, static_cast<size_t>(item_bytes));
  return bits;
}

// All elements of a dtype of up to two bytes; of others random bits, and numbers around those where rounding, range and
// subnormals of some target begin.
std::vector<uint64_t> elements_of(const Float& type) {
  std::vector<uint64_t> elements;
  if (type.item_bytes <= 2) {
    elements.resize(size_t{1} << (8 * type.item_bytes));
    std::iota(elements.begin(), elements.end(), uint64_t{0});
    return elements;
  }
  const auto add = [&](uint64_t bits) {
    const uint64_t sign = uint64_t{1} << (8 * type.item_bytes - 1);
    elements.push_back(bits & (sign - 1));
    elements.push_back((bits & (sign - 1)) | sign);
  };
  const auto add_near = [&](double value) {
    const uint64_t bits =
        type.item_bytes == 8 ? std::bit_cast<uint64_t>(value) : std::bit_cast<uint32_t>(static_cast<float>(value));
    for (const uint64_t near : {bits - 1, bits, bits + 1}) add(near);
  };
  std::mt19937_64 random(3);
  for (int index = 0; index < 50'000; ++index) add(random());
  for (const Float& target : kTargets) {
    const double half_step = std::ldexp(0.5, -target.fraction_bits);
    add_near(std::ldexp(2 - half_step, target.bias()));  // the least one that becomes infinite
    const int least_step = target.least_exponent() - target.fraction_bits;
    for (const int exponent : {least_step - 1, least_step, target.least_exponent(), 0, target.bias()}) {
      for (int index = 0; index < 500; ++index) {  // numbers of the target, and the middle between two of them
        const auto num_steps = static_cast<double>(random() % (uint64_t{1} << (target.fraction_bits + 1)));
        add_near(std::ldexp(1 + num_steps * half_step, exponent));
      }
    }
  }
  const uint64_t infinity = ((uint64_t{1} << type.exponent_bits) - 1) << type.fraction_bits;
  const uint64_t quiet = uint64_t{1} << (type.fraction_bits - 1);
  for (const uint64_t bits : {uint64_t{0}, uint64_t{1}, infinity - 1, infinity, infinity + 1, infinity + quiet}) {
    add(bits);
  }
  return elements;
}

bool are_equal(double left, double right) {
  if (std::isnan(left) || std::isnan(right)) return std::isnan(left) && std::isnan(right);
  return left == right && std::signbit(left) == std::signbit(right);
}

double cast_by_oracle(double value, const Float& source, const Float& target) {
  if (source.name == "float64") value = kFloat32.nearest(value);
  return target.nearest(value);
}

TEST(Casts, EveryNumberBecomesTheNearestOneWhateverTheStridesAndTheProcessor) {
  for (size_t source_index = 0; source_index < kSources.size(); ++source_index) {
    const Float& source = kSources[source_index];
    const std::vector<uint64_t> elements = elements_of(source);
    const auto count = static_cast<int64_t>(elements.size());
    for (size_t target_index = 0; target_index < kTargets.size(); ++target_index) {
      const Float& target = kTargets[target_index];
      if (source.name == target.name) continue;
      for (const Cast* cast :
           {find_cast(source.name, target.name), &kBaselineCasts.casts[source_index][target_index]}) {
        ASSERT_NE(cast, nullptr);
        ASSERT_EQ(cast->src_bytes, source.item_bytes);
        ASSERT_EQ(cast->dst_bytes, target.item_bytes);
        for (const int gap : {0, 3}) {
          const int src_stride = source.item_bytes + gap, dst_stride = target.item_bytes + gap;
          std::vector<char> src(elements.size() * static_cast<size_t>(src_stride) + 1);
          std::vector<char> dst(elements.size() * static_cast<size_t>(dst_stride) + 1);
          for (size_t index = 0; index < elements.size(); ++index) {  // from an odd address on
            std::memcpy(&src[1 + index * static_cast<size_t>(src_stride)], &elements[index],
                        static_cast<size_t>(source.item_bytes));
          }
          const char* const lost = cast->copy(dst.data() + 1, dst_stride, src.data() + 1, src_stride, count);
          const char* first_lost = nullptr;
          for (size_t index = 0; index < elements.size(); ++index) {
            const double value = source.number(elements[index]);
            const double expected = cast_by_oracle(value, source, target);
            const char* const at = &dst[1 + index * static_cast<size_t>(dst_stride)];
            const double result = target.number(bits_at(at, target.item_bytes));
            ASSERT_TRUE(are_equal(result, expected))
                << source.name << " " << value << " to " << target.name << ": " << result << ", expected " << expected;
            const char* const element = &src[1 + index * static_cast<size_t>(src_stride)];
            const bool is_lost = std::isfinite(value) && std::isinf(expected);
            char alone[8];
            ASSERT_EQ(cast->copy(alone, 0, element, 0, 1), is_lost ? element : nullptr) << value;
            ASSERT_TRUE(are_equal(cast->number(element), value));
            if (first_lost == nullptr && is_lost) first_lost = element;
          }
          ASSERT_EQ(lost, first_lost) << source.name << " to " << target.name;
        }
      }
    }
  }
}

TEST(Casts, OthersAreNotKnown) {
  EXPECT_EQ(find_cast("float32", "float32"), nullptr);
  EXPECT_EQ(find_cast("float32", "float8_e4m3fn"), nullptr);
  EXPECT_EQ(find_cast("float32", "int32"), nullptr);
  EXPECT_EQ(find_cast("int32", "float32"), nullptr);
  EXPECT_EQ(find_cast("", ""), nullptr);
}

class CastBoxes : public testing::Test {
 protected:
  CastBoxes() {
    std::string name = (std::filesystem::temp_directory_path() / "tte_casts_XXXXXX").string();
    folder_ = ::mkdtemp(name.data());
  }
  ~CastBoxes() override { std::filesystem::remove_all(folder_); }

  // Writes a file of these bytes. With blocks, as if they had checksums.
  int64_t add(RunReader& reader, const std::string& bytes, int64_t block_bytes) {
    const std::string path = (folder_ / "file").string();
    File file = File::create(path);
    std::string content = bytes;
    iovec piece{content.data(), content.size()};
    file.write_at({&piece, 1}, 0);
    file.close();
    FileChecksums checksums{block_bytes, static_cast<int64_t>(bytes.size()), {}};
    for (size_t begin = 0; block_bytes > 0 && begin < bytes.size(); begin += static_cast<size_t>(block_bytes)) {
      checksums.checksums.push_back(digest_of(std::string_view(bytes).substr(begin, static_cast<size_t>(block_bytes))));
    }
    return reader.add_file(File::open(path), -1, std::move(checksums));
  }

  std::filesystem::path folder_;
};

TEST_F(CastBoxes, ElementsThatBlocksCutArePutTogether) {
  std::mt19937_64 random(7);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution(low, high)(random); };
  const std::vector<int64_t> block_sizes{0, 1, 2, 3, 4, 7, 8, 64, 1000};
  for (int round = 0; round < 600; ++round) {
    const Float& source = kSources[static_cast<size_t>(pick(0, 5))];
    const Float& target = kTargets[static_cast<size_t>(pick(0, 3))];
    const Cast* const cast = find_cast(source.name, target.name);
    if (cast == nullptr) continue;
    const bool has_long_runs = round % 20 == 3;
    const core::Sizes sizes{pick(1, 6), pick(1, 5), pick(1, has_long_runs ? 6000 : 40)};
    const core::Sizes stored{sizes[0] + pick(0, 1), sizes[1] + pick(0, 2), sizes[2] + pick(0, 2)};
    const core::Sizes offsets{stored[0] - sizes[0], stored[1] - sizes[1], stored[2] - sizes[2]};
    const core::Sizes file_strides = core::row_major_strides(stored);
    core::Sizes order{0, 1, 2}, strides(3);
    std::ranges::shuffle(order, random);
    int64_t num_items = 1;
    for (const int64_t dim : order) {
      strides[static_cast<size_t>(dim)] = num_items;
      num_items *= sizes[static_cast<size_t>(dim)] + pick(0, 1);
    }
    const int64_t data_offset = pick(0, 20);
    std::string bytes(static_cast<size_t>(data_offset + stored[0] * file_strides[0] * source.item_bytes), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    RunReader reader;
    const int64_t file = add(reader, bytes, has_long_runs ? 100'001 : block_sizes[static_cast<size_t>(pick(0, 8))]);
    std::string plain(bytes.size(), 'x');  // the same bytes as they are, added before the box or behind it
    const auto add_plain = [&](int in_rounds) {
      if (round % 4 != in_rounds) return;
      reader.add_bytes(file, 0, std::ssize(bytes), reinterpret_cast<uintptr_t>(plain.data()));
    };
    add_plain(0);
    std::string memory(static_cast<size_t>(num_items * target.item_bytes), 'x');
    reader.add_box(file, {data_offset, source.item_bytes, stored, file_strides, offsets, sizes,
                          reinterpret_cast<uintptr_t>(memory.data()), strides, cast});
    const Verify verify = pick(0, 1) == 0 ? Verify::kNone : Verify::kAll;
    add_plain(1);
    ASSERT_TRUE(reader.read(static_cast<int>(pick(1, 3)), verify).empty());
    ASSERT_EQ(plain, round % 4 <= 1 ? bytes : std::string(bytes.size(), 'x'));
    int64_t num_right = 0;
    bool is_lost = false;
    for (int64_t i = 0; i < sizes[0]; ++i) {
      for (int64_t j = 0; j < sizes[1]; ++j) {
        for (int64_t k = 0; k < sizes[2]; ++k) {
          const int64_t from = (i + offsets[0]) * file_strides[0] + (j + offsets[1]) * file_strides[1] + k + offsets[2];
          const int64_t to = i * strides[0] + j * strides[1] + k * strides[2];
          const double value =
              source.number(bits_at(bytes.data() + data_offset + from * source.item_bytes, source.item_bytes));
          const double result = target.number(bits_at(memory.data() + to * target.item_bytes, target.item_bytes));
          const double expected = cast_by_oracle(value, source, target);
          num_right += are_equal(result, expected) ? 1 : 0;
          is_lost = is_lost || (std::isfinite(value) && std::isinf(expected));
        }
      }
    }
    ASSERT_EQ(num_right, sizes[0] * sizes[1] * sizes[2]) << source.name << " to " << target.name;
    ASSERT_EQ(reader.lost().contains(0), is_lost);
  }
}

TEST_F(CastBoxes, LostNumbersAreThoseOfTheLastReadByTheirBoxes) {
  const std::vector<float> values{1, -1e30F, std::numeric_limits<float>::infinity(), 2};
  RunReader reader;
  const int64_t file = add(reader, std::string(reinterpret_cast<const char*>(values.data()), 16), 6);
  std::vector<uint16_t> memory(4);
  const auto add_part = [&](int64_t offset, int64_t size) {
    return reader.add_box(
        file, {0, 4, core::Sizes{4}, core::Sizes{1}, core::Sizes{offset}, core::Sizes{size},
               reinterpret_cast<uintptr_t>(memory.data() + offset), core::Sizes{1}, find_cast("float32", "float16")});
  };
  EXPECT_EQ(add_part(0, 0), 0);
  EXPECT_EQ(add_part(0, 1), 1);
  EXPECT_EQ(add_part(1, 1), 2);
  EXPECT_EQ(add_part(2, 2), 3);
  EXPECT_TRUE(reader.read(2, Verify::kNone).empty());
  EXPECT_EQ(memory, (std::vector<uint16_t>{0x3c00, 0xfc00, 0x7c00, 0x4000}));
  EXPECT_EQ(reader.lost(), (std::map<int64_t, double>{{2, -1e30F}}));
  EXPECT_EQ(add_part(2, 2), 0);
  EXPECT_TRUE(reader.read(2, Verify::kNone).empty());
  EXPECT_TRUE(reader.lost().empty());
  add_part(1, 1);
  EXPECT_TRUE(reader.read(2, Verify::kNone).empty());
  EXPECT_EQ(reader.lost().size(), 1u);
  EXPECT_THROW(reader.read(0, Verify::kNone), std::invalid_argument);
  EXPECT_TRUE(reader.lost().empty());
  float plain = 0;  // where elements of the last box were cast
  reader.add_bytes(file, 4, 4, reinterpret_cast<uintptr_t>(&plain));
  EXPECT_TRUE(reader.read(2, Verify::kNone).empty());
  EXPECT_EQ(plain, -1e30F);
}

}  // namespace
}  // namespace torchtitan_ext::storage
