// The safetensors container: a checked reader and a streaming writer.
//
// Reader: the header is parsed by events (duplicate keys are seen), every rule of the format is checked before a tensor
// can be found, nothing is allocated from a claimed size, and tensor bytes are read by pread into the caller's buffer, so
// a file that is truncated or changed later gives an error, never a fault. One descriptor per file, open for the object's
// life. Immutable after Open: any number of threads may Read at once.
// Errors: NOT_FOUND (no such file), INVALID_ARGUMENT (header or layout; names file and tensor, wanted and got),
// DATA_LOSS (file shorter than it was).
#ifndef MOED_ENGINE_SAFETENSORS_H_
#define MOED_ENGINE_SAFETENSORS_H_

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/node_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed {

// Element types of the container (safetensors names in capitals: "BF16", "F8_E4M3", ...).
enum class StDtype : uint8_t {
  kBool, kU8, kI8, kF8E5m2, kF8E4m3, kF8E8m0, kF8E4m3Fnuz, kF8E5m2Fnuz,
  kI16, kU16, kF16, kBf16, kI32, kU32, kF32, kC64, kF64, kI64, kU64, kF4, kF6E2m3, kF6E3m2,
};
// Bits of one element.
int StDtypeBits(StDtype dtype);
// "BF16" and so on.
const char* StDtypeName(StDtype dtype);

struct TensorInfo {
  StDtype dtype = StDtype::kU8;
  std::vector<int64_t> shape;  // [] is a scalar; F4 counts logical elements
  uint64_t begin = 0;          // of the first byte, from the start of the file
  uint64_t bytes = 0;

  int64_t elements() const;
};
// "[256, 128]"; "[]" for a scalar.
std::string ShapeText(std::span<const int64_t> shape);

class SafetensorsFile {
 public:
  // Opens `path` and checks header and layout against every rule of the format; data bytes are not read.
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const absl::node_hash_map<std::string, TensorInfo>& tensors() const { return tensors_; }
  // Null when there is no such tensor.
  const TensorInfo* Find(const std::string& name) const;
  // The header's __metadata__, read again since few want it; empty when there is none. INVALID_ARGUMENT when keys and values are
  // more than 64 KiB.
  absl::StatusOr<std::map<std::string, std::string>> ReadMetadata() const;

  // Reads out.size() bytes of `tensor` (one of this file's) from `offset` within it. OUT_OF_RANGE beyond the tensor;
  // DATA_LOSS when the file ends early.
  absl::Status Read(const TensorInfo& tensor, uint64_t offset, std::span<uint8_t> out) const;

 private:
  SafetensorsFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  std::string path_;
  int fd_;
  uint64_t header_bytes_ = 0, file_bytes_ = 0;
  absl::node_hash_map<std::string, TensorInfo> tensors_;
};

// Writes one file tensor by tensor without holding it in memory. Not thread-safe.
class SafetensorsWriter {
 public:
  struct Tensor {
    std::string name;
    StDtype dtype;
    std::vector<int64_t> shape;
  };
  // Writes the header for `tensors`, whose data must then be appended in the same order. `metadata` may be empty. `mode`: of a new
  // file, less the process's mask.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, const std::vector<Tensor>& tensors,
      const std::vector<std::pair<std::string, std::string>>& metadata = {}, mode_t mode = 0666);
  ~SafetensorsWriter();

  // Appends bytes of the data area, in order, in pieces of any size.
  absl::Status Append(std::span<const uint8_t> bytes);
  // Checks that every byte was written and closes the file; without it the file is left incomplete.
  absl::Status Finish();

 private:
  SafetensorsWriter(std::string path, int fd, uint64_t bytes) : path_(std::move(path)), fd_(fd), left_(bytes) {}

  std::string path_;
  int fd_;
  uint64_t left_;
};

}  // namespace moed

#endif  // MOED_ENGINE_SAFETENSORS_H_
