// A forward that a server recorded (server/recorder.h): what it was asked, what it answered, and what ran. As a safetensors file,
// which any tool reads, and back.
//
//   hidden         [M, H]  as received: F32, BF16, F16, or F8_E4M3 and I8 with
//   hidden_scales  [M]     F32
//   ids, weights   [M, k]  I32 and F32, or
//   logits         [M, E]  F32, or none of these: the checkpoint's own gate chose
//   output         [M, H]  ([M * k, H] of a call per slot) F32, BF16 or F16
//
// All else is text in the file's metadata, under the names of the fields below.
// Pure functions over files; safe from any thread. A leaf: it knows neither server nor kernels, so that clients may read
// recordings.
#ifndef MOED_ENGINE_RECORDED_CALL_H_
#define MOED_ENGINE_RECORDED_CALL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/safetensors.h"

namespace moed {

struct RecordedCall {
  enum class Routing : uint8_t { kGate, kIds, kLogits };

  std::string model;
  int layer = 0;
  StDtype hidden_dtype = StDtype::kBf16;
  int64_t rows = 0;                // M
  int64_t columns = 0;             // H
  std::vector<uint8_t> hidden;
  std::vector<float> scales;       // [M], with hidden states of one byte an element only
  Routing routing = Routing::kGate;
  int64_t top_k = 0;               // k of ids and weights
  std::vector<int32_t> ids;
  std::vector<float> weights;
  int64_t num_experts = 0;         // E of logits
  std::vector<float> logits;
  bool routed_only = false;
  bool per_slot = false;
  StDtype output_dtype = StDtype::kBf16;
  std::vector<uint8_t> output;

  // What ran.
  std::string backend, scheme;
  uint64_t generation = 0;         // of the weights
  // The numbers that the first 16 digits of the hashes of the model's weights, and of the layer's alone, are; 0: nothing says.
  uint64_t weights_id = 0, layer_weights_id = 0;
  int first_expert = 0, end_expert = 0;  // experts [first_expert, end_expert) were held
  bool deterministic = false;      // the server's options
  std::string activations = "file";
  std::string version;             // of the server

  std::string request_id;          // the client's; bytes that are no UTF-8 become '?'
  std::string transport;           // rpc, session, ring or stream
  std::string time;                // when it was answered: RFC 3339, UTC, microseconds
  int64_t receive_us = 0, queue_us = 0, compute_us = 0;
  int64_t batch_rows = 0;          // that were computed together

  int64_t output_rows() const { return per_slot ? rows * top_k : rows; }
  // Of all tensors.
  uint64_t tensor_bytes() const;
};

// A file's header is smaller than this, whatever is recorded.
inline constexpr uint64_t kMostOfRecordedHeader = 16 << 10;

// A weights_id as it is written: 16 hexadecimal digits.
std::string WeightsIdText(uint64_t weights_id);

// Writes a new file of mode 0600. What is there after an error is no recording. Errors name the path; INVALID_ARGUMENT when the
// fields contradict each other.
absl::Status WriteRecordedCall(const std::string& path, const RecordedCall& call);

// INVALID_ARGUMENT with the path and what was wanted and got when the file is no recording, or one whose tensors do not belong
// together; else as SafetensorsFile.
absl::StatusOr<RecordedCall> ReadRecordedCall(const std::string& path);

// Files of `paths` in their order; of a folder all *.safetensors, by name, which for those of one server is by time. NOT_FOUND for
// what is not there, and for a folder without any.
absl::StatusOr<std::vector<std::string>> FindRecordings(const std::vector<std::string>& paths);

}  // namespace moed

#endif  // MOED_ENGINE_RECORDED_CALL_H_
