#include "engine/merged_call.h"

#include <algorithm>
#include <cstring>

#include "engine/forward.h"
#include "engine/routing.h"
#include "kernels/convert.h"
#include "kernels/worker_pool.h"

namespace moed {
namespace {

constexpr int64_t kBytesOfTask = int64_t{64} << 10;  // what a thread copies at a time

// Calls body(row) for every row; by the pool where there is more than one task's worth.
template <typename Body>
void ForRows(WorkerPool& pool, int64_t rows, size_t row_bytes, const Body& body) {
  const int64_t of_task = std::max<int64_t>(1, kBytesOfTask / static_cast<int64_t>(std::max<size_t>(row_bytes, 1)));
  pool.ParallelFor((rows + of_task - 1) / of_task, [&](int64_t task, int) {
    for (int64_t row = task * of_task, end = std::min(rows, row + of_task); row < end; ++row) body(row);
  });
}

template <typename T>
void Append(std::span<const T> values, std::vector<T>* to) {
  to->insert(to->end(), values.begin(), values.end());
}

}  // namespace

MergedCall::MergedCall(const ModelConfig& config, const LoadedLayer& layer, std::span<ForwardPart* const> parts)
    : parts_(parts.begin(), parts.end()) {
  if (layer.device == nullptr && std::holds_alternative<RoutingByLogits>(parts.front()->call.routing)) RouteLogits(config, layer);
  for (const ForwardPart* part : parts_) rows_ += part->call.hidden.rows;
  const DType first = parts.front()->out.dtype;
  const bool alike = std::all_of(parts_.begin(), parts_.end(), [&](const ForwardPart* part) { return part->out.dtype == first; });
  output_ = alike ? first : DType::kF32;
}

void MergedCall::RouteLogits(const ModelConfig& config, const LoadedLayer& layer) {
  routed_ = true;
  top_k_ = config.top_k;
  std::vector<ForwardPart*> good;
  for (ForwardPart* part : parts_) {
    const size_t before = ids_.size(), slots = static_cast<size_t>(part->call.hidden.rows * top_k_);
    ids_.resize(before + slots);
    weights_.resize(before + slots);
    part->status = Route(config.router, config.num_experts, top_k_, std::get<RoutingByLogits>(part->call.routing).logits,
                         layer.gate.correction_bias, std::span(ids_).subspan(before), std::span(weights_).subspan(before));
    if (part->status.ok()) {
      good.push_back(part);
    } else {
      ids_.resize(before);
      weights_.resize(before);
    }
  }
  parts_.swap(good);
}

void MergedCall::GatherRouting() {
  if (routed_) return;
  for (const ForwardPart* part : parts_) {
    if (const RoutingByIds* given = std::get_if<RoutingByIds>(&part->call.routing)) {
      top_k_ = given->top_k;
      Append(given->ids, &ids_);
      Append(given->weights, &weights_);
    } else if (const RoutingByLogits* logits = std::get_if<RoutingByLogits>(&part->call.routing)) {
      Append(logits->logits, &logits_);
    }
  }
}

ForwardCall MergedCall::Gather(void* hidden, WorkerPool& pool) {
  GatherRouting();
  ForwardCall merged;
  const ForwardCall& first = parts_.front()->call;
  merged.layer = first.layer;
  merged.routed_only = first.routed_only;
  merged.hidden = {hidden, first.hidden.dtype, rows_, first.hidden.cols};
  char* to = static_cast<char*>(hidden);
  for (const ForwardPart* part : parts_) {
    const TensorView& rows = part->call.hidden;
    WaitForRows(part->call, rows.rows);
    ForRows(pool, rows.rows, rows.row_bytes(),
            [&](int64_t row) { std::memcpy(to + static_cast<size_t>(row) * rows.row_bytes(), rows.row(row), rows.row_bytes()); });
    to += rows.bytes();
  }
  if (routed_ || std::holds_alternative<RoutingByIds>(first.routing)) {
    merged.routing = RoutingByIds{top_k_, ids_, weights_};
  } else if (std::holds_alternative<RoutingByLogits>(first.routing)) {
    merged.routing = RoutingByLogits{logits_};
  }
  return merged;
}

bool MergedCall::WantsRouting() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const ForwardPart* part) { return part->info.want_routing; });
}

void MergedCall::Scatter(const MutableTensorView& out, const ForwardInfo& info, WorkerPool& pool) const {
  int64_t first = 0;
  for (ForwardPart* part : parts_) {
    const MutableTensorView to = part->out;
    const MutableTensorView from = out.slice(first, to.rows);
    ForRows(pool, to.rows, to.row_bytes(), [&](int64_t row) {
      if (to.dtype == from.dtype) {
        std::memcpy(to.row(row), from.row(row), to.row_bytes());
      } else {
        RowFromFloat(static_cast<const float*>(from.row(row)), row, to);
      }
    });
    const bool want_routing = part->info.want_routing;
    part->info = {info.backend, info.scheme, info.generation, info.weights_id, info.layer_weights_id, info.compute_us,
                  info.batch_rows, want_routing, info.top_k, {}, {}};
    if (want_routing) {
      const size_t at = static_cast<size_t>(first * info.top_k), slots = static_cast<size_t>(to.rows * info.top_k);
      Append(std::span(info.ids).subspan(at, slots), &part->info.ids);
      Append(std::span(info.weights).subspan(at, slots), &part->info.weights);
    }
    part->status = absl::OkStatus();
    first += to.rows;
  }
}

void MergedCall::Fail(const absl::Status& why) const {
  for (ForwardPart* part : parts_) part->status = why;
}

bool MayShareRun(const ForwardCall& a, const ForwardCall& b) {
  if (a.layer != b.layer || a.routed_only != b.routed_only || a.hidden.dtype != b.hidden.dtype) return false;
  if (a.hidden.place != Place::kHost || b.hidden.place != Place::kHost || a.routing.index() != b.routing.index()) return false;
  const RoutingByIds* by_ids = std::get_if<RoutingByIds>(&a.routing);
  return by_ids == nullptr || by_ids->top_k == std::get<RoutingByIds>(b.routing).top_k;
}

ForwardCall RowsOf(const ForwardCall& call, int64_t first, int64_t rows) {
  ForwardCall part = call;
  part.incoming = nullptr;
  part.hidden = call.hidden.slice(first, rows);
  const auto some = [&](const auto& values, int64_t of_row) {
    return values.subspan(static_cast<size_t>(first * of_row), static_cast<size_t>(rows * of_row));
  };
  if (RoutingByIds* given = std::get_if<RoutingByIds>(&part.routing)) {
    given->ids = some(given->ids, given->top_k);
    given->weights = some(given->weights, given->top_k);
  } else if (RoutingByLogits* given = std::get_if<RoutingByLogits>(&part.routing)) {
    given->logits = some(given->logits, static_cast<int64_t>(given->logits.size()) / std::max<int64_t>(call.hidden.rows, 1));
  }
  return part;
}

}  // namespace moed
