#include "bench/gpu_runner.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu_kernels.h"
#include "bench/gpu_replays.h"
#include "kernels/number_formats.h"

namespace moed::bench {
namespace {

using cuda::DeviceBuffer;
using cuda::ToStatus;

absl::Status In(const std::string& name, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
}

template <typename T>
absl::Status ToDevice(const std::vector<T>& values, const char* what, DeviceBuffer* buffer) {
  const size_t bytes = values.size() * sizeof(T);
  absl::Status status = buffer->Allocate(bytes, what);
  if (!status.ok()) return status;
  return ToStatus(cudaMemcpy(buffer->data(), values.data(), bytes, cudaMemcpyHostToDevice), what);
}

}  // namespace

// Ops share x, the output and the workspace; each has a routing of its own.
struct GpuRunner::Arrays {
  DeviceBuffer x, out, workspace;
  std::vector<DeviceBuffer> ids, weights;
  std::vector<cuda::DeviceOp> inputs;
  std::vector<std::unique_ptr<GpuOp>> ops;
};

absl::StatusOr<std::unique_ptr<GpuRunner>> GpuRunner::Make(const GpuRunOptions& options) {
  std::unique_ptr<GpuRunner> runner(new GpuRunner(options));
  absl::Status status = ToStatus(cudaStreamCreateWithFlags(&runner->stream_, cudaStreamNonBlocking), "stream");
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GpuCeilings>> ceilings = GpuCeilings::Make(options.gemm_library, runner->stream_);
  if (!ceilings.ok()) return ceilings.status();
  runner->ceilings_ = *std::move(ceilings);
  return runner;
}

GpuRunner::~GpuRunner() {
  if (stream_ == nullptr) return;
  cudaStreamSynchronize(stream_);
  layers_.clear();
  ceilings_.reset();
  cudaStreamDestroy(stream_);
}

absl::StatusOr<std::vector<GpuRunner::Case>> GpuRunner::Cases(const std::vector<GpuCell>& cells) const {
  std::vector<Case> cases;
  for (const GpuCell& cell : cells) {
    const absl::StatusOr<MoeDesc> desc = GpuDescOf(cell.shape, cell.scheme);
    if (!desc.ok()) return desc.status();
    for (const GpuBackend& backend : GpuBackends()) {
      Case one{&cell, &backend, *desc};
      if (backend.fits(*desc) && one.name().find(options_.filter) != std::string::npos) cases.push_back(std::move(one));
    }
  }
  // Layers are large: the cases of each come together, in the order of the first.
  std::vector<std::string> order;
  for (const Case& one : cases) {
    if (std::find(order.begin(), order.end(), one.layers()) == order.end()) order.push_back(one.layers());
  }
  const auto place = [&](const Case& one) { return std::find(order.begin(), order.end(), one.layers()); };
  std::stable_sort(cases.begin(), cases.end(), [&](const Case& a, const Case& b) { return place(a) < place(b); });
  return cases;
}

absl::StatusOr<std::vector<Row>> GpuRunner::Run(const GpuCells& recorded, const std::vector<GpuCell>& cells,
                                                const Routings& routings) {
  const absl::StatusOr<std::vector<Case>> cases = Cases(cells);
  if (!cases.ok()) return cases.status();
  std::vector<double> times;
  for (const Case& one : *cases) {
    const absl::StatusOr<double> ms = RunCase(one, routings);
    if (!ms.ok()) return In(one.name(), ms.status());
    std::fprintf(stderr, "%s: %.4f ms\n", one.name().c_str(), *ms);
    times.push_back(*ms);
  }
  layers_.clear();
  layers_key_.clear();
  absl::Status status = ceilings_->Measure();
  if (!status.ok()) return In("ceilings", status);
  std::vector<Row> rows(times.size());
  for (size_t at = 0; at < rows.size(); ++at) {
    rows[at].backend = (*cases)[at].backend->name;
    rows[at].ms = times[at];
    Compare(recorded, *(*cases)[at].cell, ceilings_->Median(), &rows[at]);
  }
  return rows;
}

absl::Status GpuRunner::MakeLayers(const Case& one) {
  const size_t wanted = static_cast<size_t>(one.cell->weight_sets);
  if (one.layers() == layers_key_ && layers_.size() == wanted) return absl::OkStatus();
  layers_.clear();
  layers_key_.clear();
  absl::Status status = ceilings_->Measure();
  if (!status.ok()) return status;
  while (layers_.size() < wanted) {
    absl::StatusOr<std::unique_ptr<GpuLayer>> layer = one.backend->make(one.desc, layers_.size(), stream_);
    if (!layer.ok()) return layer.status();
    layers_.push_back(*std::move(layer));
  }
  layers_key_ = one.layers();
  return ToStatus(cudaStreamSynchronize(stream_), "random weights");
}

absl::StatusOr<double> GpuRunner::RunCase(const Case& one, const Routings& routings) {
  absl::Status status = MakeLayers(one);
  Arrays arrays;
  if (status.ok()) status = MakeOps(one, routings, &arrays);
  if (status.ok()) status = PlanOps(one, &arrays);
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GpuReplays>> replays = GpuReplays::Make(arrays.ops, stream_);
  if (!replays.ok()) return replays.status();
  const absl::StatusOr<double> ms = (*replays)->MedianMs(options_.min_time);
  if (!ms.ok()) return ms.status();
  status = CheckOutput(one, arrays);
  if (!status.ok()) return status;
  return *ms / one.cell->rotations;
}

// Inputs, each rotation's routing, and the output, which starts as NaN.
absl::Status GpuRunner::MakeOps(const Case& one, const Routings& routings, Arrays* arrays) const {
  const GpuCell& cell = *one.cell;
  const int64_t bytes = cell.tokens * one.desc.hidden * static_cast<int64_t>(sizeof(uint16_t));
  absl::Status status = arrays->x.Allocate(static_cast<size_t>(bytes), "hidden states");
  if (status.ok()) status = arrays->out.Allocate(static_cast<size_t>(bytes), "output");
  constexpr uint64_t kSeed = 0x9E1DDE25;
  if (!status.ok()) return status;
  status = ToStatus(LaunchFillCodes(cuda::Codes::kBf16, 1.0f, kSeed, arrays->x.data(), bytes, stream_), "hidden states");
  if (status.ok()) status = ToStatus(cudaMemsetAsync(arrays->out.data(), 0xFF, static_cast<size_t>(bytes), stream_), "output");
  const size_t turns = static_cast<size_t>(cell.rotations);
  arrays->ids.resize(turns);
  arrays->weights.resize(turns);
  for (size_t turn = 0; turn < turns && status.ok(); ++turn) {
    const RoutingKey key = {cell.shape, cell.tokens, static_cast<int>(turn), one.desc.num_experts, one.desc.top_k};
    const absl::StatusOr<Routing> routing = routings.Get(key);
    if (!routing.ok()) return routing.status();
    status = ToDevice(routing->ids, "ids", &arrays->ids[turn]);
    if (status.ok()) status = ToDevice(routing->weights, "weights of slots", &arrays->weights[turn]);
    cuda::DeviceOp op;
    op.x = arrays->x.data();
    op.rows = cell.tokens;
    op.top_k = one.desc.top_k;
    op.ids = reinterpret_cast<const int32_t*>(arrays->ids[turn].data());
    op.weights = reinterpret_cast<const float*>(arrays->weights[turn].data());
    op.out = arrays->out.data();
    arrays->inputs.push_back(op);
  }
  return status;
}

absl::Status GpuRunner::PlanOps(const Case& one, Arrays* arrays) const {
  size_t bytes = 0;
  for (size_t turn = 0; turn < arrays->inputs.size(); ++turn) {
    bytes = std::max(bytes, layers_[turn % layers_.size()]->WorkspaceBytes(arrays->inputs[turn]));
  }
  absl::Status status = arrays->workspace.Allocate(bytes, "workspace");
  if (!status.ok()) return status;
  for (size_t turn = 0; turn < arrays->inputs.size(); ++turn) {
    absl::StatusOr<std::unique_ptr<GpuOp>> op =
        layers_[turn % layers_.size()]->Plan(arrays->inputs[turn], arrays->workspace.data());
    if (!op.ok()) return op.status();
    arrays->ops.push_back(*std::move(op));
  }
  return ToStatus(cudaStreamSynchronize(stream_), "inputs");
}

// A time counts only if something was computed: every output is finite, and they are neither all zero nor huge.
absl::Status GpuRunner::CheckOutput(const Case& one, const Arrays& arrays) const {
  std::vector<uint16_t> out(arrays.out.size() / sizeof(uint16_t));
  absl::Status status = ToStatus(cudaMemcpy(out.data(), arrays.out.data(), arrays.out.size(), cudaMemcpyDeviceToHost), "output");
  if (!status.ok()) return status;
  double squares = 0.0;
  for (const uint16_t bits : out) squares += static_cast<double>(Bf16ToFloat(bits)) * Bf16ToFloat(bits);
  const double deviation = std::sqrt(squares / static_cast<double>(out.size()));
  constexpr double kLeast = 1e-3, kMost = 1e3;
  if (deviation >= kLeast && deviation <= kMost) return absl::OkStatus();  // NaN is neither
  return absl::InternalError(absl::StrCat("output: wanted a standard deviation from ", kLeast, " to ", kMost, ", got ", deviation));
}

}  // namespace moed::bench
