// The kernel interface: what a layer is, what a backend says about it, and how a prepared layer runs.
//
// A backend is a stateless description that can be asked on any machine whether it could run a layer (Check); only its
// PreparedMoe touches instructions or devices that may be missing. PreparedMoe is immutable: one instance may Run on many
// threads at once, each call with its own ExecContext. Nothing here logs, reads the environment or aborts on input.
#ifndef MOED_KERNELS_MOE_KERNEL_H_
#define MOED_KERNELS_MOE_KERNEL_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/accelerator.h"
#include "kernels/activation_kind.h"
#include "kernels/device_info.h"
#include "kernels/expert_weights.h"
#include "kernels/quant.h"
#include "kernels/tensor.h"
#include "kernels/worker_pool.h"

namespace moed {

// "silu", "gelu", "gelu_tanh", "swiglu_oai", with ", limit 7" where clamped.
std::string Describe(const Activation& activation);

// Everything that decides whether and how a backend can run a layer:
//   y[t] = sum_j w[t,j] * (W2_e (act(W1_e x[t] + b1, W3_e x[t] + b3)) + b2_e),  e = ids[t,j]
// W1 (gate) and W3 (up) are [intermediate, hidden], W2 (down) is [hidden, intermediate].
struct MoeDesc {
  int num_experts = 0;    // E: experts that this server holds, ids are 0..E-1
  int top_k = 0;          // k: slots per token
  int64_t hidden = 0;     // H
  int64_t intermediate = 0;  // I
  Activation activation;
  bool biases = false;    // gate, up and down have bias vectors
  QuantScheme scheme;
  bool weight_on_input = false;  // the slot's weight multiplies x, not the expert's output
  bool deterministic = false;    // row results must not depend on the other rows of a call
  int64_t max_tokens = 1;        // rows of one Run, at most
  int64_t max_tokens_per_expert = 0;  // max_m of RunBatched, fixed here; 0: only Run is asked for
};

// One reason why a backend cannot run a layer. `code` is stable and machine-readable ("isa_missing", "scheme_unsupported",
// "shape_unsupported", "only_by_name", "memory", ...); `text` has the numbers.
struct Reason {
  std::string code;
  std::string text;
};

// Ok, or every reason why not.
struct Verdict {
  std::vector<Reason> reasons;
  bool ok() const { return reasons.empty(); }
};

// Input of one call in the standard format. `ids` and `weights` are row-major [x.rows, k] in host memory.
struct MoeBatch {
  TensorView x;                      // [M, H]
  std::span<const int32_t> ids;      // in [-1, E); -1 is "no expert": contributes 0, its weight is ignored
  std::span<const float> weights;    // final: multiplied as they are
  int top_k = 0;                     // slots per row of this call, 1 <= k; may differ from MoeDesc::top_k
};

// Input of one call in the batched-experts format: a dispatcher has placed each row with its expert, and combines the results
// itself. Expert e owns rows [e * max_m, (e + 1) * max_m) of x and of the output; those at or beyond counts[e] are padding.
struct BatchedExperts {
  TensorView x;                       // [E * max_m, H]
  std::span<const int32_t> counts;    // [E], each in [0, max_m]
  int64_t max_m = 0;                  // MoeDesc::max_tokens_per_expert
};

// What a call may use. Owned by the engine: one per stream of calls, never shared by two calls at once.
struct ExecContext {
  WorkerPool* pool = nullptr;
  std::span<std::byte> workspace;  // at least PreparedMoe::WorkspaceBytes or BatchedWorkspaceBytes, aligned to 64 bytes; of layers on
                                   // the host. A lane grows its own
  Lane* lane = nullptr;            // of PreparedMoe::accelerator(), where it has one
};

class PreparedMoe {
 public:
  virtual ~PreparedMoe() = default;

  // out[M, H] = the layer's routed output for batch.x [M, H], M <= MoeDesc::max_tokens. The combine is float32 in slot
  // order, then one rounding to out.dtype. f32 input means float32 arithmetic. INVALID_ARGUMENT when shapes or ids break
  // the contract (nothing is written then); UNAVAILABLE for device loss.
  virtual absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const = 0;

  // The device that holds the weights and runs the calls, which then need a lane of it and take tensors of either place; null: the
  // host's processors, and host tensors only. Calls return when their output is complete, and with UNAVAILABLE when the device failed.
  virtual Accelerator* accelerator() const { return nullptr; }

  // Workspace for a call of up to `tokens` rows with `top_k` slots each, in the memory of the device that runs it.
  virtual size_t WorkspaceBytes(int64_t tokens, int top_k) const = 0;

  // out[e * max_m + r, H] = W2_e h + b2_e of row r < counts[e] of expert e: not weighted, computed in float32, one rounding to
  // out.dtype. Padding of x is not read, padding of out is not written. No weights come in this format: with
  // MoeDesc::weight_on_input the caller has multiplied the rows by them, as it else multiplies the results. A scale that spans all
  // rows of a request spans the counted rows of the call. FAILED_PRECONDITION when the layer was prepared without the format,
  // INVALID_ARGUMENT when shapes or counts break the contract (nothing is written then); UNAVAILABLE for device loss.
  virtual absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const = 0;

  // Workspace for a RunBatched whose counts add up to `rows`, at most. To bound it, spread the experts over several calls: a count
  // of 0 leaves an expert out, and a row's result does not depend on the other experts (but for scales that span rows).
  virtual size_t BatchedWorkspaceBytes(int64_t rows) const = 0;

  // Bytes held by the repacked weights, padding included.
  virtual size_t ResidentBytes() const = 0;

  // Where these bytes lie in this process's memory, for reports about it; empty: not told. Valid as long as the instance.
  virtual std::vector<std::span<const std::byte>> ResidentRanges() const { return {}; }

  // The scheme that Run executes.
  virtual const QuantScheme& ExecutedScheme() const = 0;

  // What these weights keep the backend from doing as its description says, for reports; empty: nothing.
  virtual std::string Note() const { return ""; }
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Whether prepared weights and workspace take memory of the GPU rather than of the host.
  virtual bool OnGpu() const { return false; }

  // Unique lower-case name: device, then what sets it apart ("cpu_avx2").
  virtual std::string Name() const = 0;
  // One line for people.
  virtual std::string Description() const = 0;
  // False for a backend that is only used when its name is asked for.
  virtual bool Automatic() const { return true; }

  // Pure: whether this backend can run `desc` on `device`, with every reason why not. After ok, Prepare and Run fail only
  // for memory or device loss.
  virtual Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const = 0;

  // Bytes that Prepare will hold for `desc` (exact), without reading a weight; and the workspace of a full Run.
  virtual size_t PreparedBytes(const MoeDesc& desc) const = 0;
  virtual size_t WorkspaceBytes(const MoeDesc& desc) const = 0;

  // Repacks all experts, reading each once. Uses `pool` for parallel reading and packing; at most one canonical expert per
  // worker is alive at a time. Errors of the reader are returned as they are.
  virtual absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                               WorkerPool& pool) const = 0;
};

// Checks the parts of the Run contract that every backend shares: shapes, sizes of ids and weights, ids in [-1, E), rows
// within max_tokens. INVALID_ARGUMENT with the numbers otherwise.
absl::Status ValidateBatch(const MoeDesc& desc, const MoeBatch& batch, const MutableTensorView& out);

// The same for RunBatched: the format was asked for, max_m, shapes, counts in [0, max_m].
absl::Status ValidateBatchedExperts(const MoeDesc& desc, const BatchedExperts& batch, const MutableTensorView& out);

// For Check of every backend: appends a reason when max_tokens_per_expert is negative, or gives more than 2^31 - 1 rows in all.
void CheckBatchedFormat(const MoeDesc& desc, std::vector<Reason>* reasons);

}  // namespace moed

#endif  // MOED_KERNELS_MOE_KERNEL_H_
