// A hash of a model's weights, by which clients and operators know whether two servers serve the same: of the names, dtypes and
// shapes of every tensor that the model's MoE layers use, and of samples of their bytes.
//
// Samples, since reading all bytes once more, or hashing them as they come, would cost a fifth of a load; training and quantizing
// change nearly every tensor all over, so what differs differs here. A file that was damaged in a few places need not. It is
// the same for every backend and device, and for servers that hold other experts of the same checkpoint.
// Threads: the functions are pure.
#ifndef MOED_ENGINE_WEIGHTS_HASH_H_
#define MOED_ENGINE_WEIGHTS_HASH_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/checkpoint.h"

namespace moed {

struct NamedTensor {
  std::string_view name;  // the checkpoint's
  TensorRef ref;
};

// The tensors of `checkpoint` that each of `layers` lists, by name. Valid as long as the checkpoint.
std::vector<std::vector<NamedTensor>> TensorsOf(const Checkpoint& checkpoint,
                                                std::span<const std::span<const TensorInfo* const>> layers);

// SHA-256, 32 bytes, of what the head of this file says. DATA_LOSS when a file ends early.
absl::StatusOr<std::string> HashTensors(std::span<const NamedTensor> tensors);

// 32 hexadecimal digits for a model, of the hashes of its layers in their order.
std::string JoinHashes(std::span<const std::string> layers);

// The number that the first 16 digits of a model's hash are, which is in every answer.
uint64_t WeightsId(const std::string& hash);

}  // namespace moed

#endif  // MOED_ENGINE_WEIGHTS_HASH_H_
