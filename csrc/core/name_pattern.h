// Names of tensors by pattern, as transforms write them: "layers.*.experts.#.w1".
//
// "*" is text without a dot, at least one character; "**" is any text, of several parts perhaps; "#" is a number. A rule
// has a tensor per text that the stars stand for, and a series of tensors, 0, 1, 2, ..., where there is a "#".
// "*{+10}" is a number that is larger by 10 than what its star stands for: from "h.*" to "h.*{+10}", h.3 becomes h.13.
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
  // Throws std::invalid_argument for more than one "#", and for braces behind a star that are no "{+N}" or "{-N}".
  explicit NamePattern(std::string_view text);

  // The first way in which the pattern can stand for the name: earlier stars take as little as they can.
  std::optional<NameMatch> match(std::string_view name) const;
  // Whether each star stands for a number: the pattern adds to it.
  std::vector<bool> numbers() const;
  // From now on these stars stand for numbers only, as another pattern of the rule adds to them.
  void require_numbers(const std::vector<bool>& stars);

  // The name for these texts and this number. Throws std::invalid_argument if a number would be less than 0.
  std::string fill(const NameMatch& match) const;

  size_t num_stars() const { return num_stars_; }
  bool is_series() const { return is_series_; }
  const std::string& text() const { return text_; }

 private:
  struct Token {
    enum class Kind { kText, kPart, kAny, kNumber };
    Kind kind = Kind::kText;
    std::string text;
    bool is_number = false;  // of a star
    int64_t shift = 0;       // what is added to it
  };
  // Reads "{+10}" behind a star; how many characters it has.
  static size_t read_shift(std::string_view text, std::string_view braces, Token& star);
  // Whether the tokens from one on stand for the rest of a name of `size` characters. `failed` has a place per token and
  // length of a rest: which rests behind a star were tried. So the time is at most tokens * size^2 short steps.
  bool match_from(size_t token, std::string_view rest, size_t size, NameMatch& match, std::vector<bool>& failed) const;

  std::string text_;
  std::vector<Token> tokens_;
  size_t num_stars_ = 0;
  bool is_series_ = false;
};

}  // namespace torchtitan_ext::core
