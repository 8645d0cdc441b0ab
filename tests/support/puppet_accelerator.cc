#include "tests/support/puppet_accelerator.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "engine/gate.h"
#include "engine/routing.h"
#include "kernels/aligned_buffer.h"
#include "kernels/backends.h"
#include "kernels/convert.h"

namespace moed::testing {

// A lane of its own accelerator, with a pool without threads and memory of "the device".
class PuppetLane : public Lane {
 public:
  explicit PuppetLane(const PuppetAccelerator* owner) : owner(owner) {}

  const PuppetAccelerator* const owner;
  std::atomic<bool> busy{false};
  WorkerPool pool{1};
  AlignedBuffer workspace;
  std::vector<std::byte> x;  // the copy of a call's rows
};

namespace {

// Holds the lane for a call: INTERNAL when it is none of `owner`, or when another call is on it.
class OnLane {
 public:
  OnLane(Lane* lane, const PuppetAccelerator* owner) : lane_(dynamic_cast<PuppetLane*>(lane)) {
    if (lane_ == nullptr || lane_->owner != owner) {
      status_ = absl::InternalError("puppet: a call without a lane of its accelerator");
    } else if (lane_->busy.exchange(true)) {
      status_ = absl::InternalError("puppet: two calls on one lane");
    } else {
      held_ = true;
    }
  }
  ~OnLane() {
    if (held_) lane_->busy = false;
  }
  const absl::Status& status() const { return status_; }
  PuppetLane& operator*() const { return *lane_; }

 private:
  PuppetLane* const lane_;
  bool held_ = false;
  absl::Status status_;
};

absl::Status RunInner(const PreparedMoe& inner, const MoeBatch& batch, MutableTensorView out, PuppetLane& lane) {
  const size_t bytes = inner.WorkspaceBytes(batch.x.rows, batch.top_k);
  if (lane.workspace.size() < bytes && !lane.workspace.Allocate(bytes)) return absl::ResourceExhaustedError("puppet: workspace");
  ExecContext context;
  context.pool = &lane.pool;
  context.workspace = std::as_writable_bytes(std::span<uint8_t>(lane.workspace.data(), bytes));
  return inner.Run(batch, out, context);
}

class PuppetPinned : public PinnedBuffer {
 public:
  PuppetPinned(size_t bytes, std::atomic<int>* alive) : bytes_(bytes), alive_(alive) {
    allocated_ = buffer_.Allocate(bytes);
    ++*alive_;
  }
  ~PuppetPinned() override { --*alive_; }
  bool allocated() const { return allocated_; }
  std::span<std::byte> bytes() override { return std::as_writable_bytes(std::span<uint8_t>(buffer_.data(), bytes_)); }

 private:
  AlignedBuffer buffer_;
  bool allocated_ = false;
  const size_t bytes_;
  std::atomic<int>* const alive_;
};

class PuppetRegistered : public PinnedBuffer {
 public:
  PuppetRegistered(std::span<std::byte> memory, std::atomic<int>* alive) : memory_(memory), alive_(alive) { ++*alive_; }
  ~PuppetRegistered() override { --*alive_; }
  std::span<std::byte> bytes() override { return memory_; }

 private:
  const std::span<std::byte> memory_;
  std::atomic<int>* const alive_;
};

class PuppetShared : public SharedMemory {
 public:
  PuppetShared(std::byte* data, size_t bytes, std::shared_ptr<std::atomic<int>> open, std::atomic<int>* alive)
      : data_(data), bytes_(bytes), open_(std::move(open)), alive_(alive) {
    ++*open_;
    ++*alive_;
  }
  ~PuppetShared() override {
    --*open_;
    --*alive_;
  }
  void* data() const override { return data_; }
  size_t bytes() const override { return bytes_; }

 private:
  std::byte* const data_;
  const size_t bytes_;
  const std::shared_ptr<std::atomic<int>> open_;
  std::atomic<int>* const alive_;
};

}  // namespace

class PuppetMoe : public PreparedMoe {
 public:
  PuppetMoe(PuppetAccelerator* owner, std::unique_ptr<PreparedMoe> inner, int64_t max_tokens, int experts)
      : owner_(owner), inner_(std::move(inner)), max_tokens_(max_tokens), experts_(experts) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override {
    ++owner_->counts_.prepared_calls;
    if (absl::Status failure = owner_->Failure(); !failure.ok()) return failure;
    const OnLane lane(context.lane, owner_);
    return lane.status().ok() ? RunInner(*inner_, batch, out, *lane) : lane.status();
  }
  absl::Status RunBatched(const BatchedExperts&, MutableTensorView, ExecContext&) const override {
    return absl::FailedPreconditionError("puppet: no batched experts");
  }
  Accelerator* accelerator() const override { return owner_; }
  size_t WorkspaceBytes(int64_t tokens, int top_k) const override { return inner_->WorkspaceBytes(tokens, top_k); }
  size_t BatchedWorkspaceBytes(int64_t) const override { return 0; }
  size_t ResidentBytes() const override { return inner_->ResidentBytes(); }
  const QuantScheme& ExecutedScheme() const override { return inner_->ExecutedScheme(); }

  const PreparedMoe& inner() const { return *inner_; }
  int64_t max_tokens() const { return max_tokens_; }
  int experts() const { return experts_; }

 private:
  PuppetAccelerator* const owner_;
  const std::unique_ptr<PreparedMoe> inner_;
  const int64_t max_tokens_;
  const int experts_;
};

class PuppetLayer : public DeviceLayer {
 public:
  PuppetLayer(PuppetAccelerator* owner, const DeviceLayerParts& parts)
      : owner_(owner), parts_(parts), routed_(static_cast<const PuppetMoe&>(*parts.routed)),
        shared_(static_cast<const PuppetMoe*>(parts.shared)) {
    gate_.weight.assign(parts.gate.begin(), parts.gate.end());
    gate_.bias.assign(parts.gate_bias.begin(), parts.gate_bias.end());
    gate_.correction_bias.assign(parts.correction_bias.begin(), parts.correction_bias.end());
    gate_.shared_gate.assign(parts.shared_gate.begin(), parts.shared_gate.end());
  }

  absl::Status Forward(const DeviceCall& call, MutableTensorView out, Lane& lane, WorkerPool* pool) const override {
    ++owner_->counts_.device_calls;
    if (absl::Status failure = owner_->Failure(); !failure.ok()) return failure;
    const OnLane on(&lane, owner_);
    if (!on.status().ok()) return on.status();
    const bool with_shared = shared_ != nullptr && !call.routed_only;
    const int64_t slots = call.x.rows * call.top_k, most = routed_.max_tokens() * std::max(call.top_k, parts_.top_k);
    if (slots > most || (with_shared && call.x.rows > shared_->max_tokens())) return absl::InternalError("puppet: too many rows");
    absl::StatusOr<TensorView> copied = call.incoming != nullptr ? CopyIncoming(call, *on) : Copy(call.x, *on, pool);
    if (!copied.ok()) return copied.status();
    const TensorView x = *copied;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    if (absl::Status status = RouteRows(call, x, *on, &ids, &weights); !status.ok()) return status;
    owner_->StopIfBlocked();
    if (absl::Status failure = owner_->Failure(); !failure.ok()) return failure;
    return Compute(x, ids, weights, call.top_k, with_shared, out, *on);
  }

  absl::Status WarmUp(Lane& lane) const override {
    ++owner_->counts_.warm_ups;
    const OnLane on(&lane, owner_);
    return on.status().ok() ? owner_->Failure() : on.status();
  }

 private:
  // To the device, with the help of `pool`.
  static TensorView Copy(const TensorView& x, PuppetLane& lane, WorkerPool* pool) {
    lane.x.resize(x.bytes());
    const auto copy = [&](int64_t row, int) {
      std::memcpy(lane.x.data() + static_cast<size_t>(row) * x.row_bytes(), x.row(row), x.row_bytes());
    };
    (pool != nullptr ? *pool : lane.pool).ParallelFor(x.rows, copy);
    return {lane.x.data(), x.dtype, x.rows, x.cols, Place::kDevice};
  }

  // The same as the rows come, each part as soon as it is said to be there. INTERNAL when the answers are none that may be given.
  absl::StatusOr<TensorView> CopyIncoming(const DeviceCall& call, PuppetLane& lane) const {
    const TensorView& x = call.x;
    if (x.place != Place::kHost) return absl::InternalError("puppet: rows on the device cannot be coming");
    lane.x.resize(x.bytes());
    for (size_t copied = 0; copied < x.bytes();) {
      const size_t there = call.incoming->WaitPast(copied);
      if (there <= copied || there > x.bytes()) return absl::InternalError("puppet: not more rows, or more than the call has");
      std::memcpy(lane.x.data() + copied, static_cast<const std::byte*>(x.data) + copied, there - copied);
      copied = there;
      ++owner_->counts_.incoming_parts;
    }
    return TensorView{lane.x.data(), x.dtype, x.rows, x.cols, Place::kDevice};
  }

  absl::Status RouteRows(const DeviceCall& call, const TensorView& x, PuppetLane& lane, std::vector<int32_t>* ids,
                         std::vector<float>* weights) const {
    ids->resize(static_cast<size_t>(x.rows * call.top_k));
    weights->resize(ids->size());
    absl::Status status;
    if (call.routing == RoutingKind::kIds) {
      ids->assign(call.ids.begin(), call.ids.end());
      weights->assign(call.weights.begin(), call.weights.end());
    } else if (call.routing == RoutingKind::kLogits) {
      status = Route(parts_.rule, parts_.num_experts, parts_.top_k, call.logits, gate_.correction_bias, *ids, *weights);
    } else {
      std::vector<float> logits(static_cast<size_t>(x.rows * parts_.num_experts));
      ComputeLogits(gate_, x, lane.pool, logits);
      status = RouteOwnGate(parts_.rule, parts_.num_experts, parts_.top_k, logits, gate_.correction_bias, *ids, *weights);
    }
    if (!status.ok()) return status;
    if (call.used_ids != nullptr) *call.used_ids = *ids;
    if (call.used_weights != nullptr) *call.used_weights = *weights;
    return absl::OkStatus();
  }

  absl::Status Compute(const TensorView& x, std::vector<int32_t> ids, const std::vector<float>& weights, int top_k,
                       bool with_shared, MutableTensorView out, PuppetLane& lane) const {
    for (int32_t& id : ids) {
      id -= parts_.first_expert;
      if (id < 0 || id >= routed_.experts()) id = -1;
    }
    std::vector<float> sum(static_cast<size_t>(x.rows * x.cols)), add(sum.size());
    const MutableTensorView sums = {sum.data(), DType::kF32, x.rows, x.cols}, adds = {add.data(), DType::kF32, x.rows, x.cols};
    const MoeBatch batch = {x, ids, weights, top_k};
    if (!with_shared) return RunInner(routed_.inner(), batch, out, lane);
    if (absl::Status status = RunInner(routed_.inner(), batch, sums, lane); !status.ok()) return status;
    const std::vector<int32_t> zeros(static_cast<size_t>(x.rows), 0);
    std::vector<float> factors(static_cast<size_t>(x.rows), 1.0f);
    if (absl::Status status = RunInner(shared_->inner(), {x, zeros, factors, 1}, adds, lane); !status.ok()) return status;
    if (!gate_.shared_gate.empty()) ComputeSharedFactors(gate_, x, lane.pool, factors);
    for (int64_t row = 0; row < x.rows; ++row) {
      for (int64_t c = 0; c < x.cols; ++c) sum[row * x.cols + c] += factors[row] * add[row * x.cols + c];
      RowFromFloat(sum.data() + row * x.cols, row, out);
    }
    return absl::OkStatus();
  }

  PuppetAccelerator* const owner_;
  const DeviceLayerParts parts_;  // without its spans, which are in gate_
  const PuppetMoe& routed_;
  const PuppetMoe* const shared_;
  GateWeights gate_;
};

void PuppetAccelerator::Fail(const std::string& reason) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (failure_.ok()) failure_ = absl::UnavailableError(reason);
}

void PuppetAccelerator::Block() {
  std::lock_guard<std::mutex> lock(mutex_);
  blocked_ = true;
}

void PuppetAccelerator::Release() {
  std::lock_guard<std::mutex> lock(mutex_);
  blocked_ = false;
  changed_.notify_all();
}

bool PuppetAccelerator::WaitForBlocked(int calls) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(10), [&] { return stopped_ >= calls; });
}

void PuppetAccelerator::StopIfBlocked() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!blocked_) return;
  ++stopped_;
  changed_.notify_all();
  changed_.wait(lock, [this] { return !blocked_; });
  --stopped_;
}

SharedHandle PuppetAccelerator::Share(std::byte* data, size_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  SharedHandle handle{};
  const size_t number = shared_.size() + 1;
  std::memcpy(handle.data(), &number, sizeof(number));
  shared_[handle].data = data;
  shared_[handle].bytes = bytes;
  return handle;
}

SharedHandle PuppetAccelerator::ShareAgain(const SharedHandle& old) {
  Shared before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    before = shared_.at(old);
  }
  const SharedHandle handle = Share(before.data, before.bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  shared_[handle].in_way = before.open;
  return handle;
}

void PuppetAccelerator::Describe(DeviceInfo* device) const {
  device->has_gpu = true;
  device->gpu_name = Name();
  device->cuda_major = 9;
  device->gpu_multiprocessors = 1;
  device->gpu_free_bytes = uint64_t{1} << 30;
}

absl::Status PuppetAccelerator::Failure() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

absl::Status PuppetAccelerator::CheckMemory(const char* what) const {
  if (absl::Status failure = Failure(); !failure.ok()) return failure;
  return refuse_memory_ ? absl::ResourceExhaustedError(std::string("puppet: no memory for ") + what) : absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Lane>> PuppetAccelerator::NewLane() {
  if (absl::Status status = CheckMemory("a lane"); !status.ok()) return status;
  ++counts_.lanes;
  return std::make_unique<PuppetLane>(this);
}

absl::StatusOr<std::unique_ptr<DeviceLayer>> PuppetAccelerator::Assemble(const DeviceLayerParts& parts) {
  ++counts_.assembles;
  if (absl::Status failure = Failure(); !failure.ok()) return failure;
  for (const PreparedMoe* part : {parts.routed, parts.shared}) {
    if (part != nullptr && part->accelerator() != this) return absl::InternalError("puppet: a part of another device");
  }
  return std::make_unique<PuppetLayer>(this, parts);
}

absl::StatusOr<std::unique_ptr<PinnedBuffer>> PuppetAccelerator::AllocatePinned(size_t bytes) {
  if (absl::Status status = CheckMemory("a pinned buffer"); !status.ok()) return status;
  ++counts_.pinned;
  auto buffer = std::make_unique<PuppetPinned>(bytes, &counts_.pinned_alive);
  if (!buffer->allocated()) return absl::ResourceExhaustedError("puppet: no memory for a pinned buffer");
  return buffer;
}

absl::StatusOr<std::unique_ptr<PinnedBuffer>> PuppetAccelerator::Pin(std::span<std::byte> memory) {
  if (absl::Status status = CheckMemory("memory of others"); !status.ok()) return status;
  return std::make_unique<PuppetRegistered>(memory, &counts_.registered_alive);
}

absl::StatusOr<std::unique_ptr<SharedMemory>> PuppetAccelerator::OpenShared(const SharedHandle& handle) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto at = shared_.find(handle);
  if (at == shared_.end()) return absl::InvalidArgumentError("puppet: no such handle");
  const Shared& shared = at->second;
  if (shared.in_way != nullptr && *shared.in_way > 0) return absl::AlreadyExistsError("puppet: what was there before is open");
  ++counts_.opened;
  return std::make_unique<PuppetShared>(shared.data, shared.bytes, shared.open, &counts_.open_alive);
}

PuppetBackend::PuppetBackend(PuppetAccelerator* accelerator, const std::string& name) : accelerator_(accelerator), name_(name) {
  for (const Backend* backend : LinkedBackends()) {
    if (backend->Name() == "cpu_generic") inner_ = backend;
  }
}

Verdict PuppetBackend::Check(const MoeDesc& desc, const DeviceInfo& device) const {
  Verdict verdict = inner_->Check(desc, device);
  if (!device.has_gpu) verdict.reasons.push_back({"no_gpu", "wants a GPU, got none"});
  return verdict;
}

absl::StatusOr<std::unique_ptr<PreparedMoe>> PuppetBackend::Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                                    WorkerPool& pool) const {
  if (absl::Status status = accelerator_->CheckMemory("weights"); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<PreparedMoe>> inner = inner_->Prepare(desc, reader, pool);
  if (!inner.ok()) return inner.status();
  return std::make_unique<PuppetMoe>(accelerator_, *std::move(inner), desc.max_tokens, desc.num_experts);
}

}  // namespace moed::testing
