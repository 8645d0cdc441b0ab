// What a model may be called.
#ifndef MOED_SERVER_MODEL_NAME_H_
#define MOED_SERVER_MODEL_NAME_H_

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace moed {

// INVALID_ARGUMENT unless `name` has 1 to 128 printable characters without space and '/', since MODEL/L names a layer in health checks.
inline absl::Status CheckModelName(const std::string& name) {
  constexpr size_t kMost = 128;
  const bool printable = std::all_of(name.begin(), name.end(), [](unsigned char c) { return c > 32 && c < 127; });
  if (printable && !name.empty() && name.find('/') == std::string::npos && name.size() <= kMost) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("wanted a model name of 1 to ", kMost,
                                                 " printable characters without space and '/', got '", name.substr(0, kMost), "'"));
}

}  // namespace moed

#endif  // MOED_SERVER_MODEL_NAME_H_
