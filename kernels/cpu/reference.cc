#include "kernels/cpu/reference.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/activation.h"
#include "kernels/activation_quant.h"
#include "kernels/convert.h"
#include "kernels/cpu/token_sort.h"
#include "kernels/prepare_experts.h"

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

// Output features of one task: enough to outweigh handing it out, few enough to keep every worker busy with three experts.
constexpr int64_t kFeatures = 64;

// An expert that has rows, sorted positions [begin, end), and its projections' inputs.
struct ActiveExpert {
  const ExpertWeights* weights;
  int32_t begin, end;
  Rows gate_x, up_x;  // [rows][hidden]
  Rows down_h;        // [rows][intermediate]
};

// h[row][n] for output features n in [first, last) of gate and up.
void GateUp(const MoeDesc& desc, const ActiveExpert& active, int64_t first, int64_t last, Rows* h) {
  const LinearWeights &gate_weights = active.weights->gate, &up_weights = active.weights->up;
  std::vector<float> gate(desc.hidden), up(desc.hidden);
  for (int64_t n = first; n < last; ++n) {
    DequantizeRow(gate_weights, n, gate.data());
    DequantizeRow(up_weights, n, up.data());
    const double gate_bias = desc.biases ? gate_weights.bias[n] : 0.0;
    const double up_bias = desc.biases ? up_weights.bias[n] : 0.0;
    for (int32_t r = 0; r < active.end - active.begin; ++r) {
      (*h)[active.begin + r][n] =
          Activate<double>(desc.activation, Dot(gate, active.gate_x[r]) + gate_bias, Dot(up, active.up_x[r]) + up_bias);
    }
  }
}

// y[row][n] for output features n in [first, last) of down.
void Down(const MoeDesc& desc, const ActiveExpert& active, int64_t first, int64_t last, Rows* y) {
  const LinearWeights& weights = active.weights->down;
  std::vector<float> down(desc.intermediate);
  for (int64_t n = first; n < last; ++n) {
    DequantizeRow(weights, n, down.data());
    const double bias = desc.biases ? weights.bias[n] : 0.0;
    for (int32_t r = 0; r < active.end - active.begin; ++r) (*y)[active.begin + r][n] = Dot(down, active.down_h[r]) + bias;
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
    RunChunks(batch, out, *context.pool);
    return absl::OkStatus();
  }

  // As a standard call of the counted rows, each with one slot of weight 1.
  absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const override {
    absl::Status valid = ValidateBatchedExperts(desc_, batch, out);
    if (!valid.ok()) return valid;
    std::vector<int32_t> ids;
    std::vector<int64_t> rows;
    std::vector<char> x;
    for (int32_t e = 0; e < desc_.num_experts; ++e) {
      for (int64_t row = e * batch.max_m; row < e * batch.max_m + batch.counts[e]; ++row) {
        ids.push_back(e);
        rows.push_back(row);
        const char* source = static_cast<const char*>(batch.x.row(row));
        x.insert(x.end(), source, source + batch.x.row_bytes());
      }
    }
    const std::vector<float> weights(rows.size(), 1.0f);
    std::vector<char> y(rows.size() * out.row_bytes());
    const int64_t count = static_cast<int64_t>(rows.size());
    RunChunks({{x.data(), batch.x.dtype, count, batch.x.cols}, ids, weights, 1}, {y.data(), out.dtype, count, out.cols}, *context.pool);
    for (int64_t at = 0; at < count; ++at) std::copy_n(&y[at * out.row_bytes()], out.row_bytes(), static_cast<char*>(out.row(rows[at])));
    return absl::OkStatus();
  }

  size_t WorkspaceBytes(int64_t, int) const override { return 0; }
  size_t BatchedWorkspaceBytes(int64_t) const override { return 0; }
  size_t ResidentBytes() const override { return ReferenceBackend().PreparedBytes(desc_); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  void RunChunks(const MoeBatch& batch, MutableTensorView out, WorkerPool& pool) const {
    const int64_t step = SpansRows(desc_.scheme) ? std::max<int64_t>(batch.x.rows, 1) : kChunk;
    for (int64_t first = 0; first < batch.x.rows; first += step) {
      const int64_t rows = std::min(step, batch.x.rows - first);
      MoeBatch chunk = batch;
      chunk.x = batch.x.slice(first, rows);
      chunk.ids = batch.ids.subspan(first * batch.top_k, rows * batch.top_k);
      chunk.weights = batch.weights.subspan(first * batch.top_k, rows * batch.top_k);
      RunChunk(chunk, out.slice(first, rows), pool);
    }
  }

  void RunChunk(const MoeBatch& batch, MutableTensorView out, WorkerPool& pool) const {
    SortedSlots sorted;
    SortSlots(batch.ids, desc_.num_experts, &sorted);
    const size_t routed = sorted.slots.size();
    Rows x, h(routed, std::vector<double>(desc_.intermediate)), y(routed, std::vector<double>(desc_.hidden));
    for (int32_t slot : sorted.slots) x.push_back(InputRow(batch, slot));
    // The scale of x spans the request's rows, whether this layer holds their experts or not.
    Rows all;
    for (int64_t row = 0; !desc_.weight_on_input && SpansRows(desc_.scheme) && row < batch.x.rows; ++row) {
      all.push_back(InputRow(batch, static_cast<int32_t>(row * batch.top_k)));
    }
    std::vector<ActiveExpert> active = ActiveExperts(sorted);
    const float x_max = AbsMaxOf(desc_.weight_on_input ? x : all);
    ForEach(active, pool, [&](ActiveExpert& expert) {
      const Rows rows(x.begin() + expert.begin, x.begin() + expert.end);
      expert.gate_x = QuantizedInput(desc_.scheme.gate, expert.weights->gate, x_max, rows);
      expert.up_x = QuantizedInput(desc_.scheme.up, expert.weights->up, x_max, rows);
    });
    ForFeatures(active, desc_.intermediate, pool, [&](const ActiveExpert& expert, int64_t first, int64_t last) {
      GateUp(desc_, expert, first, last, &h);
    });
    ForEach(active, pool, [&, h_max = AbsMaxOf(h)](ActiveExpert& expert) {
      const Rows rows(h.begin() + expert.begin, h.begin() + expert.end);
      expert.down_h = QuantizedInput(desc_.scheme.down, expert.weights->down, h_max, rows);
    });
    ForFeatures(active, desc_.hidden, pool, [&](const ActiveExpert& expert, int64_t first, int64_t last) {
      Down(desc_, expert, first, last, &y);
    });
    pool.ParallelFor(batch.x.rows, [&](int64_t row, int) { CombineRow(batch, sorted, y, row, out); });
  }

  std::vector<ActiveExpert> ActiveExperts(const SortedSlots& sorted) const {
    std::vector<ActiveExpert> active;
    for (int e = 0; e < desc_.num_experts; ++e) {
      if (sorted.begin[e] == sorted.begin[e + 1]) continue;
      active.push_back({.weights = &experts_[e], .begin = sorted.begin[e], .end = sorted.begin[e + 1]});
    }
    return active;
  }

  template <typename Body>
  static void ForEach(std::vector<ActiveExpert>& active, WorkerPool& pool, const Body& body) {
    pool.ParallelFor(static_cast<int64_t>(active.size()), [&](int64_t at, int) { body(active[at]); });
  }

  // body(expert, first, last) for every expert and each piece of its `features` output features.
  template <typename Body>
  static void ForFeatures(const std::vector<ActiveExpert>& active, int64_t features, WorkerPool& pool, const Body& body) {
    const int64_t pieces = (features + kFeatures - 1) / kFeatures;
    pool.ParallelFor(static_cast<int64_t>(active.size()) * pieces, [&](int64_t at, int) {
      const int64_t first = at % pieces * kFeatures;
      body(active[at / pieces], first, std::min(first + kFeatures, features));
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
    CheckBatchedFormat(desc, &verdict.reasons);
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
