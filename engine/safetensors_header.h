// The header of a safetensors file, read as a stream of events: one call per tensor.
//
// Strict on purpose. The grammar is fixed (an object of tensor entries, two levels deep), so anything that is not part of
// it is refused where it stands and nothing is ever skipped or nested. Memory is bounded by constants, not by the file:
// bytes come through one small buffer, and only the current name and entry are held. Names are any UTF-8, NUL and '/'
// included; they are data and never a path.
// Not thread-safe across one scan; scans of the same descriptor may run at once (pread only).
#ifndef MOED_ENGINE_SAFETENSORS_HEADER_H_
#define MOED_ENGINE_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace moed {

// Limits of a header. Real files stay far below them; they bound what a hostile one can cost.
inline constexpr uint64_t kMaxHeaderBytes = 64ull << 20;
inline constexpr uint32_t kMaxTensors = 1u << 19;
inline constexpr size_t kMaxRank = 8;
inline constexpr size_t kMaxNameBytes = 4096;       // of a tensor name or a metadata key
inline constexpr size_t kMaxMetadataEntries = 4096;
inline constexpr size_t kMaxMetadataBytes = 64 << 10;  // of all keys and values, where they are kept

// Called for every tensor, in file order; `info.begin` counts from the start of the file. Return false to stop the scan.
using TensorVisitor = std::function<bool(const std::string& name, const TensorInfo& info)>;

// Scans the header of `header_bytes` bytes that starts at file offset 8 of `fd`, in a file of `file_bytes` bytes
// (8 + header_bytes <= file_bytes). Checks everything that can be told from one entry alone: grammar, UTF-8, the three
// fields, dtype, shape, and that the range lies in the file and has the size that dtype and shape ask for. It does not
// compare entries: duplicate names, holes and overlaps are the caller's. OK also when the visitor stopped the scan. `metadata` (may
// be null) gets the entries of __metadata__, which must not be more than kMaxMetadataBytes then.
// Errors: INVALID_ARGUMENT (with the byte position in the header, and the tensor's name once it is known), DATA_LOSS when
// the file ends early.
absl::Status ScanHeader(int fd, uint64_t header_bytes, uint64_t file_bytes, const TensorVisitor& visit,
                        std::map<std::string, std::string>* metadata = nullptr);

// The element type called `name` ("BF16"); false when there is none.
bool DtypeFromName(const std::string& name, StDtype* dtype);

// Bytes of a dense tensor. INVALID_ARGUMENT: negative dimension, rank above kMaxRank, a size that overflows (dimensions of
// 0 hide no overflow of the others), an odd last dimension of F4, or a bit count that is no whole number of bytes.
absl::StatusOr<uint64_t> TensorBytes(StDtype dtype, std::span<const int64_t> shape);

// Checks UTF-8 one byte at a time: no overlong forms, no surrogates, nothing above U+10FFFF.
class Utf8Checker {
 public:
  // False when `byte` cannot come here.
  bool Feed(uint8_t byte);
  // True between characters.
  bool complete() const { return left_ == 0; }

 private:
  int left_ = 0;  // continuation bytes still to come
  uint8_t low_ = 0x80;
  uint8_t high_ = 0xBF;
};
bool IsUtf8(const std::string& text);

// pread until `out` is full. DATA_LOSS when the file ends early or cannot be read; the message has no path.
absl::Status ReadFully(int fd, uint64_t offset, std::span<uint8_t> out);

}  // namespace moed

#endif  // MOED_ENGINE_SAFETENSORS_HEADER_H_
