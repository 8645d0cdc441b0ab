// Bytes as people read them.
#ifndef MOED_SERVER_SIZE_TEXT_H_
#define MOED_SERVER_SIZE_TEXT_H_

#include <cstdint>
#include <iterator>
#include <string>

#include "absl/strings/str_format.h"

namespace moed {

// "512 B", "1.5 GiB".
inline std::string SizeText(uint64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return unit == 0 ? absl::StrFormat("%d B", bytes) : absl::StrFormat("%.1f %s", value, units[unit]);
}

}  // namespace moed

#endif  // MOED_SERVER_SIZE_TEXT_H_
