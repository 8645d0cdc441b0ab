#include "tests/support/batched_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

#include "kernels/convert.h"

namespace moed::testing {
namespace {

constexpr uint8_t kNaN = 0xFF;      // a NaN of every type
constexpr uint8_t kPattern = 0xA5;
constexpr size_t kAround = 256;     // bytes watched on either side

// Memory of exactly `bytes`, aligned to 64, all of it `fill`, between two stretches of kPattern.
class Watched {
 public:
  Watched(size_t bytes, uint8_t fill) : bytes_(bytes), storage_(bytes + 2 * kAround + 64, kPattern) {
    offset_ = kAround + (64 - reinterpret_cast<uintptr_t>(storage_.data() + kAround) % 64) % 64;
    std::memset(data(), fill, bytes);
  }
  uint8_t* data() { return storage_.data() + offset_; }
  bool AroundIsIntact() const {
    const auto intact = [](uint8_t byte) { return byte == kPattern; };
    return std::all_of(storage_.begin(), storage_.begin() + offset_, intact) &&
           std::all_of(storage_.begin() + offset_ + bytes_, storage_.end(), intact);
  }

 private:
  size_t bytes_, offset_;
  std::vector<uint8_t> storage_;
};

}  // namespace

BatchedRows::BatchedRows(const MoeDesc& desc, std::vector<int32_t> counts, DType dtype, uint64_t seed)
    : hidden(desc.hidden), max_m(desc.max_tokens_per_expert), dtype(dtype), counts(std::move(counts)) {
  const int64_t rows = desc.num_experts * max_m;
  x.assign(rows * hidden * DTypeBytes(dtype), kNaN);
  Random random(seed);
  std::vector<float> row(hidden);
  for (int e = 0; e < desc.num_experts; ++e) {
    for (int32_t r = 0; r < this->counts[e]; ++r) {
      for (float& value : row) value = 2.0f * random.Uniform();
      RowFromFloat(row.data(), e * max_m + r, {x.data(), dtype, rows, hidden});
    }
  }
}

BatchedRows::BatchedRows(const MoeDesc& desc, const RandomBatch& batch)
    : hidden(desc.hidden), max_m(desc.max_tokens_per_expert), dtype(batch.dtype), counts(desc.num_experts, 0) {
  const MutableTensorView view = {nullptr, dtype, desc.num_experts * max_m, hidden};
  x.assign(view.bytes(), kNaN);
  std::vector<int32_t> before(desc.num_experts + 1, 0);
  for (int32_t id : batch.ids) ++before[id + 1];
  std::partial_sum(before.begin(), before.end(), before.begin());
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    const int32_t id = batch.ids[slot];
    slot_rows.push_back(before[id] + counts[id]);
    std::memcpy(&x[(id * max_m + counts[id]++) * view.row_bytes()], batch.view().x.row(static_cast<int64_t>(slot) / batch.top_k),
                view.row_bytes());
  }
}

BatchedExperts BatchedRows::view() const {
  return {{x.data(), dtype, static_cast<int64_t>(counts.size()) * max_m, hidden}, counts, max_m};
}

int64_t BatchedRows::counted() const { return std::accumulate(counts.begin(), counts.end(), int64_t{0}); }

absl::StatusOr<BatchedOutput> RunBatchedLayer(const PreparedMoe& moe, const BatchedRows& rows, DType dtype, WorkerPool& pool,
                                              Lane* lane) {
  const BatchedExperts batch = rows.view();
  const size_t bytes = lane == nullptr ? moe.BatchedWorkspaceBytes(rows.counted()) : 0;
  MutableTensorView out = {nullptr, dtype, batch.x.rows, rows.hidden};
  Watched workspace(bytes, kNaN), memory(out.bytes(), kPattern);
  out.data = memory.data();
  ExecContext context{.pool = &pool, .workspace = std::as_writable_bytes(std::span(workspace.data(), bytes)), .lane = lane};
  absl::Status status = moe.RunBatched(batch, out, context);
  if (!status.ok()) return status;
  BatchedOutput output;
  output.intact = workspace.AroundIsIntact() && memory.AroundIsIntact();
  for (int64_t at = 0; at < out.rows; ++at) {
    if (at % rows.max_m < rows.counts[at / rows.max_m]) {
      output.y.resize(output.y.size() + rows.hidden);
      RowToFloat({out.data, dtype, out.rows, out.cols}, at, output.y.data() + output.y.size() - rows.hidden);
    } else {
      const uint8_t* row = static_cast<const uint8_t*>(out.row(at));
      output.intact &= std::all_of(row, row + out.row_bytes(), [](uint8_t byte) { return byte == kPattern; });
    }
  }
  return output;
}

std::vector<float> CombineByHand(const RandomBatch& batch, const BatchedRows& rows, const BatchedOutput& output, bool weighted) {
  std::vector<float> sums(batch.rows * batch.hidden, 0.0f);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    const float weight = weighted ? batch.weights[slot] : 1.0f;
    const float* y = output.y.data() + rows.slot_rows[slot] * batch.hidden;
    float* sum = sums.data() + static_cast<int64_t>(slot) / batch.top_k * batch.hidden;
    for (int64_t c = 0; c < batch.hidden; ++c) sum[c] = std::fma(weight, y[c], sum[c]);
  }
  return sums;
}

}  // namespace moed::testing
