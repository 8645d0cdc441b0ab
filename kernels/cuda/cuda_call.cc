#include "kernels/cuda/cuda_call.h"

#include <algorithm>
#include <climits>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/call_layout.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/worker_pool.h"

namespace moed::cuda {
namespace {

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

// Whether the device may read and write this byte of host memory where it lies.
bool IsPinned(const void* byte) {
  cudaPointerAttributes attributes = {};
  if (cudaPointerGetAttributes(&attributes, byte) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeHost && attributes.devicePointer == byte;
}

// The same of `bytes` > 0 from `memory` on.
bool IsPinned(const void* memory, size_t bytes) {
  return IsPinned(memory) && IsPinned(static_cast<const std::byte*>(memory) + bytes - 1);
}

// Bytes of rows that are still coming which cross the bus at once: few enough that the last piece, which nothing hides, takes some
// 6 us, enough that the host, which needs 4 us to order a copy, has time left to help with the writing.
constexpr size_t kBusPiece = size_t{256} << 10;

// Bytes of an output that the last kernel may write over the bus itself: its thread blocks then wait for the bus instead of the
// copy engine, which starts later.
constexpr size_t kMostThrough = size_t{4} << 20;

// One call under way. The lane's pinned memory: `in` is the block, what is sent with it, and rows that the device cannot read where
// they lie; `back` is the error word, routing that is wanted, and rows that the device cannot write where they go. The host
// initialises the error word before the launch, and kernels write it where it lies, so that a call without an error copies nothing.
class RunningCall {
 public:
  RunningCall(const CallTarget& target, const CallInput& input, MutableTensorView out, CudaLane& lane, WorkerPool* pool)
      : target_(target), input_(input), out_(out), lane_(lane), pool_(pool), sizes_(SizesOf(target, input)),
        x_on_host_(input.x.place == Place::kHost), out_on_host_(out.place == Place::kHost),
        layout_(LayoutOf(target, input, sizes_, out.dtype, x_on_host_, out_on_host_)) {}

  absl::Status Run() {
    const bool coming = x_on_host_ && input_.incoming != nullptr;
    absl::Status status = Begin();
    // Rows that are there go first: the arguments are made while they cross the bus. Else the arguments are made while rows come.
    if (status.ok() && x_on_host_ && !coming) status = SendRows();
    if (status.ok()) status = SendArguments();
    if (status.ok() && coming) status = SendComingRows();
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
  static constexpr size_t kBackRouting = kArrayAlignment;  // behind the error word

  size_t x_bytes() const { return input_.x.bytes(); }
  size_t out_bytes() const { return out_.bytes(); }
  bool wants_routing() const { return input_.used_ids != nullptr || input_.used_weights != nullptr; }

  // Memory.
  absl::Status Begin() {
    absl::StatusOr<std::byte*> base = lane_.Workspace(layout_.bytes);
    if (!base.ok()) return base.status();
    base_ = *base;
    sent_ = layout_.sent <= CudaLane::kArrayBytes ? lane_.device_arrays() : base_;
    direct_x_ = x_on_host_ && input_.x.data != nullptr && IsPinned(input_.x.data, x_bytes());
    in_x_ = CudaLane::kBlockBytes + Aligned(layout_.sent);
    absl::StatusOr<std::byte*> in = lane_.StagingIn(in_x_ + (x_on_host_ && !direct_x_ ? x_bytes() : 0));
    if (!in.ok()) return in.status();
    in_ = *in;
    if (absl::Status status = BeginBack(); !status.ok()) return status;
    through_ = direct_out_ && out_bytes() <= kMostThrough;
    device_out_ = out_on_host_ && !through_ ? base_ + layout_.out : out_.data;
    return absl::OkStatus();
  }

  // Without an output there are launches to capture and nothing comes back.
  absl::Status BeginBack() {
    direct_out_ = out_on_host_ && input_.counts.empty() && (out_.data == nullptr || IsPinned(out_.data, out_bytes()));
    back_routing_ = wants_routing() ? layout_.weights + static_cast<size_t>(sizes_.slots) * sizeof(float) : 0;
    back_out_ = kBackRouting + Aligned(back_routing_);
    absl::StatusOr<std::byte*> back = lane_.StagingOut(back_out_ + (out_on_host_ && !direct_out_ ? out_bytes() : 0));
    if (!back.ok()) return back.status();
    back_ = *back;
    *error_row() = INT_MAX;
    return absl::OkStatus();
  }

  // Pinned memory has the same address for the device.
  int32_t* error_row() const { return reinterpret_cast<int32_t*>(back_); }

  // Arguments and plan.
  void Fill() {
    const CallPlaces places = {base_, sent_, error_row(), x_on_host_ ? base_ + layout_.x : input_.x.data, device_out_};
    FillCall(target_, input_, sizes_, layout_, places, out_.dtype, new (in_) CallBlock, &plan_);
  }

  absl::Status ToDevice(void* to, const std::byte* from, size_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, lane_.stream()), "copy to the GPU");
  }

  absl::Status SendArguments() {
    Fill();
    std::byte* const sent = in_ + CudaLane::kBlockBytes;
    const auto put = [&](size_t at, const void* data, size_t bytes) {
      if (bytes > 0) std::memcpy(sent + at, data, bytes);
    };
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

  // Rows that are still being written, piece by piece, from where they lie; where the device cannot read there, as any others.
  absl::Status SendComingRows() {
    if (!direct_x_) {
      input_.incoming->WaitPast(x_bytes() - 1);
      return SendRows();
    }
    const std::byte* from = static_cast<const std::byte*>(input_.x.data);
    for (size_t sent = 0; sent < x_bytes();) {
      const size_t there = input_.incoming->WaitPast(std::min(sent + kBusPiece, x_bytes()) - 1);
      absl::Status status = ToDevice(base_ + layout_.x + sent, from + sent, there - sent);
      if (!status.ok()) return status;
      sent = there;
    }
    return absl::OkStatus();
  }

  absl::Status FromDevice(std::byte* to, const void* from, size_t bytes) {
    if (bytes == 0) return absl::OkStatus();
    return ToStatus(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, lane_.stream()), "copy from the GPU");
  }

  // Enqueues the copies back: ids and weights, which lie one after the other, in one, and the output.
  absl::Status Receive() {
    absl::Status status = FromDevice(back_ + kBackRouting, sent_, back_routing_);
    if (!status.ok() || !out_on_host_ || through_) return status;
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
    const int32_t row = *error_row();
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
    const auto* ids = reinterpret_cast<const int32_t*>(back_ + kBackRouting + layout_.ids);
    const auto* weights = reinterpret_cast<const float*>(back_ + kBackRouting + layout_.weights);
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
  size_t in_x_ = 0, back_routing_ = 0, back_out_ = 0;
  // Rows and output are read and written in the caller's own memory; the output by the last kernel, without a copy.
  bool direct_x_ = false, direct_out_ = false, through_ = false;
};

// Of the largest call of `rows` rows with the model's own top-k.
size_t WorkspaceBytesOf(const CallTarget& target, int64_t rows) {
  CallInput input;
  input.top_k = target.router->top_k;
  input.routing = RoutingKind::kGate;
  size_t most = 0;
  for (const DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    input.x = {nullptr, dtype, rows, target.routed->desc().hidden, Place::kHost};
    most = std::max(most, LayoutOf(target, input, SizesOf(target, input), DType::kF32, true, true).bytes);
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
