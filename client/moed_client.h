// The C++ client of moed: one MoE layer per call, plain spans in and plain structs out.
//
// Threads: every method may be called from any number of threads at once. Calls of one client share one connection; a
// client per busy thread, each with `own_connection`, gives each thread a connection of its own.
//
// Errors are absl::Status with the server's code and text: INVALID_ARGUMENT (shape, dtype, ids; the text has the row and
// the numbers), NOT_FOUND (model, layer), UNAVAILABLE (no connection, which with TLS may be a certificate that is not
// believed, loading or draining), UNAUTHENTICATED (the server wants a token that it knows), RESOURCE_EXHAUSTED (the server's queue
// is full, the client has too much in flight, or a message is larger than the limit), DEADLINE_EXCEEDED.
//
// Transport: a client of the same host shares memory with the server where that can be (see Transport); the calls are the same.
//
// Memory: messages of some hundred KiB and more make glibc map and unmap pages at every call, which costs many times more
// than the transport. A program that sends such messages should call TuneAllocator() once at its start, or use an allocator
// that keeps freed memory (jemalloc, tcmalloc).
//
// Tensors are row-major and little-endian. M is the number of token rows of a call, H the layer's hidden size, E its number
// of experts, k the slots per token.
#ifndef MOED_CLIENT_MOED_CLIENT_H_
#define MOED_CLIENT_MOED_CLIENT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed::client {

// Element type of hidden states and outputs. f32 on the wire means float32 arithmetic on the server; the 16-bit types allow
// bf16 products there. The last two are for hidden states alone, with a scale a row: they are what bf16(code x scale) is.
enum class DType { kF32, kBf16, kF16, kF8E4m3, kI8 };
// Bytes of one element.
size_t ElementBytes(DType dtype);
// "f32", "bf16", "f16", "f8e4m3", "i8".
const char* DTypeName(DType dtype);
// [rows, columns] values in one byte an element: each row's scale is its largest magnitude by the code's (448 or 127), 1 for a
// row of zeros; values are rounded to the nearest code. `dtype` is kF8E4m3 or kI8.
struct PackedRows {
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // [rows]
};
PackedRows PackRows(DType dtype, std::span<const float> values, int64_t columns);
// Elements widened to float, exactly; not of one byte. A rest that is no whole element is ignored.
std::vector<float> ToFloats(DType dtype, std::span<const uint8_t> bytes);
// Floats rounded to the nearest element, ties to even; NaN stays NaN, too large a value becomes infinite.
std::vector<uint8_t> FromFloats(DType dtype, std::span<const float> values);

// Makes glibc keep the memory of large messages instead of returning it to the kernel at each free: larger thresholds for
// mapping (up to 32 MiB, glibc's limit) and trimming. Process-wide; call it before the first large allocation. No effect
// with another allocator.
void TuneAllocator();

// How calls travel. In a session of shared memory the server reads hidden states and writes outputs in place (on a GPU server
// without a copy by any processor), which takes a client of the same host that may open the server's session socket.
enum class Transport {
  kAuto,  // kRing where the server offers sessions and can be reached there, else kRpc; the same for single calls that do not fit
  kRpc,   // all in the message
  kSharedMemory,  // the tensors in a session, the rest in the message; an error where there is no session
  kRing,          // without RPCs, by a ring in the session; an error where there is none
};
// "auto", "rpc", "shared-memory", "ring".
const char* TransportName(Transport transport);

struct ClientOptions {
  // Limit of one message in either direction, in bytes; the server's default is the same.
  int64_t max_message_bytes = int64_t{256} << 20;
  // False: all clients of this process that talk to one address share one TCP or UNIX connection.
  bool own_connection = false;
  Transport transport = Transport::kAuto;
  // Bytes of memory for tensors that a session has, all of it allocated when the session opens, at the first Forward or Allocate.
  size_t session_bytes = size_t{32} << 20;

  // Files, read by Connect; empty: none. With one of the first three the connection is TLS.
  std::string tls_ca;    // PEM certificates, one of which must have signed the server's; empty: those that the system trusts
  std::string tls_cert;  // PEM certificate chain to show to a server that asks for one, with its private key
  std::string tls_key;
  // Its first token is sent with every call, also in clear text. A token a line, '#' starts a comment line, as moed takes it.
  std::string token_file;
};

struct CallOptions {
  // Deadline of the call, counted from its start; the server drops a request whose deadline has passed. Zero: none.
  std::chrono::milliseconds timeout{60'000};
  // True: wait (within the deadline) for a server that cannot be reached yet, instead of UNAVAILABLE at once.
  bool wait_for_ready = false;
};

// How long the server said to wait before the call is sent again, which is safe for every call but changes of what is served;
// nothing where it said nothing.
std::optional<std::chrono::microseconds> RetryAfter(const absl::Status& status);

// A tensor of hidden states, [rows, columns]; data is rows x columns x ElementBytes(dtype) bytes and stays the caller's.
struct HiddenView {
  DType dtype = DType::kBf16;
  int64_t rows = 0;
  int64_t columns = 0;
  std::span<const uint8_t> data;
};

// One forward of one layer. At most one of (ids, weights) and logits is given; with neither the server routes by the
// checkpoint's own gate. Nothing is copied before Forward, so the spans must live until it returns.
struct ForwardCall {
  std::string model;  // may be empty when the server has one model
  int32_t layer = 0;  // as in the checkpoint's tensor names
  HiddenView hidden;  // [M, H]
  std::span<const float> hidden_scales;  // [M], where hidden has one byte an element
  // What keeps the memory of hidden.data (Buffer::owner, or the caller's own), where a message may be sent from it without a
  // copy; the memory must be left alone until the owner is not shared any more, which may be after a call that failed. Null: it
  // is copied.
  std::shared_ptr<const void> hidden_owner;

  int64_t top_k = 0;               // k, columns of ids and weights
  std::span<const int32_t> ids;    // [M, k] in [-1, E); -1 is "no expert"
  std::span<const float> weights;  // [M, k], final: the server neither normalises nor scales them

  int64_t num_experts = 0;               // E, columns of router_logits
  std::span<const float> router_logits;  // [M, E], after the router's bias, before any correction bias

  std::optional<DType> output_dtype;  // default: that of `hidden`, bf16 where that has one byte
  bool routed_only = false;           // leave out the shared expert
  bool return_routing = false;        // fill ForwardResult::ids and weights
  bool per_slot = false;              // the output is [M * k, H], what each slot adds to the sum; by ids, without the shared expert
  std::string request_id;             // at most 128 bytes; appears in the server's log lines
};

// The server's own durations, in microseconds; comparing them with the caller's time needs no synchronised clocks.
struct Timing {
  int64_t receive_us = 0;  // parsing and checking
  int64_t queue_us = 0;    // waiting for the device
  int64_t compute_us = 0;  // routing and experts
  int64_t send_us = 0;     // building the answer
  int64_t batch_rows = 0;  // of all calls that were computed together with this one, its own included; 0: the server does not tell

  int64_t total() const { return receive_us + queue_us + compute_us + send_us; }
};

struct ForwardResult {
  DType dtype = DType::kBf16;
  int64_t rows = 0;     // M
  int64_t columns = 0;  // H
  std::string data;     // [M, H] elements of `dtype`; a string because the transport hands one over without a copy

  std::string backend;      // that ran the routed experts
  std::string scheme;       // that it executed
  uint64_t generation = 0;  // of the weights
  uint64_t weights_id = 0;  // the number that the first 16 digits of ModelStatus::weights_hash are; 0: the model has no weights
  Timing timing;

  int64_t top_k = 0;           // with return_routing: k
  std::vector<int32_t> ids;    // [M, k]
  std::vector<float> weights;  // [M, k]

  // The output widened to float, [M, H].
  std::vector<float> Floats() const;
};

// Memory for tensors of calls, from a session where the client has one: what lies there is not copied on its way to the server.
// Given back with the object, which may outlive the client. Aligned to 64 bytes.
class Buffer {
 public:
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;
  ~Buffer();
  std::span<uint8_t> bytes() const;
  // False: from the heap, since there is no session or not enough of it is free.
  bool shared() const;
  // For ForwardCall::hidden_owner.
  std::shared_ptr<const void> owner() const;

 private:
  friend class MoeClient;
  struct Impl;
  explicit Buffer(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

// What a watcher may conclude: kPlanned and kLoading: calls get UNAVAILABLE; kReady: a forward succeeds.
enum class LayerState { kUnknown, kPlanned, kLoading, kReady, kFailed };
// "unknown", "planned", "loading", "ready", "failed".
const char* LayerStateName(LayerState state);

struct LayerStatus {
  int32_t layer = 0;
  LayerState state = LayerState::kUnknown;
  std::string scheme;           // what the checkpoint says
  std::string executed_scheme;  // what runs
  std::string backend;
  std::string note;         // why a preferred backend was not taken
  uint64_t bytes = 0;       // held by the repacked experts, padding included
  uint64_t file_bytes = 0;  // of the experts' tensors as stored
  std::vector<int32_t> numa_nodes;  // memory nodes where the repacked experts lie; empty: unknown
};

struct ModelStatus {
  std::string name;
  std::string path;
  LayerState state = LayerState::kUnknown;
  std::string error;  // when kFailed
  uint64_t generation = 0;
  std::string weights_hash;  // equal where the same weights are served; empty until the model is loaded
  int64_t hidden = 0;       // H
  int32_t num_experts = 0;  // E
  int32_t top_k = 0;        // k of the model
  std::vector<LayerStatus> layers;
};

// The threads that compute, and the processors and the GPU that the server may use.
struct HostStatus {
  int32_t threads = 0;
  std::string threads_limit;        // what keeps them from being more: "affinity", "cgroup quota 2.0", "operator's choice"
  bool pinned = false;              // each thread to a processor of its own
  int32_t processors = 0;           // in the affinity mask
  double cpu_quota = 0;             // of the cgroup, in processors; 0: none
  std::vector<int32_t> numa_nodes;  // memory nodes of these processors; empty: unknown
  std::string gpu;                  // that layers may run on; empty: none
  uint64_t gpu_free_bytes = 0;      // of its memory
};

// Work in front of the server's device; counts since its start.
struct QueueStatus {
  int32_t waiting = 0;       // calls now
  int64_t waiting_rows = 0;  // of theirs
  uint64_t accepted = 0;     // calls
  uint64_t refused = 0;
  uint64_t expired = 0;      // dropped before they ran: their deadline passed
  uint64_t cancelled = 0;    // dropped before they ran: their client went away
  uint64_t finished = 0;
  uint64_t runs = 0;         // of the device, each of one or more calls
  uint64_t rows = 0;         // of all runs
  uint64_t merged = 0;       // calls that shared a run with others
};

struct ServerStatus {
  std::string version;
  std::vector<ModelStatus> models;
  HostStatus host;    // zeros from a server that does not tell
  QueueStatus queue;  // likewise
};

// What a server says of itself before the first call.
struct ServerHello {
  uint32_t protocol = 0;          // the version of the contract that it speaks
  std::string version;
  int64_t max_message_bytes = 0;  // in either direction
  std::string session_socket;     // of shared memory; empty: it offers none
};

struct Reason {
  std::string code;  // stable, machine-readable
  std::string text;  // with the numbers
};

struct BackendVerdict {
  std::string name;
  bool ok = false;
  std::vector<Reason> reasons;  // every reason why not
};

struct LayerExplanation {
  int32_t layer = 0;
  std::string scheme;
  std::string choice;  // empty when no backend fits
  uint64_t bytes = 0;
  uint64_t workspace_bytes = 0;
  std::vector<BackendVerdict> backends;
  std::string note;
  std::string shared_scheme;  // of the shared expert; empty when there is none
  std::string shared_choice;
};

struct Explanation {
  std::string device;
  std::vector<LayerExplanation> layers;
  bool fits = false;  // every layer has a backend and all of them fit into memory
};

struct SelfCheckRow {
  int32_t layer = 0;
  std::string backend;
  std::string scheme;
  int32_t tokens = 0;
  double max_rel = 0;  // largest relative error of a row against the server's reference
  double bound = 0;    // of the scheme
  bool passed = false;
};

struct SelfCheckResult {
  std::vector<SelfCheckRow> rows;
  bool passed = false;
};

enum class Health { kUnknown, kServing, kNotServing, kServiceUnknown };
// "UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN".
const char* HealthName(Health health);

class MoeClient {
 public:
  // A client of the server at `address`: HOST:PORT, [IPV6]:PORT or unix:PATH. INVALID_ARGUMENT for another form, and for options
  // that contradict each other or whose files are not what they should be; NOT_FOUND for files that cannot be read. The
  // connection is made by the first call and again after it was lost. HTTP proxies from the environment are not used.
  static absl::StatusOr<std::unique_ptr<MoeClient>> Connect(const std::string& address, const ClientOptions& options = {});
  ~MoeClient();
  MoeClient(const MoeClient&) = delete;
  MoeClient& operator=(const MoeClient&) = delete;

  // One forward. INVALID_ARGUMENT without a call when spans and shapes contradict each other; INTERNAL when the answer does
  // not have the shape or the dtype that was asked for.
  absl::StatusOr<ForwardResult> Forward(const ForwardCall& call, const CallOptions& options = {});

  // The same with the output written to `output`, which has M x H elements of the output's dtype, and without data in the result.
  // Hidden states and output that lie in Buffers of this client are not copied. Such an output must be left alone after
  // DEADLINE_EXCEEDED until the Buffer's memory is given back, since the server may still write it.
  absl::StatusOr<ForwardResult> ForwardInto(const ForwardCall& call, std::span<uint8_t> output, const CallOptions& options = {});

  // Memory for hidden states and outputs. RESOURCE_EXHAUSTED when not even the heap has it.
  absl::StatusOr<Buffer> Allocate(size_t bytes);

  // FAILED_PRECONDITION with both versions when client and server do not speak the same contract.
  absl::StatusOr<ServerHello> Hello(const CallOptions& options = {});

  // State of one model, or of all when `model` is empty.
  absl::StatusOr<ServerStatus> Status(const std::string& model = "", const CallOptions& options = {});

  // What runs each layer (or one of them) and why not the others.
  absl::StatusOr<Explanation> Explain(const std::string& model = "", std::optional<int32_t> layer = {},
                                      const CallOptions& options = {});

  // Random tokens through each layer (or one of them) on the server, compared with its reference. `tokens` rows per layer,
  // 1 to 64, 0 for the server's default. It reads weights again: allow minutes for a large model.
  absl::StatusOr<SelfCheckResult> SelfCheck(const std::string& model = "", std::optional<int32_t> layer = {},
                                            int32_t tokens = 0, uint64_t seed = 0, const CallOptions& options = {});

  // Changes of what the server serves (see service Admin of moe.proto); each returns when it is made, with the server's models
  // as they are then. Loading takes minutes: give the call a long deadline, or none. When it passes, or the program ends, the
  // change ends and the same weights are served as before. `path` is on the server's machine.
  absl::StatusOr<ServerStatus> LoadModel(const std::string& model, const std::string& path, const CallOptions& options = {});
  // `keep_previous`: the old weights stay in memory, for a rollback at once.
  absl::StatusOr<ServerStatus> SwapModel(const std::string& model, const std::string& path, bool keep_previous = false,
                                         const CallOptions& options = {});
  absl::StatusOr<ServerStatus> UnloadModel(const std::string& model, const CallOptions& options = {});
  absl::StatusOr<ServerStatus> RollbackModel(const std::string& model, const CallOptions& options = {});

  // grpc.health.v1 Check of a service: "" is the server, "MODEL" a model, "MODEL/L" a layer. A service that the server does
  // not have is kServiceUnknown, not an error.
  absl::StatusOr<Health> CheckHealth(const std::string& service = "", const CallOptions& options = {});

 private:
  struct Impl;
  explicit MoeClient(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace moed::client

#endif  // MOED_CLIENT_MOED_CLIENT_H_
