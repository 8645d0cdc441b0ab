#include "engine/glob.h"

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr size_t kMaxLength = 1000;

// One element of a glob that stands for exactly one character: matches `c`, and moves `at` behind the element.
bool MatchOne(const std::string& glob, size_t* at, char c) {
  const char element = glob[(*at)++];
  if (element == '?') return true;
  if (element != '[') return element == c;
  size_t from = *at;
  const bool negative = from < glob.size() && glob[from] == '!';
  if (negative) ++from;
  // A bracket directly after the opening one is a member.
  const size_t close = from < glob.size() ? glob.find(']', from + 1) : std::string::npos;
  if (close == std::string::npos) return c == '[';
  bool in = false;
  for (size_t i = from; i < close; ++i) {
    if (i + 2 < close && glob[i + 1] == '-') {
      in = in || (glob[i] <= c && c <= glob[i + 2]);
      i += 2;
    } else {
      in = in || glob[i] == c;
    }
  }
  *at = close + 1;
  return in != negative;
}

}  // namespace

absl::StatusOr<Glob> Glob::Compile(const std::string& text) {
  if (text.size() > kMaxLength) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern of ", text.size(), " characters, allowed are ", kMaxLength, ": ", text.substr(0, 60), "..."));
  }
  Glob glob;
  glob.text_ = text;
  return glob;
}

bool Glob::Matches(const std::string& name) const {
  size_t at = 0;        // in the glob
  size_t position = 0;  // in the name
  // The last star, and how far it reaches: on a mismatch only the last star has to be tried again, one character longer.
  size_t star = std::string::npos;
  size_t reach = 0;
  while (position < name.size()) {
    if (at < text_.size() && text_[at] == '*') {
      star = at++;
      reach = position;
    } else if (at < text_.size() && MatchOne(text_, &at, name[position])) {
      ++position;
    } else if (star != std::string::npos) {
      at = star + 1;
      position = ++reach;
    } else {
      return false;
    }
  }
  while (at < text_.size() && text_[at] == '*') ++at;
  return at == text_.size();
}

bool HasWildcard(const std::string& text) { return text.find_first_of("*?[") != std::string::npos; }

}  // namespace moed
