// model.safetensors.index.json: which file holds which tensor, read as a stream.
//
// An index can hold a million names and be wrong at its end, so that nothing is kept of it but hashes and the names of the
// files: the caller scans twice, first to check it and to learn the files, then to look each tensor up where it must be.
#ifndef MOED_ENGINE_CHECKPOINT_INDEX_H_
#define MOED_ENGINE_CHECKPOINT_INDEX_H_

#include <functional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed {

// Limits of an index; real ones stay far below.
inline constexpr uint64_t kMaxIndexBytes = 64ull << 20;
inline constexpr size_t kMaxIndexTensors = 1u << 20;
inline constexpr size_t kMaxIndexFiles = 1u << 14;

// Called for each entry of weight_map in the order of the text. An error ends the scan, which returns it.
using IndexVisitor = std::function<absl::Status(const std::string& tensor, const std::string& file)>;

// Errors name `path`: NOT_FOUND, DATA_LOSS, INVALID_ARGUMENT for what is no JSON (with the byte), no weight_map or two, an
// entry that maps to something else than the name of a file in the same directory, or more than the limits above.
absl::Status ScanIndex(const std::string& path, const IndexVisitor& visit);

// Checks the whole index, names that appear twice included, and returns the names of its files, at least one.
absl::StatusOr<std::set<std::string>> CheckIndex(const std::string& path);

}  // namespace moed

#endif  // MOED_ENGINE_CHECKPOINT_INDEX_H_
