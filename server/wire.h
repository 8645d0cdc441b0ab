// Between the wire and the engine: every conversion of moe.v1 messages, and every check that needs no weights.
//
// Pure functions without gRPC; safe from any thread. A request is checked completely, with numbers, before anything is
// allocated for it: claimed shapes are compared with the bytes that really came. Errors are INVALID_ARGUMENT (what is
// wrong with the message: field, wanted, got) or NOT_FOUND (model or layer, listing the valid ones).
#ifndef MOED_SERVER_WIRE_H_
#define MOED_SERVER_WIRE_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "kernels/accelerator.h"
#include "kernels/tensor.h"
#include "proto/moe/v1/moe.pb.h"
#include "proto/ring/layout.h"
#include "proto/ring/session.h"
#include "server/call_observer.h"
#include "server/payload.h"

namespace moed {

// The largest message in either direction. Answers keep 64 KiB of it for everything but tensors.
inline constexpr int64_t kMaxMessageBytes = int64_t{256} << 20;
inline constexpr int64_t kMaxAnswerTensorBytes = kMaxMessageBytes - (int64_t{64} << 10);
inline constexpr size_t kMaxRequestIdBytes = 128;
// The version of moe.v1 that a Hello agrees on.
inline constexpr uint32_t kProtocol = 1;

// What a request is checked against. Fixed once the models are planned.
struct ModelFacts {
  std::string name;
  int64_t hidden = 0;       // H
  int num_experts = 0;      // E
  int top_k = 0;            // k of the checkpoint's own rule
  std::vector<int> layers;  // ascending
  int first_expert = 0, end_expert = 0;  // experts [first_expert, end_expert) are held
  std::vector<std::shared_ptr<LayerObserver>> observers;  // of `layers`, in their order; empty: nobody observes
};

class ModelTable {
 public:
  explicit ModelTable(const std::vector<ModelStatus>& models);

  // The model of that name; an empty name means the only one. NOT_FOUND, or INVALID_ARGUMENT for an empty name where there
  // are several: both list the names.
  absl::StatusOr<const ModelFacts*> Find(const std::string& name) const;
  const std::vector<ModelFacts>& models() const { return models_; }

  // Gets an observer for each layer. Before the table is used.
  void Observe(CallObserver* observer);

 private:
  std::vector<ModelFacts> models_;
};

// NOT_FOUND listing the MoE layers unless `layer` is one of them.
absl::Status CheckLayer(const ModelFacts& model, int layer);
// The observer of a layer; null when there is none, or no such layer.
std::shared_ptr<LayerObserver> ObserverOf(const ModelFacts& model, int layer);

// Where hidden.data lies in the bytes of a ForwardRequest: offsets from its first byte.
struct HiddenPlace {
  size_t length_at = 0;          // of hidden's length, which ends where hidden begins
  size_t begin = 0, end = 0;     // of hidden
  size_t field_at = 0;           // of the tag of data
  size_t data_at = 0, bytes = 0; // of data itself
};

// Checks the `size` bytes of `stream`, which should be a serialised `message` of moe.v1, without building it.
// INVALID_ARGUMENT for bytes that cannot be one (as CannotParse), for a field that is unknown or of another type, and for a
// list (Tensor.shape is the only one) of more than 8 entries: parsed, these would take many times the memory of the bytes.
// `hidden` (may be null) becomes the place of hidden.data where the message has it once, in one piece of hidden, with at least one
// byte, and with tag and lengths as short as they can be; else nothing.
absl::Status CheckBytes(google::protobuf::io::ZeroCopyInputStream* stream, size_t size,
                        const google::protobuf::Descriptor& message, std::optional<HiddenPlace>* hidden = nullptr);
absl::Status CannotParse(const google::protobuf::Descriptor& message, size_t bytes);

// INVALID_ARGUMENT naming the first field, at any depth, that this server does not know: dropping it could change what
// the caller meant.
absl::Status CheckKnownFields(const google::protobuf::Message& message);

// The largest tensor in device memory: larger than any, and small enough for sums and products of sizes.
inline constexpr int64_t kMaxDeviceTensorBytes = int64_t{1} << 40;
inline constexpr uint64_t kDeviceAlignment = 16;

// Where a tensor lies in device memory that another process shares.
struct SharedPlace {
  SharedHandle handle{};
  uint64_t offset = 0;
};

// Where a tensor lies in memory of the host that a client shares in a session.
struct SessionPlace {
  ring::SessionKey key{};
  uint64_t offset = 0;
};

// Hidden states in one byte an element, which must be expanded (payload.h) before the call runs.
struct PackedHidden {
  PayloadCode code = PayloadCode::kF8E4m3;
  const void* codes = nullptr;    // [M, H]; null: held back, or in a session
  std::span<const char> scales;   // [M] float32, not aligned
};

class Recording;  // recorder.h

// A forward request that can run.
struct CheckedForward {
  std::string model;
  ForwardCall call;  // views into the request, which must outlive it, but for what is in device memory or was held back
  DType output_dtype = DType::kF32;
  std::optional<SharedPlace> hidden_memory;  // call.hidden is on the device and has no address yet
  std::optional<SharedPlace> output_memory;  // the output goes there, not into the answer
  std::optional<SessionPlace> hidden_session;  // call.hidden has no address yet
  std::optional<PackedHidden> packed;          // nor then, and it says bf16
  // Rows of the output for each row that came. Where it is not 1, call is that of as many rows with one slot each, call.hidden
  // has no address, and each row that came must be repeated.
  int64_t rows_each = 1;
  const void* rows_data = nullptr;             // of those that came; null: held back, in a session, or packed
  std::optional<SessionPlace> output_session;  // the output goes there, not into the answer
  std::shared_ptr<LayerObserver> observer;     // of the layer; may be null
  std::shared_ptr<Recording> recording;        // of a call that is sampled; else null

  // Of the hidden states as they came.
  size_t hidden_bytes() const {
    const size_t expanded = packed ? static_cast<size_t>(call.hidden.rows * call.hidden.cols) : call.hidden.bytes();
    return expanded / static_cast<size_t>(rows_each);
  }
  // Whether call.hidden is something else than what came.
  bool must_be_made() const { return packed || rows_each != 1; }
  bool output_in_answer() const { return !output_memory && !output_session; }
  size_t output_bytes() const {
    return MutableTensorView{nullptr, output_dtype, call.hidden.rows, call.hidden.cols}.bytes();
  }
};

// Checks everything that the message alone can show: also every id (with row, slot, value and E), and NaN and +Inf among
// logits (with row and expert). Whether a row has enough finite logits depends on the router and is the engine's. Also
// RESOURCE_EXHAUSTED when the answer would be larger than a message may be.
// `held_back`: bytes of hidden.data that came but are not in `request` (see received_forward.h), whose hidden has no data then;
// call.hidden gets no address.
absl::StatusOr<CheckedForward> CheckForward(const moe::v1::ForwardRequest& request, const ModelTable& models, size_t held_back = 0);

// The fields of the answer beside the output tensor: what is known before the call runs, and what is known after it.
moe::v1::ForwardResponse BeginAnswer(const moe::v1::ForwardRequest& request);
void EndAnswer(const ForwardInfo& info, int64_t rows, moe::v1::ForwardResponse* answer);

// The bytes of ForwardResponse.output up to (and without) the tensor's data: a serialised message is this head, then
// the data, then the other fields. So an answer is sent without copying the data into a message first.
// `with_data` false: no data follows, the tensor has none.
std::string OutputHead(DType dtype, int64_t rows, int64_t cols, bool with_data = true);

// The address of `bytes` at `place` in `memory`; `field` is what errors name. INVALID_ARGUMENT when they end beyond it.
absl::StatusOr<std::byte*> AddressIn(const std::string& field, const SharedMemory& memory, const SharedPlace& place, size_t bytes);

// A submission of a ring as the request that it stands for: hidden states and output in session memory, whose key is zero, ids,
// weights and logits copied from `region`. INVALID_ARGUMENT for what is not within it, or cannot be said in a request.
absl::Status FromRing(const ring::Submission& submission, std::span<const std::byte> region, moe::v1::ForwardRequest* request);

// A forward's answer as a completion of a ring. Its routing goes to the submission's places, which must be in `region`
// (CheckUsedRouting).
ring::Completion ToCompletion(const ForwardInfo& info, const moe::v1::Timing& timing);
// Whether used ids and weights of `slots` a row fit where the submission wants them.
absl::Status CheckUsedRouting(const ring::Submission& submission, std::span<const std::byte> region, int64_t slots);

// What a Hello tells of the models, beside what only the server knows. FAILED_PRECONDITION with both versions when the client
// speaks another protocol.
absl::Status FillHello(const moe::v1::HelloRequest& request, const std::vector<ModelStatus>& models,
                       moe::v1::HelloResponse* response);

// Rows of a self-check: 1 to 64, 0 means 8.
absl::StatusOr<int64_t> SelfCheckTokens(const moe::v1::SelfCheckRequest& request);

// Where the server is in its life.
enum class Phase { kLoading, kServing, kDraining };

// Reports. Only a serving server shows READY: layers that are ready are shown as LOADING before calls are let in, and as
// PLANNED, with an error in the model, once a drain began.
void FillStatus(const std::vector<ModelStatus>& models, const HostStatus& host, Phase phase, moe::v1::StatusResponse* out);
// All layers, or only `layer` when >= 0.
void FillExplain(const ExplainReport& report, int layer, moe::v1::ExplainResponse* out);
// Appends `rows`; `passed` becomes false with the first row that failed.
void AddSelfCheckRows(const std::vector<SelfCheckRow>& rows, moe::v1::SelfCheckResponse* out);

}  // namespace moed

#endif  // MOED_SERVER_WIRE_H_
