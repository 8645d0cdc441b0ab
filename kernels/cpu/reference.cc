#include "kernels/cpu/reference.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/activation.h"
#include "kernels/convert.h"
#include "kernels/cpu/prepare_experts.h"
#include "kernels/cpu/token_sort.h"

namespace moed::cpu {
namespace {

// Rows computed at once: bounds the scratch of doubles whatever M is.
constexpr int64_t kChunk = 64;

size_t CanonicalBytes(const WeightScheme& scheme, int64_t rows, int64_t cols, bool bias) {
  const int64_t row_bytes = (cols * ElementBits(scheme.element) + 7) / 8;
  const int64_t groups =
      IsUnquantized(scheme.element) ? 0 : GroupCount(rows, scheme.group.rows) * GroupCount(cols, scheme.group.cols);
  int64_t bytes = rows * row_bytes + groups * (ScaleBytes(scheme.scale) + (scheme.zero_points ? 1 : 0));
  if (scheme.act_order) bytes += cols * 4;
  if (bias) bytes += rows * 4;
  return static_cast<size_t>(bytes);
}

// One expert on its rows: x [rows][hidden] -> y [rows][hidden], all in double.
void RunExpert(const MoeDesc& desc, const ExpertWeights& expert, const std::vector<std::vector<double>>& x,
               std::vector<std::vector<double>>* y) {
  const auto dot = [](const std::vector<float>& w, const std::vector<double>& v) {
    double sum = 0.0;
    for (size_t k = 0; k < w.size(); ++k) sum += static_cast<double>(w[k]) * v[k];
    return sum;
  };
  std::vector<float> gate(desc.hidden), up(desc.hidden), down(desc.intermediate);
  std::vector<std::vector<double>> h(x.size(), std::vector<double>(desc.intermediate));
  for (int64_t n = 0; n < desc.intermediate; ++n) {
    DequantizeRow(expert.gate, n, gate.data());
    DequantizeRow(expert.up, n, up.data());
    const double gate_bias = desc.biases ? expert.gate.bias[n] : 0.0;
    const double up_bias = desc.biases ? expert.up.bias[n] : 0.0;
    for (size_t r = 0; r < x.size(); ++r) {
      h[r][n] = Activate<double>(desc.activation, dot(gate, x[r]) + gate_bias, dot(up, x[r]) + up_bias);
    }
  }
  for (int64_t n = 0; n < desc.hidden; ++n) {
    DequantizeRow(expert.down, n, down.data());
    const double bias = desc.biases ? expert.down.bias[n] : 0.0;
    for (size_t r = 0; r < x.size(); ++r) (*y)[r][n] = dot(down, h[r]) + bias;
  }
}

class PreparedReference : public PreparedMoe {
 public:
  PreparedReference(MoeDesc desc, std::vector<ExpertWeights> experts) : desc_(std::move(desc)), experts_(std::move(experts)) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override {
    absl::Status valid = ValidateBatch(desc_, batch, out);
    if (!valid.ok()) return valid;
    for (int64_t first = 0; first < batch.x.rows; first += kChunk) {
      const int64_t rows = std::min(kChunk, batch.x.rows - first);
      MoeBatch chunk = batch;
      chunk.x = batch.x.slice(first, rows);
      chunk.ids = batch.ids.subspan(first * batch.top_k, rows * batch.top_k);
      chunk.weights = batch.weights.subspan(first * batch.top_k, rows * batch.top_k);
      RunChunk(chunk, out.slice(first, rows), *context.pool);
    }
    return absl::OkStatus();
  }

  size_t WorkspaceBytes(int64_t, int) const override { return 0; }
  size_t ResidentBytes() const override { return ReferenceBackend().PreparedBytes(desc_); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  void RunChunk(const MoeBatch& batch, MutableTensorView out, WorkerPool& pool) const {
    SortedSlots sorted;
    SortSlots(batch.ids, desc_.num_experts, &sorted);
    std::vector<std::vector<double>> y(sorted.slots.size());
    pool.ParallelFor(desc_.num_experts, [&](int64_t e, int) {
      const int32_t begin = sorted.begin[e], end = sorted.begin[e + 1];
      if (begin == end) return;
      std::vector<std::vector<double>> x, result(end - begin, std::vector<double>(desc_.hidden));
      for (int32_t at = begin; at < end; ++at) x.push_back(InputRow(batch, sorted.slots[at]));
      RunExpert(desc_, experts_[e], x, &result);
      for (int32_t at = begin; at < end; ++at) y[at] = std::move(result[at - begin]);
    });
    pool.ParallelFor(batch.x.rows, [&](int64_t row, int) { CombineRow(batch, sorted, y, row, out); });
  }

  std::vector<double> InputRow(const MoeBatch& batch, int32_t slot) const {
    std::vector<float> row(desc_.hidden);
    RowToFloat(batch.x, slot / batch.top_k, row.data());
    std::vector<double> x(row.begin(), row.end());
    if (desc_.weight_on_input) {
      for (double& value : x) value *= batch.weights[slot];
    }
    return x;
  }

  void CombineRow(const MoeBatch& batch, const SortedSlots& sorted, const std::vector<std::vector<double>>& y, int64_t row,
                  MutableTensorView out) const {
    std::vector<double> sum(desc_.hidden, 0.0);
    for (int j = 0; j < batch.top_k; ++j) {
      const int64_t slot = row * batch.top_k + j;
      if (sorted.position[slot] < 0) continue;
      const double weight = desc_.weight_on_input ? 1.0 : batch.weights[slot];
      for (int64_t n = 0; n < desc_.hidden; ++n) sum[n] += weight * y[sorted.position[slot]][n];
    }
    std::vector<float> rounded(sum.begin(), sum.end());
    RowFromFloat(rounded.data(), row, out);
  }

  const MoeDesc desc_;
  const std::vector<ExpertWeights> experts_;
};

class Reference : public Backend {
 public:
  std::string Name() const override { return "reference"; }
  std::string Description() const override { return "exact weights, double accumulation: the judge, slow"; }
  bool Automatic() const override { return false; }

  Verdict Check(const MoeDesc& desc, const DeviceInfo&) const override {
    Verdict verdict;
    for (const LinearScheme* linear : {&desc.scheme.gate, &desc.scheme.up, &desc.scheme.down}) {
      if (linear->input.mode == ActivationMode::kNone) continue;
      verdict.reasons.push_back({"scheme_unsupported", absl::StrCat("quantized activations (", ElementName(linear->input.element),
                                                                    ") are not executed by this backend")});
      break;
    }
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    const QuantScheme& scheme = desc.scheme;
    const size_t expert = CanonicalBytes(scheme.gate.weights, desc.intermediate, desc.hidden, desc.biases) +
                          CanonicalBytes(scheme.up.weights, desc.intermediate, desc.hidden, desc.biases) +
                          CanonicalBytes(scheme.down.weights, desc.hidden, desc.intermediate, desc.biases);
    return expert * static_cast<size_t>(desc.num_experts);
  }

  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    std::vector<ExpertWeights> experts(desc.num_experts);
    absl::Status status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, ExpertWeights& weights) {
      experts[expert] = std::move(weights);
      return absl::OkStatus();
    });
    if (!status.ok()) return status;
    return std::make_unique<PreparedReference>(desc, std::move(experts));
  }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const Reference* const backend = new Reference;
  return *backend;
}

}  // namespace moed::cpu
