// Hidden states that are not what came, but made of it. Pure functions.
//
// Those that travel in one byte an element, with a scale a row, are code x scale, rounded once to bf16: so a call with such hidden states
// gives what the same call with those bf16 values gives, to the bit.
#ifndef MOED_SERVER_PAYLOAD_H_
#define MOED_SERVER_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace moed {

enum class PayloadCode : uint8_t {
  kF8E4m3,  // OCP FP8 E4M3 without infinities; 0x7F and 0xFF are NaN
  kI8,      // two's complement
};

// out[row * cols + i] = bf16(codes[row * cols + i] x scales[row]), for as many rows as there are scales. The product is rounded to
// float32 and then to bf16, to nearest even; NaN stays NaN. `scales` need not be aligned: float32, little-endian.
void ExpandPayload(PayloadCode code, const uint8_t* codes, std::span<const char> scales, int64_t cols, uint16_t* out);

// out = each of the rows of `row_bytes` bytes `times` times, one after the other.
void RepeatRows(const std::byte* in, int64_t rows, size_t row_bytes, int64_t times, std::byte* out);

}  // namespace moed

#endif  // MOED_SERVER_PAYLOAD_H_
