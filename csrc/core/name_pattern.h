// Names of tensors by pattern, as transforms write them: "layers.*.experts.#.w1".
//
// "*" is text without a dot, at least one character; "**" is any text, of several parts perhaps; "#" is a number. A rule
// has a tensor per text that the stars stand for, and a series of tensors, 0, 1, 2, ..., where there is a "#".
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace torchtitan_ext::core {

struct NameMatch {
  std::vector<std::string> texts;  // what the stars stand for, in order
  int64_t number = 0;              // what the "#" stands for
};

class NamePattern {
 public:
  // Throws std::invalid_argument for more than one "#".
  explicit NamePattern(std::string_view text);

  // The first way in which the pattern can stand for the name: earlier stars take as little as they can.
  std::optional<NameMatch> match(std::string_view name) const;
  // The name for these texts and this number.
  std::string fill(const NameMatch& match) const;

  size_t num_stars() const { return num_stars_; }
  bool is_series() const { return is_series_; }
  const std::string& text() const { return text_; }

 private:
  struct Token {
    enum class Kind { kText, kPart, kAny, kNumber };
    Kind kind = Kind::kText;
    std::string text;
  };
  bool match_from(size_t token, std::string_view rest, NameMatch& match) const;

  std::string text_;
  std::vector<Token> tokens_;
  size_t num_stars_ = 0;
  bool is_series_ = false;
};

}  // namespace torchtitan_ext::core
