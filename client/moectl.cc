#include "client/moectl.h"

#include <cstdio>
#include <limits>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace moed::client {

CallOptions Globals::Call(double default_s) const {
  const double seconds = timeout_s > 0 ? timeout_s : default_s;
  CallOptions options;
  options.timeout = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000) + 1);
  return options;
}

int Fail(const absl::Status& status) {
  const std::string text = absl::StrReplaceAll(std::string(status.message()), {{"\n", "\n  "}});
  std::fprintf(stderr, "moectl: %s: %s\n", absl::StatusCodeToString(status.code()).c_str(), text.c_str());
  return kExitSetUp;
}

CLI::Validator Between(double min, double max) {
  const auto check = [min, max](const std::string& text) {
    double value = 0;
    // "nan" is a number to the parser and in no range.
    if (CLI::detail::lexical_cast(text, value) && value >= min && value <= max) return std::string();
    return absl::StrFormat("wanted a number from %.12g to %.12g, got \"%s\"", min, max, text);
  };
  return CLI::Validator(check, "");
}

CLI::Validator LayerNumber() { return Between(0, std::numeric_limits<int32_t>::max()); }

void PrintJson(const Json& document) {
  const std::string text = document.dump(2, ' ', false, Json::error_handler_t::replace);
  std::printf("%s\n", text.c_str());
}

}  // namespace moed::client
