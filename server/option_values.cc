#include "server/option_values.h"

#include <algorithm>
#include <charconv>

#include "absl/strings/str_cat.h"
#include "server/option_table.h"

namespace moed {

absl::Status WantedGot(const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat("wanted ", wanted, ", got '", got, "'"));
}

std::string Join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) absl::StrAppend(&text, text.empty() ? "" : separator, part);
  return text;
}

absl::Status OneOf(const std::vector<std::string>& allowed, const std::string& text, std::string* out) {
  if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
    return WantedGot(absl::StrCat("one of ", Join(allowed, ", ")), text);
  }
  *out = text;
  return absl::OkStatus();
}

absl::Status NotEmpty(const std::string& wanted, const std::string& text, std::string* out) {
  if (text.empty()) return WantedGot(wanted, text);
  *out = text;
  return absl::OkStatus();
}

absl::Status CheckAddress(const std::string& text) {
  const std::string wanted = "HOST:PORT with a port from 0 to 65535, or unix:PATH";
  if (text.rfind("unix:", 0) == 0) {
    const size_t length = text.size() - 5;
    if (length == 0) return WantedGot(wanted, text);
    if (length <= kMaxUnixPath) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("wanted a socket path of at most ", kMaxUnixPath, " bytes, got ", length,
                                                   " bytes: '", text, "'"));
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return WantedGot(wanted, text);
  const std::string host = text.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']' && host.size() > 2;
  const bool plain = host.find_first_of(":/[] ") == std::string::npos;
  int64_t port = 0;
  if (!(bracketed || plain) || !ParseInteger(text.substr(colon + 1), 0, 65535, &port).ok()) return WantedGot(wanted, text);
  return absl::OkStatus();
}

absl::Status ParseInteger(const std::string& text, int64_t low, int64_t high, int64_t* out) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return WantedGot(absl::StrCat("a whole number from ", low, " to ", high), text);
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status ParseFraction(const std::string& text, double* out) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0 && value <= 1)) {
    return WantedGot("a number from 0 to 1", text);
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status ParseActivations(const std::string& text, std::string* out) { return OneOf({"file", "none", "int8"}, text, out); }

absl::Status ParseGpu(const std::string& text, std::string* out) { return OneOf({"auto", "none"}, text, out); }

absl::Status ParseFeatureMask(const std::string& text, std::vector<std::string>* names) {
  std::vector<std::string> valid;
  for (const IsaFlagName& flag : IsaFlagNames()) valid.push_back(absl::StrCat("-", flag.name));
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string item;
    if (!OneOf(valid, text.substr(begin, end - begin), &item).ok()) {
      return absl::InvalidArgumentError(absl::StrCat("wanted -FEATURE[,-FEATURE...] with features among ", Join(valid, ", "),
                                                     ", got '", text.substr(begin, end - begin), "'"));
    }
    names->push_back(item.substr(1));
    begin = end + 1;
  }
  return absl::OkStatus();
}

}  // namespace moed
