#include "kernels/cpu/reference.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/activation.h"
#include "kernels/activation_quant.h"
#include "kernels/convert.h"
#include "kernels/cpu/prepare_experts.h"
#include "kernels/cpu/token_sort.h"

namespace moed::cpu {
namespace {

// Rows computed at once: bounds the scratch of doubles whatever M is.
constexpr int64_t kChunk = 64;

using Rows = std::vector<std::vector<double>>;

// Eight sums side by side: one alone would wait for each addition.
double Dot(const std::vector<float>& w, const std::vector<double>& v) {
  constexpr size_t kSums = 8;
  double sums[kSums] = {};
  const size_t whole = w.size() / kSums * kSums;
  for (size_t k = 0; k < whole; k += kSums) {
    for (size_t i = 0; i < kSums; ++i) sums[i] += static_cast<double>(w[k + i]) * v[k + i];
  }
  for (size_t k = whole; k < w.size(); ++k) sums[k - whole] += static_cast<double>(w[k]) * v[k];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The rows as the projection sees them: rounded to float32 and quantized by its scheme, or as they are. `absmax` is that of
// all rows of the request, for schemes whose scale spans them.
Rows QuantizedInput(const LinearScheme& scheme, const LinearWeights& weights, float absmax, const Rows& rows) {
  if (scheme.input.mode == ActivationMode::kNone) return rows;
  Rows quantized;
  for (const std::vector<double>& row : rows) {
    std::vector<float> values(row.begin(), row.end());
    QuantizeRow(scheme.input, weights.input_scale, absmax, values.data(), static_cast<int64_t>(values.size()));
    quantized.emplace_back(values.begin(), values.end());
  }
  return quantized;
}

// h [rows][intermediate] of one expert for its rows x [rows][hidden].
void GateUp(const MoeDesc& desc, const ExpertWeights& expert, float absmax, const Rows& x, std::vector<double>* h) {
  const Rows gate_x = QuantizedInput(desc.scheme.gate, expert.gate, absmax, x);
  const Rows up_x = QuantizedInput(desc.scheme.up, expert.up, absmax, x);
  std::vector<float> gate(desc.hidden), up(desc.hidden);
  for (int64_t n = 0; n < desc.intermediate; ++n) {
    DequantizeRow(expert.gate, n, gate.data());
    DequantizeRow(expert.up, n, up.data());
    const double gate_bias = desc.biases ? expert.gate.bias[n] : 0.0;
    const double up_bias = desc.biases ? expert.up.bias[n] : 0.0;
    for (size_t r = 0; r < x.size(); ++r) {
      h[r].resize(desc.intermediate);
      h[r][n] = Activate<double>(desc.activation, Dot(gate, gate_x[r]) + gate_bias, Dot(up, up_x[r]) + up_bias);
    }
  }
}

// y [rows][hidden] of one expert.
void Down(const MoeDesc& desc, const ExpertWeights& expert, float absmax, const Rows& h, std::vector<double>* y) {
  const Rows down_h = QuantizedInput(desc.scheme.down, expert.down, absmax, h);
  std::vector<float> down(desc.intermediate);
  for (int64_t n = 0; n < desc.hidden; ++n) {
    DequantizeRow(expert.down, n, down.data());
    const double bias = desc.biases ? expert.down.bias[n] : 0.0;
    for (size_t r = 0; r < h.size(); ++r) {
      y[r].resize(desc.hidden);
      y[r][n] = Dot(down, down_h[r]) + bias;
    }
  }
}

float AbsMaxOf(const Rows& rows) {
  float largest = 0.0f;
  for (const std::vector<double>& row : rows) {
    const std::vector<float> values(row.begin(), row.end());
    largest = MergeAbsMax(largest, AbsMax(values.data(), static_cast<int64_t>(values.size())));
  }
  return largest;
}

class PreparedReference : public PreparedMoe {
 public:
  PreparedReference(MoeDesc desc, std::vector<ExpertWeights> experts) : desc_(std::move(desc)), experts_(std::move(experts)) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override {
    absl::Status valid = ValidateBatch(desc_, batch, out);
    if (!valid.ok()) return valid;
    const int64_t step = SpansRows(desc_.scheme) ? std::max<int64_t>(batch.x.rows, 1) : kChunk;
    for (int64_t first = 0; first < batch.x.rows; first += step) {
      const int64_t rows = std::min(step, batch.x.rows - first);
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
    Rows x, h(sorted.slots.size()), y(sorted.slots.size());
    for (int32_t slot : sorted.slots) x.push_back(InputRow(batch, slot));
    // The scale of x spans the request's rows, whether this layer holds their experts or not.
    Rows all;
    for (int64_t row = 0; !desc_.weight_on_input && SpansRows(desc_.scheme) && row < batch.x.rows; ++row) {
      all.push_back(InputRow(batch, static_cast<int32_t>(row * batch.top_k)));
    }
    ForExperts(sorted, pool, [&, absmax = AbsMaxOf(desc_.weight_on_input ? x : all)](int64_t e, int32_t begin, int32_t end) {
      GateUp(desc_, experts_[e], absmax, Rows(x.begin() + begin, x.begin() + end), &h[begin]);
    });
    ForExperts(sorted, pool, [&, absmax = AbsMaxOf(h)](int64_t e, int32_t begin, int32_t end) {
      Down(desc_, experts_[e], absmax, Rows(h.begin() + begin, h.begin() + end), &y[begin]);
    });
    pool.ParallelFor(batch.x.rows, [&](int64_t row, int) { CombineRow(batch, sorted, y, row, out); });
  }

  // body(expert, begin, end) for every expert that has rows.
  template <typename Body>
  void ForExperts(const SortedSlots& sorted, WorkerPool& pool, const Body& body) const {
    pool.ParallelFor(desc_.num_experts, [&](int64_t e, int) {
      if (sorted.begin[e] != sorted.begin[e + 1]) body(e, sorted.begin[e], sorted.begin[e + 1]);
    });
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

  void CombineRow(const MoeBatch& batch, const SortedSlots& sorted, const Rows& y, int64_t row, MutableTensorView out) const {
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
      if (CanQuantize(linear->input)) continue;
      verdict.reasons.push_back({"scheme_unsupported", absl::StrCat("activations quantized as ", ElementName(linear->input.element),
                                                                    ", ", ScaleName(linear->input.scale), " scales: no such rule")});
      break;
    }
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    return CanonicalExpertBytes(desc) * static_cast<size_t>(desc.num_experts);
  }

  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    std::vector<ExpertWeights> experts(desc.num_experts);
    absl::Status status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, ExpertWeights& weights) {
      absl::Status valid = CheckExpert(desc, expert, weights);
      if (valid.ok()) experts[expert] = std::move(weights);
      return valid;
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
