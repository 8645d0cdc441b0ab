#include "kernels/cuda/cuda_call.h"

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/part_args.h"
#include "kernels/worker_pool.h"

namespace moed::cuda {
namespace {

size_t Aligned(size_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

// Rows and slots of a call, and of the launches that it takes.
struct CallSizes {
  int64_t rows = 0, slots = 0;
  int64_t row_capacity = 0, slot_capacity = 0;
  int32_t top_k = 1;
};

CallSizes SizesOf(const CallTarget& target, const CallInput& input) {
  CallSizes sizes;
  sizes.top_k = input.top_k;
  sizes.rows = sizes.row_capacity = input.x.rows;
  sizes.slots = sizes.slot_capacity = sizes.rows * input.top_k;
  if (!input.counts.empty()) {
    sizes.slots = sizes.slot_capacity = std::accumulate(input.counts.begin(), input.counts.end(), int64_t{0});
    sizes.row_capacity = sizes.slots;  // rows are only staged by sorted row
  } else if (target.router != nullptr && sizes.rows <= kMostCapturedRows && input.top_k == target.router->top_k) {
    sizes.row_capacity = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(sizes.rows)));
    sizes.slot_capacity = sizes.row_capacity * input.top_k;
  }
  return sizes;
}

// Where a call's arrays lie in the workspace. What comes from the host in one copy is first: [0, sent). That part moves to the
// lane's own arrays where it is small enough (RunningCall::Begin), at the same offsets.
struct CallLayout {
  size_t error = 0, ids = 0, weights = 0, counts = 0, logits = 0;
  size_t sent = 0;
  size_t computed_logits = 0, scratch = 0, local_ids = 0, factor = 0;
  size_t x = 0, out = 0;
  PartWorkspace part[2];
  size_t bytes = 0;
};

class LayoutMaker {
 public:
  LayoutMaker(const CallTarget& target, const CallInput& input, const CallSizes& sizes, DType out_dtype, bool x_on_host,
              bool out_on_host)
      : target_(target), input_(input), sizes_(sizes), out_dtype_(out_dtype), x_on_host_(x_on_host), out_on_host_(out_on_host) {}

  CallLayout Make() {
    const int64_t rows = sizes_.row_capacity, slots = sizes_.slot_capacity;
    const int64_t experts = target_.router != nullptr ? target_.router->experts : 0;
    CallLayout l;
    l.error = Take(1, sizeof(int32_t));
    l.ids = Take(slots, sizeof(int32_t));
    l.weights = Take(slots, sizeof(float));
    l.counts = Take(static_cast<int64_t>(input_.counts.size()), sizeof(int32_t));
    l.logits = Take(input_.routing == RoutingKind::kLogits ? rows * experts : 0, sizeof(float));
    l.sent = at_;
    const bool gate = input_.routing == RoutingKind::kGate;
    l.computed_logits = gate ? Take(rows * experts, sizeof(float)) : l.logits;
    l.scratch = Take(input_.routing == RoutingKind::kIds ? 0 : 2 * rows * experts, sizeof(float));
    l.local_ids = Take(slots, sizeof(int32_t));
    l.factor = Take(rows, sizeof(float));
    l.x = Take(x_on_host_ ? std::max(rows, input_.x.rows) : 0, input_.x.row_bytes());
    l.out = Take(out_on_host_ ? std::max(rows, input_.x.rows) : 0, static_cast<size_t>(input_.x.cols) * DTypeBytes(out_dtype_));
    l.part[0] = WorkspaceFor(*target_.routed, rows, slots);
    at_ = l.part[0].end;
    if (target_.shared != nullptr) {
      l.part[1] = WorkspaceFor(*target_.shared, rows, rows);
      at_ = l.part[1].end;
    }
    l.bytes = at_;
    return l;
  }

 private:
  PartWorkspace WorkspaceFor(const CudaMoe& moe, int64_t rows, int64_t slots) const {
    return WorkspaceOf(moe.desc(), moe.plan(), moe.hopper(), rows, slots, input_.x.dtype, at_);
  }

  size_t Take(int64_t count, size_t bytes) {
    const size_t begin = at_;
    at_ = Aligned(at_ + static_cast<size_t>(count) * bytes);
    return begin;
  }

  const CallTarget& target_;
  const CallInput& input_;
  const CallSizes& sizes_;
  const DType out_dtype_;
  const bool x_on_host_, out_on_host_;
  size_t at_ = 0;
};

// Fills the arguments and the plan of the launches.
class CallFiller {
 public:
  // `base`: of the workspace. `sent`: of what comes from the host, [0, layout.sent).
  CallFiller(const CallTarget& target, const CallInput& input, const CallSizes& sizes, const CallLayout& layout, std::byte* base,
             std::byte* sent)
      : target_(target), input_(input), sizes_(sizes), layout_(layout), base_(base), sent_(sent) {}

  void Fill(const MutableTensorView& out, const void* x, void* device_out, CallBlock* block, LaunchPlan* plan) const {
    plan->rows = static_cast<int32_t>(sizes_.row_capacity);
    plan->hidden = input_.x.cols;
    if (target_.router != nullptr) FillRouter(x, &block->router, plan);
    PartInput routed = {x,
                        input_.x.dtype,
                        sizes_.rows,
                        sizes_.row_capacity,
                        sizes_.slot_capacity,
                        sizes_.top_k,
                        nullptr,
                        At<float>(layout_.weights)};
    if (input_.counts.empty()) routed.ids = At<int32_t>(target_.router != nullptr ? layout_.local_ids : layout_.ids);
    if (!input_.counts.empty()) routed.counts = At<int32_t>(layout_.counts), routed.max_m = input_.max_m;
    FillPart(*target_.routed, routed, layout_.part[0], base_, &block->part[0], &plan->part[0]);
    if (target_.shared != nullptr) {
      const PartInput shared = {x, input_.x.dtype, sizes_.rows, sizes_.row_capacity, sizes_.row_capacity};
      FillPart(*target_.shared, shared, layout_.part[1], base_, &block->part[1], &plan->part[1]);
      FillShared(block->part[1], &block->combine);
    }
    FillCombine(*target_.routed, routed, block->part[0], device_out, out.dtype, &block->combine);
    plan->combine = static_cast<int32_t>(input_.counts.empty() ? sizes_.row_capacity : sizes_.slot_capacity);
  }

 private:
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>((offset < layout_.sent ? sent_ : base_) + offset);
  }
  bool wants_factor() const { return target_.shared != nullptr && target_.router->shared_gate != nullptr; }

  void FillRouter(const void* x, RouterArgs* args, LaunchPlan* plan) const {
    const LayerRouter& router = *target_.router;
    args->rows = static_cast<int32_t>(sizes_.rows);
    args->experts = router.experts;
    args->top_k = sizes_.top_k;
    args->hidden = input_.x.cols;
    args->rule = router.rule;
    args->x = x;
    args->x_dtype = input_.x.dtype;
    const bool gate = input_.routing == RoutingKind::kGate;
    if (gate) args->gate = router.gate, args->gate_bias = router.gate_bias;
    if (wants_factor()) args->shared_gate = router.shared_gate, args->shared_factor = At<float>(layout_.factor);
    args->logits = At<float>(layout_.computed_logits);
    args->route = input_.routing != RoutingKind::kIds;
    args->own_gate = gate;
    args->correction_bias = router.correction_bias;
    args->ids = At<int32_t>(layout_.ids);
    args->weights = At<float>(layout_.weights);
    args->scratch = At<float>(layout_.scratch);
    args->first_expert = router.first_expert;
    args->held = target_.routed->desc().num_experts;
    args->local_ids = At<int32_t>(layout_.local_ids);
    args->error_row = At<int32_t>(layout_.error);
    plan->router_experts = router.experts;
    plan->gate = gate || wants_factor();
  }

  void FillShared(const PartArgs& shared, CombineArgs* args) const {
    args->shared = SumsOf(shared.down);
    if (wants_factor()) args->factor = At<float>(layout_.factor);
  }

  const CallTarget& target_;
  const CallInput& input_;
  const CallSizes& sizes_;
  const CallLayout& layout_;
  std::byte *const base_, *const sent_;
};

// Bytes from which several threads copy between host buffers, and how much each takes at a time. Waking the helpers takes as long
// as one thread needs for half a megabyte.
constexpr size_t kParallelCopy = size_t{2} << 20, kCopyPiece = size_t{64} << 10;

void CopyOnHost(std::byte* to, const std::byte* from, size_t bytes, WorkerPool* pool) {
  if (pool == nullptr || bytes < kParallelCopy || pool->threads() == 1) {
    std::memcpy(to, from, bytes);
    return;
  }
  pool->ParallelFor(static_cast<int64_t>((bytes + kCopyPiece - 1) / kCopyPiece), [&](int64_t piece, int) {
    const size_t at = static_cast<size_t>(piece) * kCopyPiece;
    std::memcpy(to + at, from + at, std::min(kCopyPiece, bytes - at));
  });
}

// Host memory that the device may read and write directly.
bool IsPinned(const void* memory) {
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, memory) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost;
}

// One call under way.
class RunningCall {
 public:
  RunningCall(const CallTarget& target, const CallInput& input, MutableTensorView out, CudaLane& lane, WorkerPool* pool)
      : target_(target), input_(input), out_(out), lane_(lane), pool_(pool), sizes_(SizesOf(target, input)),
        x_on_host_(input.x.place == Place::kHost), out_on_host_(out.place == Place::kHost),
        layout_(LayoutMaker(target, input, sizes_, out.dtype, x_on_host_, out_on_host_).Make()) {}

  absl::Status Run() {
    absl::Status status = Begin();
    if (status.ok() && x_on_host_) status = SendRows();  // first: the arguments are made while the rows cross the bus
    if (status.ok()) status = SendArguments();
    if (status.ok()) status = lane_.Launch(plan_);
    if (status.ok()) status = Receive();
    // Also of a call that failed half-way: what is under way reads the staging buffers, and reads and writes the caller's memory.
    const absl::Status finished = lane_.Finish();
    if (!status.ok()) return status;
    return finished.ok() ? Deliver() : finished;
  }

  // The launches alone, captured; the arguments are those of no call.
  absl::Status Capture() {
    absl::Status status = Begin();
    if (!status.ok()) return status;
    Fill();
    return lane_.Capture(plan_);
  }

 private:
  size_t x_bytes() const { return input_.x.bytes(); }
  size_t out_bytes() const { return out_.bytes(); }
  bool wants_routing() const { return input_.used_ids != nullptr || input_.used_weights != nullptr; }

  // Memory. Staging: the block, what is sent with it, and rows that the device cannot read where they lie.
  absl::Status Begin() {
    absl::StatusOr<std::byte*> base = lane_.Workspace(layout_.bytes);
    if (!base.ok()) return base.status();
    base_ = *base;
    sent_ = layout_.sent <= CudaLane::kArrayBytes ? lane_.device_arrays() : base_;
    direct_x_ = x_on_host_ && input_.x.data != nullptr && IsPinned(input_.x.data);
    in_x_ = CudaLane::kBlockBytes + Aligned(layout_.sent);
    absl::StatusOr<std::byte*> in = lane_.StagingIn(in_x_ + (x_on_host_ && !direct_x_ ? x_bytes() : 0));
    if (!in.ok()) return in.status();
    in_ = *in;
    device_out_ = out_on_host_ ? base_ + layout_.out : out_.data;
    return absl::OkStatus();
  }

  // Arguments and plan.
  void Fill() {
    const void* x = x_on_host_ ? base_ + layout_.x : input_.x.data;
    CallBlock* block = new (in_) CallBlock;
    CallFiller(target_, input_, sizes_, layout_, base_, sent_).Fill(out_, x, device_out_, block, &plan_);
  }

  absl::Status ToDevice(void* to, const std::byte* from, size_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, lane_.stream()), "copy to the GPU");
  }

  absl::Status SendArguments() {
    Fill();
    std::byte* const sent = in_ + CudaLane::kBlockBytes;
    const int32_t no_error = INT_MAX;
    const auto put = [&](size_t at, const void* data, size_t bytes) {
      if (bytes > 0) std::memcpy(sent + at, data, bytes);
    };
    put(layout_.error, &no_error, sizeof(no_error));
    put(layout_.ids, input_.ids.data(), input_.ids.size_bytes());
    put(layout_.weights, input_.weights.data(), input_.weights.size_bytes());
    put(layout_.counts, input_.counts.data(), input_.counts.size_bytes());
    if (input_.routing == RoutingKind::kLogits) put(layout_.logits, input_.logits.data(), input_.logits.size_bytes());
    if (sent_ != base_) return ToDevice(lane_.device_block(), in_, CudaLane::kBlockBytes + layout_.sent);
    absl::Status status = ToDevice(lane_.device_block(), in_, sizeof(CallBlock));
    return status.ok() ? ToDevice(base_, sent, layout_.sent) : status;
  }

  // From where the rows lie, if that is pinned; the caller's memory stays as it is until Finish. In batched experts only counted
  // rows may be read.
  absl::Status SendRows() {
    const std::byte* from = static_cast<const std::byte*>(input_.x.data);
    const size_t row_bytes = input_.x.row_bytes();
    const auto send = [&](int64_t first, int64_t rows) {
      const size_t at = static_cast<size_t>(first) * row_bytes, bytes = static_cast<size_t>(rows) * row_bytes;
      if (direct_x_) return ToDevice(base_ + layout_.x + at, from + at, bytes);
      CopyOnHost(in_ + in_x_ + at, from + at, bytes, pool_);
      return ToDevice(base_ + layout_.x + at, in_ + in_x_ + at, bytes);
    };
    if (input_.counts.empty()) return send(0, input_.x.rows);
    for (size_t e = 0; e < input_.counts.size(); ++e) {
      absl::Status status = send(static_cast<int64_t>(e) * input_.max_m, input_.counts[e]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status FromDevice(std::byte* to, const void* from, size_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, lane_.stream()), "copy from the GPU");
  }

  // Enqueues the copies back: the error and the routing, which follows it, in one, and the output.
  absl::Status Receive() {
    const size_t routing_end = layout_.weights + static_cast<size_t>(sizes_.slots) * sizeof(float);
    const size_t head = wants_routing() ? routing_end : target_.router != nullptr ? layout_.error + sizeof(int32_t) : 0;
    back_out_ = Aligned(head);
    direct_out_ = out_on_host_ && input_.counts.empty() && IsPinned(out_.data);
    absl::StatusOr<std::byte*> back = lane_.StagingOut(back_out_ + (out_on_host_ && !direct_out_ ? out_bytes() : 0));
    if (!back.ok()) return back.status();
    back_ = *back;
    absl::Status status = FromDevice(back_, sent_, head);  // which begins with the error
    if (!status.ok() || !out_on_host_) return status;
    return ReceiveRows(direct_out_ ? static_cast<std::byte*>(out_.data) : back_ + back_out_);
  }

  // In batched experts the others were not written.
  absl::Status ReceiveRows(std::byte* to) {
    if (input_.counts.empty()) return FromDevice(to, device_out_, out_bytes());
    for (size_t e = 0; e < input_.counts.size(); ++e) {
      const size_t at = e * static_cast<size_t>(input_.max_m) * out_.row_bytes();
      absl::Status status =
          FromDevice(to + at, static_cast<std::byte*>(device_out_) + at, static_cast<size_t>(input_.counts[e]) * out_.row_bytes());
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // After the stream is done.
  absl::Status Deliver() {
    const int32_t row = target_.router != nullptr ? *reinterpret_cast<const int32_t*>(back_ + layout_.error) : INT_MAX;
    if (row != INT_MAX) {
      return absl::InvalidArgumentError(
          input_.routing == RoutingKind::kIds
              ? absl::StrCat("ids: row ", row, " holds an id outside -1 to ", target_.router->experts - 1)
              : absl::StrCat("router: row ", row,
                             " cannot be routed: NaN or +Inf among its logits, or fewer "
                             "finite ones than k in the allowed groups"));
    }
    if (wants_routing()) DeliverRouting();
    if (!out_on_host_ || direct_out_) return absl::OkStatus();
    DeliverRows();
    return absl::OkStatus();
  }

  void DeliverRouting() {
    const size_t slots = static_cast<size_t>(sizes_.slots);
    const auto* ids = reinterpret_cast<const int32_t*>(back_ + layout_.ids);
    const auto* weights = reinterpret_cast<const float*>(back_ + layout_.weights);
    if (input_.used_ids != nullptr) input_.used_ids->assign(ids, ids + slots);
    if (input_.used_weights != nullptr) input_.used_weights->assign(weights, weights + slots);
  }

  void DeliverRows() {
    std::byte* to = static_cast<std::byte*>(out_.data);
    const std::byte* from = back_ + back_out_;
    if (input_.counts.empty()) return CopyOnHost(to, from, out_bytes(), pool_);
    for (size_t e = 0; e < input_.counts.size(); ++e) {
      const size_t at = e * static_cast<size_t>(input_.max_m) * out_.row_bytes();
      CopyOnHost(to + at, from + at, static_cast<size_t>(input_.counts[e]) * out_.row_bytes(), pool_);
    }
  }

  const CallTarget& target_;
  const CallInput& input_;
  const MutableTensorView out_;
  CudaLane& lane_;
  WorkerPool* const pool_;
  const CallSizes sizes_;
  const bool x_on_host_, out_on_host_;
  const CallLayout layout_;
  LaunchPlan plan_;
  std::byte* base_ = nullptr;  // of the workspace
  std::byte* sent_ = nullptr;  // of what comes from the host with the block
  void* device_out_ = nullptr;
  std::byte *in_ = nullptr, *back_ = nullptr;  // staging buffers
  size_t in_x_ = 0, back_out_ = 0;
  bool direct_x_ = false, direct_out_ = false;
};

// Of the largest call of `rows` rows with the model's own top-k.
size_t WorkspaceBytesOf(const CallTarget& target, int64_t rows) {
  CallInput input;
  input.top_k = target.router->top_k;
  input.routing = RoutingKind::kGate;
  size_t most = 0;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    input.x = {nullptr, dtype, rows, target.routed->desc().hidden, Place::kHost};
    most = std::max(most, LayoutMaker(target, input, SizesOf(target, input), DType::kF32, true, true).Make().bytes);
  }
  return most;
}

CudaDevice* DeviceOf(const CallTarget& target) { return static_cast<CudaDevice*>(target.routed->accelerator()); }

}  // namespace

absl::Status CheckPlaces(const TensorView& x, const MutableTensorView& out, int64_t top_k) {
  if (x.rows * top_k > kMostSlots) {
    return absl::InvalidArgumentError(
        absl::StrCat("call has ", x.rows, " rows of ", top_k, " slots, want at most ", kMostSlots, " slots"));
  }
  const auto misaligned = [](const void* data, DType dtype, Place place) {
    return place == Place::kDevice && reinterpret_cast<uintptr_t>(data) % DTypeBytes(dtype) != 0;
  };
  if (!misaligned(x.data, x.dtype, x.place) && !misaligned(out.data, out.dtype, out.place)) return absl::OkStatus();
  return absl::InvalidArgumentError("a tensor on the GPU must be aligned to its elements");
}

absl::Status RunCall(const CallTarget& target, const CallInput& input, MutableTensorView out, CudaLane& lane, WorkerPool* pool) {
  CudaDevice* const device = DeviceOf(target);
  absl::Status failure = device->failure();
  if (!failure.ok()) return failure;
  return device->Report(RunningCall(target, input, out, lane, pool).Run());
}

absl::Status WarmUpCalls(const CallTarget& target, CudaLane& lane) {
  const MoeDesc& desc = target.routed->desc();
  int64_t most_rows = desc.max_tokens;
  if (target.shared != nullptr) most_rows = std::min(most_rows, target.shared->desc().max_tokens);
  CallInput input;
  input.top_k = target.router->top_k;
  const auto capture = [&](int64_t rows, DType dtype, RoutingKind routing, const CallTarget& of) {
    input.x = {nullptr, dtype, rows, desc.hidden, Place::kHost};
    input.routing = routing;
    return RunningCall(of, input, {nullptr, dtype, rows, desc.hidden, Place::kHost}, lane, nullptr).Capture();
  };
  CallTarget routed_only = target;
  routed_only.shared = nullptr;
  absl::StatusOr<std::byte*> largest = lane.Workspace(WorkspaceBytesOf(target, most_rows));
  if (!largest.ok()) return DeviceOf(target)->Report(largest.status());
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    for (RoutingKind routing : {RoutingKind::kIds, RoutingKind::kLogits, RoutingKind::kGate}) {
      if (routing == RoutingKind::kGate && target.router->gate == nullptr) continue;
      const int64_t most = std::min(kMostCapturedRows, most_rows);
      for (int64_t capacity = 1; capacity < 2 * most; capacity *= 2) {
        const int64_t rows = std::min(capacity, most);
        absl::Status status = capture(rows, dtype, routing, target);
        if (status.ok() && target.shared != nullptr) status = capture(rows, dtype, routing, routed_only);
        if (!status.ok()) return DeviceOf(target)->Report(status);
      }
    }
  }
  return DeviceOf(target)->Report(lane.Finish());
}

}  // namespace moed::cuda
