#include "bench/gpu_variant_runner.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/gpu_backends.h"
#include "bench/gpu_cell_ops.h"
#include "bench/gpu_replays.h"
#include "bench/gpu_variants.h"
#include "engine/oracle.h"
#include "kernels/backends.h"
#include "kernels/cuda/cuda_memory.h"

namespace moed::bench {
namespace {

using cuda::ToStatus;
using Copies = std::vector<std::unique_ptr<GpuLayer>>;

// A variant, the backend that runs it, and its copies of the layer.
struct Contender {
  Variant variant;
  const GpuBackend* backend = nullptr;
  std::shared_ptr<const Copies> layers;  // of others too, where weights and backend are the same
};

bool SameWeights(const Contender& a, const Contender& b) {
  return a.backend == b.backend && a.variant.desc.scheme == b.variant.desc.scheme &&
         a.variant.equal_orders == b.variant.equal_orders && a.variant.desc.deterministic == b.variant.desc.deterministic;
}

class VariantRunner {
 public:
  explicit VariantRunner(const GpuRunOptions& options) : options_(options), device_(LinkedDevice()), backends_(LinkedBackends()) {}
  ~VariantRunner() {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    contenders_.clear();
    cudaStreamDestroy(stream_);
  }

  absl::StatusOr<std::vector<Row>> Run(const std::vector<GpuCell>& cells, const Routings& routings) {
    absl::Status status = ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
    if (!status.ok()) return status;
    std::vector<Row> rows;
    for (const GpuCell& cell : cells) {
      status = RunCell(cell, routings, &rows);
      if (!status.ok()) return In(absl::StrCat(cell.shape, "/", cell.scheme, "/", cell.tokens), status);
    }
    return rows;
  }

 private:
  absl::StatusOr<std::vector<Contender>> Choose(const GpuCell& cell) const {
    const absl::StatusOr<MoeDesc> desc = GpuDescOf(cell.shape, cell.scheme);
    if (!desc.ok()) return desc.status();
    std::vector<Contender> contenders;
    for (const Variant& variant : VariantsOf(*desc)) {
      const absl::StatusOr<Choice> choice = moed::Choose(variant.desc, device_, backends_, {});
      if (!choice.ok()) return In(variant.name, choice.status());
      const std::string name = choice->backend->Name();
      const GpuBackend* const backend = FindGpuBackend(name);
      if (backend == nullptr) {
        return absl::FailedPreconditionError(absl::StrCat(variant.name, ": wanted a backend on the GPU, the oracle chose ", name));
      }
      contenders.push_back({variant, backend, nullptr});
    }
    return contenders;
  }

  absl::StatusOr<std::shared_ptr<const Copies>> MakeCopies(const Contender& one, int count) const {
    auto copies = std::make_shared<Copies>();
    while (copies->size() < static_cast<size_t>(count)) {
      absl::StatusOr<std::unique_ptr<GpuLayer>> layer =
          one.backend->make({one.variant.desc, one.variant.equal_orders}, copies->size(), stream_);
      if (!layer.ok()) return In(one.variant.name, layer.status());
      copies->push_back(*std::move(layer));
    }
    return copies;
  }

  // The layers of `contenders`, those of the last cell where it had the same.
  absl::Status MakeLayers(const GpuCell& cell, std::vector<Contender> contenders) {
    const std::string key = absl::StrCat(cell.shape, "/", cell.scheme, "/", cell.weight_sets);
    if (key == key_) return absl::OkStatus();
    contenders_.clear();
    key_.clear();
    for (Contender& one : contenders) {
      const auto same = std::find_if(contenders_.begin(), contenders_.end(),
                                     [&](const Contender& earlier) { return SameWeights(earlier, one); });
      if (same != contenders_.end()) {
        one.layers = same->layers;
      } else {
        absl::StatusOr<std::shared_ptr<const Copies>> copies = MakeCopies(one, cell.weight_sets);
        if (!copies.ok()) return copies.status();
        one.layers = *std::move(copies);
      }
      contenders_.push_back(std::move(one));
    }
    key_ = key;
    return ToStatus(cudaStreamSynchronize(stream_), "random weights");
  }

  absl::Status RunCell(const GpuCell& cell, const Routings& routings, std::vector<Row>* rows) {
    absl::StatusOr<std::vector<Contender>> contenders = Choose(cell);
    if (!contenders.ok()) return contenders.status();
    const std::string name = absl::StrCat(cell.shape, "/", cell.scheme, "/", contenders->front().backend->name, "/", cell.tokens);
    if (name.find(options_.filter) == std::string::npos) return absl::OkStatus();
    absl::Status status = MakeLayers(cell, *std::move(contenders));
    if (!status.ok()) return status;
    std::vector<std::unique_ptr<GpuCellOps>> ops;
    std::vector<GpuReplays*> replays;
    for (const Contender& one : contenders_) {
      absl::StatusOr<std::unique_ptr<GpuCellOps>> made =
          GpuCellOps::Make({cell, one.variant.desc, routings, one.variant.batched}, *one.layers, stream_);
      if (!made.ok()) return In(one.variant.name, made.status());
      replays.push_back(&(*made)->replays());
      ops.push_back(*std::move(made));
    }
    const absl::StatusOr<std::vector<double>> ms = GpuReplays::MedianMs(replays, options_.min_time);
    if (!ms.ok()) return ms.status();
    for (size_t at = 0; at < ops.size(); ++at) {
      status = ops[at]->CheckOutput();
      if (!status.ok()) return In(contenders_[at].variant.name, status);
    }
    AddRows(cell, *ms, rows);
    return absl::OkStatus();
  }

  // `ms`: of all rotations of each contender, the base first.
  void AddRows(const GpuCell& cell, const std::vector<double>& ms, std::vector<Row>* rows) const {
    std::fprintf(stderr, "%s/%s/%ld: base %.4f ms", cell.shape.c_str(), cell.scheme.c_str(), static_cast<long>(cell.tokens),
                 ms.front() / cell.rotations);
    for (size_t at = 0; at < ms.size(); ++at) {
      const Contender& one = contenders_[at];
      Row row;
      row.bench = "gpu-variant";
      row.shape = cell.shape;
      row.scheme = cell.scheme;
      row.variant = one.variant.name;
      row.backend = one.backend->name;
      row.tokens = cell.tokens;
      row.operations = cell.flops;
      row.ms = ms[at] / cell.rotations;
      row.base_ratio = ms[at] / ms.front();
      if (at > 0) std::fprintf(stderr, ", %s %.3fx", one.variant.name, *row.base_ratio);
      rows->push_back(std::move(row));
    }
    std::fprintf(stderr, "\n");
  }

  const GpuRunOptions options_;
  const DeviceInfo device_;  // as it was before any layer was made
  const std::vector<const Backend*> backends_;
  cudaStream_t stream_ = nullptr;
  std::vector<Contender> contenders_;  // of key_
  std::string key_;
};

}  // namespace

absl::StatusOr<std::vector<Row>> RunVariants(const GpuRunOptions& options, const std::vector<GpuCell>& cells,
                                             const Routings& routings) {
  return VariantRunner(options).Run(cells, routings);
}

}  // namespace moed::bench
