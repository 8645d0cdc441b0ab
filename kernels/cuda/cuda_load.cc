// Loading: experts are read and packed by the pool's threads into a ring of pinned buffers, from where the device copies them.
#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/cuda_device.h"
#include "kernels/cuda/cuda_moe.h"
#include "kernels/cuda/pack.h"
#include "kernels/prepare_experts.h"

namespace moed::cuda {
namespace {

constexpr size_t kRingBytes = size_t{512} << 20;  // of pinned memory, unless two experts need more

// One array of one expert: where it is packed in a slot of the ring, and where it goes.
struct Piece {
  size_t in_slot = 0;
  size_t bytes = 0;
  size_t in_arena = 0;  // of expert 0; expert e is e * bytes further
};

// A matrix's arrays in a slot, in the order of PackTarget.
struct MatrixPieces {
  Piece codes, scales, zeros, bias, order, step_groups, globals;
  std::vector<const Piece*> all() const { return {&codes, &scales, &zeros, &bias, &order, &step_groups, &globals}; }
};

MatrixPieces PiecesOf(const PackedShape& shape, const MatrixOffsets& offsets, size_t* end) {
  const auto take = [end](size_t bytes, size_t in_arena) {
    const Piece piece = {*end, bytes, in_arena};
    *end += (bytes + 63) / 64 * 64;
    return piece;
  };
  MatrixPieces pieces;
  pieces.codes = take(shape.code_bytes(), offsets.codes);
  pieces.scales = take(shape.scale_bytes(), offsets.scales);
  pieces.zeros = take(shape.zero_bytes(), offsets.zeros);
  pieces.bias = take(shape.bias_bytes(), offsets.bias);
  pieces.order = take(shape.order_bytes(), offsets.order);
  pieces.step_groups = take(shape.step_group_bytes(), offsets.step_groups);
  pieces.globals = take(2 * sizeof(float), offsets.globals);
  return pieces;
}

PackTarget TargetIn(const MatrixPieces& pieces, std::byte* slot) {
  const auto at = [slot](const Piece& piece) { return piece.bytes > 0 ? slot + piece.in_slot : nullptr; };
  return {at(pieces.codes),
          at(pieces.scales),
          at(pieces.zeros),
          reinterpret_cast<float*>(at(pieces.bias)),
          reinterpret_cast<int32_t*>(at(pieces.order)),
          reinterpret_cast<int32_t*>(at(pieces.step_groups)),
          reinterpret_cast<float*>(at(pieces.globals))};
}

// Why Hopper's products are not for these weights: their operands do not hold the scales, or rounding is not as harmless as it usually
// is. Empty: they are.
std::string NotForHopper(const LinearWeights& weights) {
  if (const float largest = LargestScale(weights); !(largest <= kMostLifted))
    return absl::StrCat("a scale is ", largest, ", they hold at most ", kMostLifted);
  const bool rounded = weights.scheme.group.cols != 0;
  if (const double offset = ZeroPointOffset(weights); rounded && offset > kMostZeroOffset) {
    return absl::StrCat("zero points are ", offset, " of the codes' middle off it on average, they round weights well up to ",
                        kMostZeroOffset);
  }
  return "";
}

// Pinned buffers that are filled by threads and emptied by a stream. Thread-safe.
class Ring {
 public:
  ~Ring() {
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    for (Slot& slot : slots_) {
      if (slot.copied != nullptr) cudaEventDestroy(slot.copied);
    }
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  absl::Status Make(size_t slot_bytes, int most) {
    absl::Status status = ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream for loading");
    const int wanted = static_cast<int>(std::clamp<size_t>(kRingBytes / std::max<size_t>(slot_bytes, 1), 2, std::max(most, 2)));
    slots_.resize(static_cast<size_t>(wanted));
    for (Slot& slot : slots_) {
      if (status.ok()) status = slot.buffer.Allocate(slot_bytes, "pinned buffer for loading");
      if (status.ok()) status = ToStatus(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "event");
      free_.push_back(&slot);
    }
    return status;
  }

  struct Slot {
    HostBuffer buffer;
    cudaEvent_t copied = nullptr;
  };

  // A slot whose last copies are done.
  absl::StatusOr<Slot*> Take() {
    Slot* slot;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      freed_.wait(lock, [this] { return !free_.empty(); });
      slot = free_.back();
      free_.pop_back();
    }
    absl::Status status = ToStatus(cudaEventSynchronize(slot->copied), "copy of weights");
    if (status.ok()) return slot;
    Give(slot);
    return status;
  }

  void Give(Slot* slot) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      free_.push_back(slot);
    }
    freed_.notify_one();
  }

  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  std::vector<Slot> slots_;
  std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<Slot*> free_;  // guarded by mutex_
};

class Loader {
 public:
  Loader(const MoeDesc& desc, const LayerPlan& plan)
      : desc_(desc), plan_(plan), offsets_(OffsetsOf(plan, desc.num_experts)), stored_(3 * static_cast<size_t>(desc.num_experts)) {
    gate_ = PiecesOf(plan.gate, offsets_.gate, &slot_bytes_);
    if (!plan.paired) up_ = PiecesOf(plan.up, offsets_.up, &slot_bytes_);
    down_ = PiecesOf(plan.down, offsets_.down, &slot_bytes_);
    if (plan.down.ordered && !plan.down.own_order) down_order_ = CommonOrder(plan.down, desc.scheme.down.weights);
  }

  // Why Hopper's products are not right for the weights that were loaded, with the first expert that tells; empty: they are.
  std::string not_for_hopper() {
    std::lock_guard<std::mutex> lock(mutex_);
    return not_for_hopper_;
  }

  absl::StatusOr<DeviceBuffer> Load(const ExpertReader& reader, WorkerPool& pool) {
    absl::Status status = arena_.Allocate(offsets_.bytes, "weights of a layer");
    if (status.ok()) status = ring_.Make(slot_bytes_, std::min(pool.threads(), desc_.num_experts));
    if (!status.ok()) return status;
    status = ForEachExpert(desc_.num_experts, reader, pool,
                           [this](int expert, ExpertWeights& weights) { return LoadExpert(expert, weights); });
    if (status.ok()) status = CopyCommon();
    if (!status.ok()) return status;
    status = ToStatus(cudaStreamSynchronize(ring_.stream()), "copy of weights");
    if (!status.ok()) return status;
    return std::move(arena_);
  }

 private:
  absl::Status LoadExpert(int expert, const ExpertWeights& weights) {
    absl::Status status = CheckExpert(desc_, expert, weights);
    if (!status.ok()) return status;
    for (const LinearWeights* linear : {&weights.gate, &weights.up, &weights.down}) {
      const std::string why = NotForHopper(*linear);
      if (why.empty()) continue;
      std::lock_guard<std::mutex> lock(mutex_);
      if (not_for_hopper_.empty()) not_for_hopper_ = absl::StrCat("expert ", expert, ": ", why);
    }
    const float inputs[] = {weights.gate.input_scale, weights.up.input_scale, weights.down.input_scale};
    for (size_t p = 0; p < 3; ++p) stored_[p * static_cast<size_t>(desc_.num_experts) + static_cast<size_t>(expert)] = inputs[p];
    absl::StatusOr<Ring::Slot*> slot = ring_.Take();
    if (!slot.ok()) return slot.status();
    status = Pack(weights, (*slot)->buffer.data());
    if (status.ok()) status = Copy(expert, **slot);
    ring_.Give(*slot);
    return status;
  }

  absl::Status Pack(const ExpertWeights& weights, std::byte* slot) const {
    const LinearWeights* second = plan_.paired ? &weights.up : nullptr;
    const PackTarget down = TargetIn(down_, slot);
    absl::Status status = PackMatrix(plan_.down, weights.down, nullptr, down);
    if (!status.ok()) return status;
    std::span<const int32_t> features;
    if (plan_.ordered_features) {
      const int32_t* const order = plan_.down.own_order ? down.order : down_order_.data();
      features = {order, static_cast<size_t>(plan_.down.positions)};
    }
    status = PackMatrix(plan_.gate, weights.gate, second, TargetIn(gate_, slot), features);
    if (status.ok() && !plan_.paired) status = PackMatrix(plan_.up, weights.up, nullptr, TargetIn(up_, slot), features);
    return status;
  }

  absl::Status Copy(int expert, const Ring::Slot& slot) const {
    for (const MatrixPieces* matrix : {&gate_, &up_, &down_}) {
      for (const Piece* piece : matrix->all()) {
        if (piece->bytes == 0) continue;
        const cudaError_t error =
            cudaMemcpyAsync(arena_.data() + piece->in_arena + static_cast<size_t>(expert) * piece->bytes,
                            slot.buffer.data() + piece->in_slot, piece->bytes, cudaMemcpyHostToDevice, ring_.stream());
        if (error != cudaSuccess) return ToStatus(error, "copy of weights");
      }
    }
    return ToStatus(cudaEventRecord(slot.copied, ring_.stream()), "copy of weights");
  }

  // What all experts share, and one value of each.
  absl::Status CopyCommon() const {
    const auto copy = [this](size_t at, const void* data, size_t bytes) {
      return CopyToDevice(arena_.data() + at, data, bytes, "copy of weights");
    };
    absl::Status status = copy(offsets_.stored, stored_.data(), stored_.size() * sizeof(float));
    const auto order = [&](const PackedShape& shape, const MatrixOffsets& offsets, const WeightScheme& scheme) {
      if (!status.ok() || !shape.ordered || shape.own_order) return;
      const std::vector<int32_t> common = CommonOrder(shape, scheme);
      status = copy(offsets.common_order, common.data(), common.size() * sizeof(int32_t));
    };
    order(plan_.gate, offsets_.gate, desc_.scheme.gate.weights);
    if (!plan_.paired) order(plan_.up, offsets_.up, desc_.scheme.up.weights);
    order(plan_.down, offsets_.down, desc_.scheme.down.weights);
    return status;
  }

  const MoeDesc& desc_;
  const LayerPlan& plan_;
  const LayerOffsets offsets_;
  size_t slot_bytes_ = 0;
  MatrixPieces gate_, up_, down_;
  std::vector<int32_t> down_order_;  // that all experts share
  std::vector<float> stored_;        // [3][E]; each expert's by the thread that reads it
  std::mutex mutex_;
  std::string not_for_hopper_;  // guarded by mutex_
  DeviceBuffer arena_;
  Ring ring_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareCudaMoe(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool,
                                                            Accelerator* accelerator, bool hopper) {
  CudaDevice* const device = static_cast<CudaDevice*>(accelerator);
  absl::Status failure = device->failure();
  if (!failure.ok()) return failure;
  const std::vector<LayerPlan> plans = PlansOf(desc);
  for (size_t at = 0;; ++at) {
    Loader loader(desc, plans[at]);
    absl::StatusOr<DeviceBuffer> arena = loader.Load(reader, pool);
    if (absl::IsUnimplemented(arena.status()) && at + 1 < plans.size()) continue;  // act-order that wants another plan
    if (absl::IsUnavailable(arena.status()) && device->Health().ok()) return arena.status();  // of the reader, not of the device
    if (!arena.ok()) return device->Report(arena.status());
    const std::string why = hopper ? loader.not_for_hopper() : "";
    return std::unique_ptr<PreparedMoe>(std::make_unique<CudaMoe>(
        desc, plans[at], *std::move(arena), accelerator, hopper && why.empty(),
        why.empty() ? "" : absl::StrCat("the products of cuda_generic run, not Hopper's own: ", why)));
  }
}

}  // namespace moed::cuda
