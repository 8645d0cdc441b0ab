// A checkpoint directory: one safetensors file or a sharded set with its index, as one table of tensors.
//
// Knows files and names, not what a tensor means (that is weights.h). With `model.safetensors.index.json` present only
// mapped files and mapped names count; otherwise `model.safetensors` alone. Descriptors stay open for the object's life.
// Immutable after Open; any number of threads may read at once.
#ifndef MOED_ENGINE_CHECKPOINT_H_
#define MOED_ENGINE_CHECKPOINT_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace moed {

// A tensor and the file that holds it. Valid as long as the Checkpoint.
struct TensorRef {
  const SafetensorsFile* file = nullptr;
  const TensorInfo* info = nullptr;
  explicit operator bool() const { return info != nullptr; }
};

// Tensors by name; the names are those that the files hold. Most lookups while planning are for tensors that do not exist.
using TensorTable = absl::flat_hash_map<absl::string_view, TensorRef>;

class Checkpoint {
 public:
  // Opens the directory `path`. NOT_FOUND when the directory or a needed file is missing (names it); INVALID_ARGUMENT for
  // an index that is not as specified, a mapped name that its shard lacks (first ten are named, and the count), a file
  // name with a path separator, or any fault of a shard.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::string& path);

  const std::string& path() const { return path_; }

  // The tensor of that name; empty when absent.
  TensorRef Find(const std::string& name) const;

  // All names, in no particular order.
  const TensorTable& tensors() const { return tensors_; }

  // Things worth a line in the log: stray files that the index does not map.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  Checkpoint() = default;

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  TensorTable tensors_;
  std::vector<std::string> warnings_;
};

}  // namespace moed

#endif  // MOED_ENGINE_CHECKPOINT_H_
