#include "core/name_pattern.h"

#include <algorithm>

#include "core/check.h"

namespace torchtitan_ext::core {
namespace {

// Digits of a number that certainly fits into 64 bits.
constexpr size_t kMaxDigits = 18;

}  // namespace

NamePattern::NamePattern(std::string_view text) : text_(text) {
  using Kind = Token::Kind;
  for (size_t at = 0; at < text.size(); ++at) {
    if (text.substr(at, 2) == "**") {
      tokens_.push_back({Kind::kAny, ""});
      ++at;
    } else if (text[at] == '*') {
      tokens_.push_back({Kind::kPart, ""});
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
  if (!match_from(0, name, found)) return std::nullopt;
  return found;
}

bool NamePattern::match_from(size_t token, std::string_view rest, NameMatch& match) const {
  if (token == tokens_.size()) return rest.empty();
  const auto& [kind, text] = tokens_[token];
  if (kind == Token::Kind::kText) {
    return rest.starts_with(text) && match_from(token + 1, rest.substr(text.size()), match);
  }
  if (kind == Token::Kind::kNumber) {
    size_t digits = 0;
    while (digits < rest.size() && digits < kMaxDigits && rest[digits] >= '0' && rest[digits] <= '9') ++digits;
    if (digits == 0 || (digits > 1 && rest[0] == '0')) return false;
    match.number = std::stoll(std::string(rest.substr(0, digits)));
    return match_from(token + 1, rest.substr(digits), match);
  }
  const size_t end = kind == Token::Kind::kAny ? rest.size() : std::min(rest.find('.'), rest.size());
  for (size_t length = 1; length <= end; ++length) {
    match.texts.emplace_back(rest.substr(0, length));
    if (match_from(token + 1, rest.substr(length), match)) return true;
    match.texts.pop_back();
  }
  return false;
}

std::string NamePattern::fill(const NameMatch& match) const {
  std::string name;
  size_t star = 0;
  for (const auto& [kind, text] : tokens_) {
    if (kind == Token::Kind::kText)
      name += text;
    else if (kind == Token::Kind::kNumber)
      name += std::to_string(match.number);
    else
      name += match.texts.at(star++);
  }
  return name;
}

}  // namespace torchtitan_ext::core
