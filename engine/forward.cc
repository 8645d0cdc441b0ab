#include "engine/forward.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "engine/gate.h"
#include "engine/routing.h"
#include "kernels/activation_quant.h"
#include "kernels/convert.h"

namespace moed {
namespace {

// Ids and weights of some rows, row-major.
struct Routing {
  int top_k = 0;
  std::span<const int32_t> ids;
  std::span<const float> weights;

  Routing rows(int64_t first, int64_t count) const {
    const size_t at = static_cast<size_t>(first * top_k), slots = static_cast<size_t>(count * top_k);
    return {top_k, ids.subspan(at, slots), weights.subspan(at, slots)};
  }
};

// What the caller decided, for the whole call and before anything is computed: given ids, or logits routed by the rule.
absl::StatusOr<Routing> RouteGiven(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, Scratch& scratch) {
  if (const RoutingByIds* given = std::get_if<RoutingByIds>(&call.routing)) return Routing{given->top_k, given->ids, given->weights};
  const RoutingByLogits* given = std::get_if<RoutingByLogits>(&call.routing);
  if (given == nullptr) return Routing{config.top_k, {}, {}};
  const size_t slots = static_cast<size_t>(call.hidden.rows) * static_cast<size_t>(config.top_k);
  scratch.ids.resize(slots);
  scratch.weights.resize(slots);
  absl::Status status = Route(config.router, config.num_experts, config.top_k, given->logits, layer.gate.correction_bias,
                              scratch.ids, scratch.weights);
  if (!status.ok()) return status;
  return Routing{config.top_k, scratch.ids, scratch.weights};
}

// The server's own gate for some rows: its memory follows the chunk, not the call.
absl::StatusOr<Routing> RouteByGate(const ModelConfig& config, const LoadedLayer& layer, const TensorView& hidden, WorkerPool& pool,
                                    Scratch& scratch) {
  const size_t rows = static_cast<size_t>(hidden.rows), slots = rows * static_cast<size_t>(config.top_k);
  scratch.ids.resize(slots);
  scratch.weights.resize(slots);
  scratch.logits.resize(rows * static_cast<size_t>(config.num_experts));
  ComputeLogits(layer.gate, hidden, pool, scratch.logits);
  absl::Status status = RouteOwnGate(config.router, config.num_experts, config.top_k, scratch.logits, layer.gate.correction_bias,
                                     scratch.ids, scratch.weights);
  if (!status.ok()) return status;
  return Routing{config.top_k, scratch.ids, scratch.weights};
}

// Routed sum plus shared expert, times its gate's factor where it has one, all in float32, rounded once.
absl::Status RunWithShared(const LoadedLayer& layer, const MoeBatch& batch, MutableTensorView out, WorkerPool& pool,
                           Scratch& scratch) {
  const int64_t rows = batch.x.rows, hidden = batch.x.cols;
  scratch.routed.resize(static_cast<size_t>(rows * hidden));
  scratch.shared.resize(static_cast<size_t>(rows * hidden));
  absl::Status status = RunPrepared(*layer.routed, batch, {scratch.routed.data(), DType::kF32, rows, hidden}, pool, scratch);
  if (!status.ok()) return status;
  const std::vector<int32_t> ids(static_cast<size_t>(rows), 0);
  const std::vector<float> ones(static_cast<size_t>(rows), 1.0f);
  MoeBatch shared = {batch.x, ids, ones, 1};
  status = RunPrepared(*layer.shared, shared, {scratch.shared.data(), DType::kF32, rows, hidden}, pool, scratch);
  if (!status.ok()) return status;
  scratch.factors.assign(static_cast<size_t>(rows), 1.0f);
  if (!layer.gate.shared_gate.empty()) ComputeSharedFactors(layer.gate, batch.x, pool, scratch.factors);
  pool.ParallelFor(rows, [&](int64_t row, int) {
    const float factor = scratch.factors[row];
    float* sum = scratch.routed.data() + row * hidden;
    const float* add = scratch.shared.data() + row * hidden;
    for (int64_t c = 0; c < hidden; ++c) sum[c] += factor * add[c];
    RowFromFloat(sum, row, out);
  });
  return absl::OkStatus();
}

// Ids of the model to ids of the experts that this server holds; the others become "no expert".
void MakeLocal(const LoadedLayer& layer, Routing* routing, Scratch& scratch) {
  scratch.local_ids.assign(routing->ids.begin(), routing->ids.end());
  for (int32_t& id : scratch.local_ids) {
    const int32_t local = id - layer.first_expert;
    id = local >= 0 && local < layer.plan.routed.num_experts ? local : -1;
  }
  routing->ids = scratch.local_ids;
}

// Rows of one chunk: both prepared layers' limit, in slots of the desc's own top-k.
int64_t RowsAtOnce(const LoadedLayer& layer, bool with_shared, int top_k) {
  const MoeDesc& desc = layer.plan.routed;
  int64_t rows = std::min(desc.max_tokens, std::max<int64_t>(1, desc.max_tokens * desc.top_k / top_k));
  if (with_shared) rows = std::min(rows, layer.plan.shared.max_tokens);
  return rows;
}

// How many rows go at once. An activation scale that spans the request forbids chunks.
absl::StatusOr<int64_t> StepOf(const LoadedLayer& layer, bool with_shared, int64_t rows, int top_k) {
  const int64_t step = RowsAtOnce(layer, with_shared, top_k);
  if (rows <= step) return std::max<int64_t>(rows, 1);
  if (RowsStandAlone(layer, with_shared)) return step;
  return absl::InvalidArgumentError(absl::StrCat(
      "hidden: ", rows, " rows, want at most ", step,
      ": the layer's activation scales span the request, so it cannot be computed in chunks (see --max-tokens)"));
}

// Rows [first, first + rows) of `call` for an accelerator. Ids stay those of the model.
DeviceCall DevicePart(const ModelConfig& config, const ForwardCall& call, int64_t first, int64_t rows) {
  DeviceCall part;
  part.x = call.hidden.slice(first, rows);
  part.routed_only = call.routed_only;
  part.top_k = config.top_k;
  part.routing = RoutingKind::kGate;
  if (const RoutingByIds* given = std::get_if<RoutingByIds>(&call.routing)) {
    const Routing of_rows = Routing{given->top_k, given->ids, given->weights}.rows(first, rows);
    part.routing = RoutingKind::kIds;
    part.top_k = given->top_k;
    part.ids = of_rows.ids;
    part.weights = of_rows.weights;
  } else if (const RoutingByLogits* given = std::get_if<RoutingByLogits>(&call.routing)) {
    part.routing = RoutingKind::kLogits;
    const int64_t experts = config.num_experts;
    part.logits = given->logits.subspan(static_cast<size_t>(first * experts), static_cast<size_t>(rows * experts));
  }
  return part;
}

}  // namespace

absl::Status RunPrepared(const PreparedMoe& moe, const MoeBatch& batch, MutableTensorView out, WorkerPool& pool, Scratch& scratch) {
  ExecContext context;
  context.pool = &pool;
  if (moe.accelerator() != nullptr) {  // has its workspace in the lane
    context.lane = scratch.lane;
    return moe.Run(batch, out, context);
  }
  const size_t bytes = moe.WorkspaceBytes(batch.x.rows, batch.top_k);
  if (scratch.workspace.size() < bytes) {
    scratch.workspace = AlignedBuffer();  // nothing to keep: the old one goes first
    if (!scratch.workspace.Allocate(bytes)) {
      return absl::ResourceExhaustedError(absl::StrCat("no memory for ", bytes, " bytes of workspace"));
    }
  }
  context.workspace = std::as_writable_bytes(std::span<uint8_t>(scratch.workspace.data(), bytes));
  return moe.Run(batch, out, context);
}

absl::Status ValidateCall(const ModelConfig& config, const ForwardCall& call, const MutableTensorView& out) {
  const int64_t rows = call.hidden.rows;
  if (call.hidden.cols != config.hidden) {
    return absl::InvalidArgumentError(absl::StrCat("hidden: has ", call.hidden.cols, " columns, want H = ", config.hidden));
  }
  if (out.rows != rows || out.cols != config.hidden) {
    return absl::InvalidArgumentError(
        absl::StrCat("output: is [", out.rows, ", ", out.cols, "], want [", rows, ", ", config.hidden, "]"));
  }
  if (const RoutingByLogits* given = std::get_if<RoutingByLogits>(&call.routing)) {
    const size_t want = static_cast<size_t>(rows) * static_cast<size_t>(config.num_experts);
    if (given->logits.size() == want) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("router_logits: ", given->logits.size(), " values, want ", want, " (", rows,
                                                   " rows x E = ", config.num_experts, ")"));
  }
  const RoutingByIds* given = std::get_if<RoutingByIds>(&call.routing);
  if (given == nullptr) return absl::OkStatus();
  if (given->top_k < 1 || given->top_k > config.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("ids: k = ", given->top_k, ", want 1 to E = ", config.num_experts));
  }
  const size_t slots = static_cast<size_t>(rows) * static_cast<size_t>(given->top_k);
  if (given->ids.size() != slots || given->weights.size() != slots) {
    return absl::InvalidArgumentError(absl::StrCat("routing: ", given->ids.size(), " ids and ", given->weights.size(),
                                                   " weights, want ", slots, " of each"));
  }
  for (size_t at = 0; at < slots; ++at) {
    if (given->ids[at] >= -1 && given->ids[at] < config.num_experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("ids: row ", at / given->top_k, ", slot ", at % given->top_k, " is ",
                                                   given->ids[at], ", want -1 to ", config.num_experts - 1,
                                                   " (E = ", config.num_experts, ")"));
  }
  return absl::OkStatus();
}

bool RowsStandAlone(const LoadedLayer& layer, bool with_shared) {
  const bool shared = with_shared && layer.shared != nullptr;
  return !SpansRows(layer.plan.routed.scheme) && !(shared && SpansRows(layer.plan.shared.scheme));
}

void WaitForRows(const ForwardCall& call, int64_t rows) {
  const size_t bytes = call.hidden.slice(0, rows).bytes();
  if (call.incoming != nullptr && bytes > 0) call.incoming->WaitPast(bytes - 1);
}

absl::Status RunForward(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                        WorkerPool& pool, Scratch& scratch, ForwardInfo* info) {
  absl::StatusOr<Routing> given = RouteGiven(config, layer, call, scratch);
  if (!given.ok()) return given.status();
  const bool own_gate = std::holds_alternative<RoutingByGate>(call.routing);
  const bool with_shared = layer.shared != nullptr && !call.routed_only;
  const absl::StatusOr<int64_t> step = StepOf(layer, with_shared, call.hidden.rows, given->top_k);
  if (!step.ok()) return step.status();
  info->top_k = given->top_k;
  for (int64_t first = 0; first < call.hidden.rows; first += *step) {
    const int64_t rows = std::min(*step, call.hidden.rows - first);
    const TensorView hidden = call.hidden.slice(first, rows);
    absl::StatusOr<Routing> routing = own_gate ? RouteByGate(config, layer, hidden, pool, scratch) : given->rows(first, rows);
    if (!routing.ok()) return routing.status();
    if (info->want_routing) {
      info->ids.insert(info->ids.end(), routing->ids.begin(), routing->ids.end());
      info->weights.insert(info->weights.end(), routing->weights.begin(), routing->weights.end());
    }
    if (layer.plan.routed.num_experts != config.num_experts) MakeLocal(layer, &*routing, scratch);
    const MoeBatch batch = {hidden, routing->ids, routing->weights, routing->top_k};
    const MutableTensorView part = out.slice(first, rows);
    absl::Status status = with_shared ? RunWithShared(layer, batch, part, pool, scratch)
                                      : RunPrepared(*layer.routed, batch, part, pool, scratch);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RunOnDevice(const ModelConfig& config, const LoadedLayer& layer, const ForwardCall& call, MutableTensorView out,
                         WorkerPool& pool, Scratch& scratch, ForwardInfo* info) {
  const RoutingByIds* by_ids = std::get_if<RoutingByIds>(&call.routing);
  info->top_k = by_ids != nullptr ? by_ids->top_k : config.top_k;
  const bool with_shared = layer.shared != nullptr && !call.routed_only;
  const absl::StatusOr<int64_t> step = StepOf(layer, with_shared, call.hidden.rows, info->top_k);
  if (!step.ok()) return step.status();
  for (int64_t first = 0; first < call.hidden.rows; first += *step) {
    const int64_t rows = std::min(*step, call.hidden.rows - first);
    DeviceCall part = DevicePart(config, call, first, rows);
    if (rows == call.hidden.rows) {
      part.incoming = call.incoming;
    } else {
      WaitForRows(call, first + rows);  // a chunk waits for its own rows, while those behind still come
    }
    if (info->want_routing) {
      scratch.ids.clear();
      scratch.weights.clear();
      part.used_ids = &scratch.ids;
      part.used_weights = &scratch.weights;
    }
    absl::Status status = layer.device->Forward(part, out.slice(first, rows), *scratch.lane, &pool);
    if (absl::IsInvalidArgument(status) && first > 0) {
      return absl::InvalidArgumentError(absl::StrCat(status.message(), " (rows counted from row ", first, " of the call)"));
    }
    if (!status.ok()) return status;
    if (!info->want_routing) continue;
    info->ids.insert(info->ids.end(), scratch.ids.begin(), scratch.ids.end());
    info->weights.insert(info->weights.end(), scratch.weights.begin(), scratch.weights.end());
  }
  return absl::OkStatus();
}

}  // namespace moed
