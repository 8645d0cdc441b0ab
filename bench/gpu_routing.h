// Routings of the GPU benchmark: from a safetensors file, so that other programs can be timed on the same ones, or random. No CUDA.
#ifndef MOED_BENCH_GPU_ROUTING_H_
#define MOED_BENCH_GPU_ROUTING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace moed::bench {

// Of one op: row-major [tokens, top_k].
struct Routing {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

// Rows of each expert [experts]: what the counts of batched experts are for the same rows. Ids are in [0, experts).
std::vector<int32_t> RowsOfExperts(const Routing& routing, int experts);

// Which routing.
struct RoutingKey {
  std::string shape;
  int64_t tokens = 0;
  int index = 0;  // of the rotation
  int experts = 0, top_k = 0;
};

class Routings {
 public:
  // Random ones: for each row different experts, each with the same chance, and weights that add up to 1. A key always gives the
  // same.
  Routings() = default;
  // Those of a file with tensors "SHAPE.mTOKENS.rINDEX.ids" (I32) and ".weights" (F32), each [tokens, top_k]. Errors as
  // SafetensorsFile::Open.
  static absl::StatusOr<Routings> Open(const std::string& path);

  // NOT_FOUND for a file without the tensor, INVALID_ARGUMENT when it has another dtype or shape or an id outside [0, experts);
  // both name file and tensor.
  absl::StatusOr<Routing> Get(const RoutingKey& key) const;

 private:
  explicit Routings(std::unique_ptr<SafetensorsFile> file) : file_(std::move(file)) {}

  std::unique_ptr<SafetensorsFile> file_;  // null: random
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_ROUTING_H_
