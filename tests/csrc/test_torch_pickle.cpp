// Reading a pickle of `torch.save` takes steps in proportion to its bytes, whatever it says. No other test has such pickles.
#include <gtest/gtest.h>

#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>

#include "core/torch_pickle.h"

namespace torchtitan_ext::core {
namespace {

using namespace std::string_literals;

std::string repeated(const std::string& part, size_t count) {
  std::string all;
  for (size_t index = 0; index < count; ++index) all += part;
  return all;
}

// Defines memo 0 as a name and memo 1 as a tuple of `num_arguments` numbers.
std::string with_arguments(const std::string& name, size_t num_arguments) {
  return "\x80\x04"s + "c" + name + "q\0"s + "(" + repeated("K\1", num_arguments) + "tq\1";
}

TEST(CheckPickleKeys, ArgumentsThatAreCalledAgainAndAgainAreCounted) {
  for (const std::string& call : {"h\0h\1\x81\x30"s, "h\0h\1R0"s, "h\0h\1h\1\x92\x30"s}) {
    // Honest: as many as such a pickle has bytes.
    check_pickle_keys(with_arguments("builtins\nint\n", 1'000) + repeated(call, 1'000) + "N.", 1);
    const std::string endless = with_arguments("builtins\nint\n", 400'000) + repeated(call, 400'000) + "N.";
    EXPECT_THROW(check_pickle_keys(endless, 1), std::invalid_argument);
  }
}

TEST(CheckPickleKeys, LongTextsThatAreReadAgainAndAgainAreCounted) {
  const std::string text = "X\0\0\x20\0"s + std::string(2 << 20, '1');
  const std::string endless =
      "\x80\x04"s + "cfractions\nFraction\nq\0"s + text + "\x85q\1" + repeated("h\0h\1R0"s, 200'000) + "N.";
  EXPECT_THROW(check_pickle_keys(endless, 1), std::invalid_argument);
}

TEST(FindPickledTensors, SizesAndNamesThatAreReadAgainAndAgainAreCounted) {
  const std::string name = "X\0\0\x10\0"s + std::string(1 << 20, 'n');
  const std::string storage = "(X\7\0\0\0storage"s + "ctorch\nFloatStorage\n" + name + "X\3\0\0\0cpu"s + "K\1tQ";
  const std::string endless = "\x80\x04"s + "ctorch._utils\n_rebuild_tensor_v2\nq\0"s + "(" + storage + "K\0))tq\1"s +
                              repeated("h\0h\1R0"s, 100'000) + "N.";
  try {
    find_pickled_tensors(endless);
    ADD_FAILURE() << "it was read";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("too long to read"), std::string::npos) << error.what();
  }
}

// Any operations, in any order, with what they need behind them as often as not: it ends, by an error or by itself.
TEST(CheckPickleKeys, RandomOperationsEnd) {
  static const std::string kOperations[] = {"(",
                                            "0",
                                            "1",
                                            "2",
                                            "N",
                                            "K\1"s,
                                            ")",
                                            "\x85",
                                            "\x86",
                                            "\x87",
                                            "t",
                                            "]",
                                            "l",
                                            "d",
                                            "}",
                                            "a",
                                            "e",
                                            "s",
                                            "u",
                                            "\x90",
                                            "\x8f",
                                            "\x91",
                                            "R",
                                            "\x81",
                                            "\x92",
                                            "b",
                                            "o",
                                            "h\0"s,
                                            "h\1",
                                            "h\2",
                                            "q\0"s,
                                            "q\1",
                                            "q\2",
                                            "\x94",
                                            "cbuiltins\nrange\n",
                                            "cfractions\nFraction\n",
                                            "cbuiltins\ndict\n",
                                            "X\3\0\0\0001e9"s,
                                            "J\xff\xff\xff\x7f",
                                            "G12345678"};
  const char* const factor = std::getenv("TTE_SOAK");
  const int num_rounds = 300 * (factor != nullptr ? std::max(1, std::atoi(factor)) : 1);
  std::mt19937 draw(5);
  int num_refused = 0;
  for (int round = 0; round < num_rounds; ++round) {
    std::string data = "\x80\x04"s + "N" + "q\0q\1q\2"s;
    // Of each round some operations alone, so that a few of them come together often.
    const size_t first = draw() % std::size(kOperations), count = 1 + draw() % std::size(kOperations);
    for (int step = 0; step < 5'000; ++step) data += kOperations[(first + draw() % count) % std::size(kOperations)];
    try {
      check_pickle_keys(data + "N.", 1);
    } catch (const std::invalid_argument&) {
      ++num_refused;
    }
  }
  EXPECT_LT(num_refused, num_rounds);
}

}  // namespace
}  // namespace torchtitan_ext::core
