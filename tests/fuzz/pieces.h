// An input of several texts: "first NUL second". No text that moed reads may hold a NUL, so that a fuzzer finds the border
// at once, and an input without one is the first text alone.
#ifndef MOED_TESTS_FUZZ_PIECES_H_
#define MOED_TESTS_FUZZ_PIECES_H_

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

namespace moed::fuzz {

using Bytes = std::span<const uint8_t>;

// The bytes up to the first NUL; `rest` gets what follows it.
inline Bytes TakePiece(Bytes input, Bytes* rest) {
  const auto end = std::find(input.begin(), input.end(), uint8_t{0});
  const size_t length = static_cast<size_t>(end - input.begin());
  *rest = input.subspan(std::min(input.size(), length + 1));
  return input.first(length);
}

inline std::string TextOf(Bytes bytes) { return std::string(bytes.begin(), bytes.end()); }

}  // namespace moed::fuzz

#endif  // MOED_TESTS_FUZZ_PIECES_H_
