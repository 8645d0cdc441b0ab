#include "kernels/cuda/architectures.h"

namespace moed::cuda {
namespace {

constexpr std::string_view kPrefix = "sm_";

// Digits at the start of `text`, and whether an 'a' follows them.
struct Architecture {
  int number = 0;
  bool exact = false;
};

Architecture Parse(std::string_view text) {
  Architecture architecture;
  size_t at = 0;
  for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at)
    architecture.number = architecture.number * 10 + (text[at] - '0');
  architecture.exact = at < text.size() && text[at] == 'a';
  return architecture;
}

}  // namespace

bool RunsOn(std::string_view build, int major, int minor) {
  for (size_t at = build.find(kPrefix); at != std::string_view::npos; at = build.find(kPrefix, at + 1)) {
    const Architecture code = Parse(build.substr(at + kPrefix.size()));
    if (code.number / 10 != major) continue;
    if (code.exact ? code.number % 10 == minor : code.number % 10 <= minor) return true;
  }
  return false;
}

}  // namespace moed::cuda
