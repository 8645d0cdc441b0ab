// Values of options in text form: what the table's setters check them with.
#ifndef MOED_SERVER_OPTION_VALUES_H_
#define MOED_SERVER_OPTION_VALUES_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace moed {

inline constexpr size_t kMaxUnixPath = 107;  // sockaddr_un::sun_path less its terminating zero

// INVALID_ARGUMENT "wanted ..., got '...'".
absl::Status WantedGot(const std::string& wanted, const std::string& got);

std::string Join(const std::vector<std::string>& parts, const char* separator);

// Copies `text` to `out` when it is one of `allowed`, or not empty; else as WantedGot.
absl::Status OneOf(const std::vector<std::string>& allowed, const std::string& text, std::string* out);
absl::Status NotEmpty(const std::string& wanted, const std::string& text, std::string* out);

// Whether `text` is HOST:PORT or unix:PATH.
absl::Status CheckAddress(const std::string& text);

}  // namespace moed

#endif  // MOED_SERVER_OPTION_VALUES_H_
