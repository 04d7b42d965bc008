#include "core/name_pattern.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Digits of a number that certainly fits into 64 bits.
constexpr size_t kMaxDigits = 18;

// The number that a text is written as, or nothing.
std::optional<int64_t> number_in(std::string_view text) {
  const bool is_number = !text.empty() && text.size() <= kMaxDigits && (text.size() == 1 || text[0] != '0') &&
                         std::ranges::all_of(text, [](char digit) { return digit >= '0' && digit <= '9'; });
  return is_number ? std::optional(std::stoll(std::string(text))) : std::nullopt;
}

}  // namespace

size_t NamePattern::read_shift(std::string_view text, std::string_view braces, Token& star) {
  const size_t end = braces.find('}');
  const bool has_sign = end != std::string_view::npos && end > 2 && (braces[1] == '+' || braces[1] == '-');
  const std::optional<int64_t> shift = has_sign ? number_in(braces.substr(2, end - 2)) : std::nullopt;
  TTE_CHECK(shift, "pattern", "got '", text, "', expected a number such as {+10} or {-10} behind the '*'");
  star.is_number = true;
  star.shift = braces[1] == '-' ? -*shift : *shift;
  return end + 1;
}

NamePattern::NamePattern(std::string_view text) : text_(text) {
  using Kind = Token::Kind;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text.substr(at, 2) == "**") {
      tokens_.push_back({Kind::kAny, ""});
      ++at;
      TTE_CHECK(text.substr(at + 1, 1) != "{", "pattern", "got '", text, "', expected '{' behind a single '*' only");
    } else if (text[at] == '*') {
      tokens_.push_back({Kind::kPart, ""});
      if (text.substr(at + 1, 1) == "{") at += read_shift(text, text.substr(at + 1), tokens_.back());
    } else if (text[at] == '#') {
      TTE_CHECK(!is_series_, "pattern", "got '", text, "', expected at most one '#'");
      tokens_.push_back({Kind::kNumber, ""});
      is_series_ = true;
    } else {
      if (tokens_.empty() || tokens_.back().kind != Kind::kText) tokens_.push_back({Kind::kText, ""});
      tokens_.back().text += text[at];
    }
  }
  num_stars_ = static_cast<size_t>(std::ranges::count_if(
      tokens_, [](const Token& token) { return token.kind == Kind::kPart || token.kind == Kind::kAny; }));
}

std::optional<NameMatch> NamePattern::match(std::string_view name) const {
  NameMatch found;
  std::vector<bool> failed;
  if (!match_from(0, name, name.size(), found, failed)) return std::nullopt;
  return found;
}

bool NamePattern::match_from(size_t token, std::string_view rest, size_t size, NameMatch& match,
                             std::vector<bool>& failed) const {
  if (token == tokens_.size()) return rest.empty();
  const Token::Kind kind = tokens_[token].kind;
  if (kind == Token::Kind::kText) {
    const std::string& text = tokens_[token].text;
    return rest.starts_with(text) && match_from(token + 1, rest.substr(text.size()), size, match, failed);
  }
  if (kind == Token::Kind::kNumber) {
    size_t digits = 0;
    while (digits < rest.size() && digits < kMaxDigits && rest[digits] >= '0' && rest[digits] <= '9') ++digits;
    if (digits == 0 || (digits > 1 && rest[0] == '0')) return false;
    match.number = std::stoll(std::string(rest.substr(0, digits)));
    return match_from(token + 1, rest.substr(digits), size, match, failed);
  }
  const size_t end = kind == Token::Kind::kAny ? rest.size() : std::min(rest.find('.'), rest.size());
  for (size_t length = 1; length <= end; ++length) {
    // A rest that the tokens behind a star do not stand for is met again from each earlier star: once is enough.
    const size_t place = token * (size + 1) + rest.size() - length;
    if (!failed.empty() && failed[place]) continue;
    std::string found(rest.substr(0, length));
    if (tokens_[token].is_number) {
      const std::optional<int64_t> number = number_in(found);
      if (!number || *number < tokens_[token].shift) continue;
      found = std::to_string(*number - tokens_[token].shift);
    }
    match.texts.push_back(std::move(found));
    if (match_from(token + 1, rest.substr(length), size, match, failed)) return true;
    match.texts.pop_back();
    if (num_stars_ > 1) {
      if (failed.empty()) failed.resize(tokens_.size() * (size + 1));
      failed[place] = true;
    }
  }
  return false;
}

std::vector<bool> NamePattern::numbers() const {
  std::vector<bool> stars;
  for (const Token& token : tokens_) {
    if (token.kind == Token::Kind::kPart || token.kind == Token::Kind::kAny) stars.push_back(token.is_number);
  }
  return stars;
}

void NamePattern::require_numbers(const std::vector<bool>& stars) {
  size_t star = 0;
  for (Token& token : tokens_) {
    if (token.kind != Token::Kind::kPart && token.kind != Token::Kind::kAny) continue;
    token.is_number = token.is_number || stars.at(star);
    ++star;
  }
}

std::string NamePattern::fill(const NameMatch& match) const {
  std::string name;
  size_t star = 0;
  for (const Token& token : tokens_) {
    if (token.kind == Token::Kind::kText) {
      name += token.text;
    } else if (token.kind == Token::Kind::kNumber) {
      name += std::to_string(match.number);
    } else if (token.shift == 0) {
      name += match.texts.at(star++);
    } else {
      const int64_t number = number_in(match.texts.at(star++)).value_or(0) + token.shift;
      TTE_CHECK(number >= 0, text_, "it gives the number ", number, " for ", match.texts.at(star - 1));
      name += std::to_string(number);
    }
  }
  return name;
}

}  // namespace torchtitan_ext::core
