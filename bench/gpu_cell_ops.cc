#include "bench/gpu_cell_ops.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu_kernels.h"
#include "kernels/number_formats.h"

namespace moed::bench {
namespace {

using cuda::DeviceBuffer;
using cuda::ToStatus;

template <typename T>
absl::Status ToDevice(const std::vector<T>& values, const char* what, DeviceBuffer* buffer) {
  const size_t bytes = values.size() * sizeof(T);
  absl::Status status = buffer->Allocate(bytes, what);
  if (!status.ok()) return status;
  return cuda::CopyToDevice(buffer->data(), values.data(), bytes, what);
}

}  // namespace

absl::Status In(const std::string& name, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
}

absl::StatusOr<std::unique_ptr<GpuCellOps>> GpuCellOps::Make(const CellInput& input, Layers layers, cudaStream_t stream) {
  std::unique_ptr<GpuCellOps> ops(new GpuCellOps(input.desc.hidden, stream));
  absl::Status status = ops->MakeInputs(input);
  if (status.ok()) status = ops->PlanOps(layers);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GpuReplays>> replays = GpuReplays::Make(ops->ops_, stream);
  if (!replays.ok()) return replays.status();
  ops->replays_ = *std::move(replays);
  return ops;
}

absl::Status GpuCellOps::MakeInputs(const CellInput& input) {
  const GpuCell& cell = input.cell;
  std::vector<Routing> routings;
  for (int turn = 0; turn < cell.rotations; ++turn) {
    absl::StatusOr<Routing> routing =
        input.routings.Get({cell.shape, cell.tokens, turn, input.desc.num_experts, input.desc.top_k});
    if (!routing.ok()) return routing.status();
    routings.push_back(*std::move(routing));
  }
  absl::Status status;
  if (!input.batched) {
    status = MakeRows(cell.tokens);
    for (const Routing& routing : routings) {
      if (status.ok()) status = AddTurn(routing, cell.tokens, input.desc.top_k);
    }
    return status;
  }
  std::vector<std::vector<int32_t>> counts;
  int32_t max_m = 0;
  for (const Routing& routing : routings) {
    counts.push_back(RowsOfExperts(routing, input.desc.num_experts));
    max_m = std::max(max_m, *std::max_element(counts.back().begin(), counts.back().end()));
  }
  status = MakeRows(static_cast<int64_t>(input.desc.num_experts) * max_m);
  for (const std::vector<int32_t>& rows : counts) {
    if (status.ok()) status = AddBatchedTurn(rows, max_m);
  }
  return status;
}

// Hidden states, and the output, which starts as NaN.
absl::Status GpuCellOps::MakeRows(int64_t rows) {
  constexpr uint64_t kSeed = 0x9E1DDE25;
  const int64_t bytes = rows * row_bytes();
  absl::Status status = x_.Allocate(static_cast<size_t>(bytes), "hidden states");
  if (status.ok()) status = out_.Allocate(static_cast<size_t>(bytes), "output");
  if (!status.ok()) return status;
  status = ToStatus(LaunchFillCodes(cuda::Codes::kBf16, 1.0f, kSeed, x_.data(), bytes, stream_), "hidden states");
  if (!status.ok()) return status;
  return ToStatus(cudaMemsetAsync(out_.data(), 0xFF, static_cast<size_t>(bytes), stream_), "output");
}

cuda::DeviceOp GpuCellOps::OpOf(int64_t rows, int32_t top_k) const {
  cuda::DeviceOp op;
  op.x = x_.data();
  op.rows = rows;
  op.top_k = top_k;
  op.out = out_.data();
  return op;
}

absl::Status GpuCellOps::AddTurn(const Routing& routing, int64_t rows, int32_t top_k) {
  DeviceBuffer ids, weights;
  absl::Status status = ToDevice(routing.ids, "ids", &ids);
  if (status.ok()) status = ToDevice(routing.weights, "weights of slots", &weights);
  if (!status.ok()) return status;
  cuda::DeviceOp op = OpOf(rows, top_k);
  op.ids = reinterpret_cast<const int32_t*>(ids.data());
  op.weights = reinterpret_cast<const float*>(weights.data());
  inputs_.push_back(op);
  routings_.push_back(std::move(ids));
  routings_.push_back(std::move(weights));
  checked_ = {{0, rows}};
  return status;
}

absl::Status GpuCellOps::AddBatchedTurn(const std::vector<int32_t>& counts, int32_t max_m) {
  DeviceBuffer memory;
  absl::Status status = ToDevice(counts, "counts of experts", &memory);
  if (!status.ok()) return status;
  cuda::DeviceOp op = OpOf(static_cast<int64_t>(counts.size()) * max_m, 1);
  op.counts = reinterpret_cast<const int32_t*>(memory.data());
  op.max_m = max_m;
  op.counted = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  inputs_.push_back(op);
  routings_.push_back(std::move(memory));
  constexpr int32_t kChecked = 16;  // rows of an expert: a large call has gigabytes of them
  checked_.clear();
  for (size_t expert = 0; expert < counts.size(); ++expert) {
    checked_.push_back({static_cast<int64_t>(expert) * max_m, std::min(counts[expert], kChecked)});
  }
  return status;
}

absl::Status GpuCellOps::PlanOps(Layers layers) {
  size_t bytes = 0;
  for (size_t turn = 0; turn < inputs_.size(); ++turn) {
    bytes = std::max(bytes, layers[turn % layers.size()]->WorkspaceBytes(inputs_[turn]));
  }
  absl::Status status = workspace_.Allocate(bytes, "workspace");
  if (!status.ok()) return status;
  for (size_t turn = 0; turn < inputs_.size(); ++turn) {
    absl::StatusOr<std::unique_ptr<GpuOp>> op = layers[turn % layers.size()]->Plan(inputs_[turn], workspace_.data());
    if (!op.ok()) return op.status();
    ops_.push_back(*std::move(op));
  }
  return ToStatus(cudaStreamSynchronize(stream_), "inputs");
}

absl::Status GpuCellOps::CheckOutput() const {
  double squares = 0.0, count = 0.0;
  for (const Rows& rows : checked_) {
    if (rows.count == 0) continue;
    std::vector<uint16_t> out(static_cast<size_t>(rows.count * hidden_));
    absl::Status status = ToStatus(cudaMemcpy(out.data(), out_.data() + rows.begin * row_bytes(),
                                              out.size() * sizeof(uint16_t), cudaMemcpyDeviceToHost), "output");
    if (!status.ok()) return status;
    for (const uint16_t bits : out) squares += static_cast<double>(Bf16ToFloat(bits)) * Bf16ToFloat(bits);
    count += static_cast<double>(out.size());
  }
  const double deviation = std::sqrt(squares / count);
  constexpr double kLeast = 1e-3, kMost = 1e3;
  if (deviation >= kLeast && deviation <= kMost) return absl::OkStatus();  // NaN is neither
  return absl::InternalError(absl::StrCat("output: wanted a standard deviation from ", kLeast, " to ", kMost, ", got ", deviation));
}

}  // namespace moed::bench
