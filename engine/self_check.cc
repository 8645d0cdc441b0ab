#include "engine/self_check.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "kernels/convert.h"

namespace moed {
namespace {

// A layer that consists of some of another layer's experts.
class SubsetReader : public ExpertReader {
 public:
  SubsetReader(const ExpertReader& all, std::vector<int> experts) : all_(all), experts_(std::move(experts)) {}
  absl::Status Read(int expert, ExpertWeights* out) const override { return all_.Read(experts_[expert], out); }

 private:
  const ExpertReader& all_;
  const std::vector<int> experts_;
};

struct Sample {
  std::vector<float> x;        // [tokens, H], values that bf16 holds
  std::vector<uint16_t> bf16;  // the same
  std::vector<int32_t> ids;    // [tokens, k]
  std::vector<float> weights;  // [tokens, k]
};

// Magnitudes of the sample's rows in turn, as powers of two: the first three already span ordinary, small and large.
constexpr int kExponents[] = {0, -4, 4, -2, 2, -3, 3, -1, 1};

// `count` different experts of `total`, in random order; all of them when there are no more.
std::vector<int32_t> PickExperts(int total, int count, std::mt19937_64& random) {
  std::vector<int32_t> picked(total);
  std::iota(picked.begin(), picked.end(), 0);
  std::shuffle(picked.begin(), picked.end(), random);
  picked.resize(std::min(total, count));
  return picked;
}

Sample MakeSample(const MoeDesc& desc, const CheckSize& size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const std::vector<int32_t> experts = PickExperts(desc.num_experts, size.experts, random);
  const int live = std::min(size.slots, desc.top_k);
  Sample sample;
  for (int64_t row = 0; row < size.tokens; ++row) {
    const float magnitude = std::ldexp(1.0f, kExponents[row % std::size(kExponents)]);
    for (int64_t c = 0; c < desc.hidden; ++c) sample.x.push_back(magnitude * normal(random));
    // Slots that are not used come first: a backend must leave them out wherever they are.
    for (int j = 0; j < desc.top_k; ++j) {
      const int slot = j - (desc.top_k - live);
      sample.ids.push_back(slot < 0 ? -1 : experts[static_cast<size_t>(row * live + slot) % experts.size()]);
      sample.weights.push_back(0.25f + 0.5f * static_cast<float>(j + 1) / static_cast<float>(desc.top_k));
    }
  }
  sample.bf16.resize(sample.x.size());
  const MutableTensorView rounded = {sample.bf16.data(), DType::kBf16, size.tokens, desc.hidden};
  for (int64_t row = 0; row < size.tokens; ++row) {
    float* x = sample.x.data() + row * desc.hidden;
    RowFromFloat(x, row, rounded);
    RowToFloat({sample.bf16.data(), DType::kBf16, size.tokens, desc.hidden}, row, x);
  }
  return sample;
}

// Relative error ||y - ref|| / ||ref|| of the worst row. Where the reference lies below float32's normal range, relative error
// has no meaning (a row of exp(-100) is 0 in one order of operations and not in another): such a row must only stay there.
double LargestRelativeError(const std::vector<float>& y, const std::vector<float>& ref, int64_t cols) {
  const double tiny = std::numeric_limits<float>::min() * std::sqrt(static_cast<double>(cols));
  double largest = 0.0;
  for (size_t begin = 0; begin < ref.size(); begin += static_cast<size_t>(cols)) {
    double difference = 0.0, norm = 0.0;
    for (size_t at = begin; at < begin + static_cast<size_t>(cols); ++at) {
      difference += (static_cast<double>(y[at]) - ref[at]) * (static_cast<double>(y[at]) - ref[at]);
      norm += static_cast<double>(ref[at]) * ref[at];
    }
    difference = std::sqrt(difference);
    norm = std::sqrt(norm);
    const double error = norm > tiny ? difference / norm : (difference <= tiny ? 0.0 : HUGE_VAL);
    if (!(error <= largest)) largest = std::isnan(error) ? HUGE_VAL : error;
  }
  return largest;
}

// The sample through the reference, on the experts it uses.
absl::StatusOr<std::vector<float>> RunReference(const CheckTarget& target, const Backend& reference, const Sample& sample,
                                                int64_t tokens, WorkerPool& pool, Scratch& scratch) {
  std::vector<int> used(sample.ids.begin(), sample.ids.end());
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  if (used.front() < 0) used.erase(used.begin());
  std::vector<int32_t> local;
  for (int32_t id : sample.ids) {
    local.push_back(id < 0 ? -1 : static_cast<int32_t>(std::lower_bound(used.begin(), used.end(), id) - used.begin()));
  }

  MoeDesc desc = target.desc;
  desc.num_experts = static_cast<int>(used.size());
  desc.max_tokens = tokens;
  const SubsetReader reader(target.experts, used);
  absl::StatusOr<std::unique_ptr<PreparedMoe>> moe = reference.Prepare(desc, reader, pool);
  if (!moe.ok()) return moe.status();
  std::vector<float> out(sample.x.size());
  const MoeBatch batch = {{sample.x.data(), DType::kF32, tokens, desc.hidden}, local, sample.weights, desc.top_k};
  absl::Status status = RunPrepared(**moe, batch, {out.data(), DType::kF32, tokens, desc.hidden}, pool, scratch);
  if (!status.ok()) return status;
  return out;
}

// Rows of an expert from which a backend may take its products for large calls.
constexpr int64_t kRowsOfLargeCall = 64;

// The sample followed by rows without experts, as many as make the call a large one for the target.
Sample WithIdleRows(const CheckTarget& target, Sample sample, int64_t* rows) {
  const MoeDesc& desc = target.desc;
  const int64_t large = (kRowsOfLargeCall * desc.num_experts + desc.top_k - 1) / desc.top_k;
  *rows = std::max(*rows, std::min(desc.max_tokens, large));
  const size_t values = static_cast<size_t>(*rows * desc.hidden),
               slots = static_cast<size_t>(*rows) * static_cast<size_t>(desc.top_k);
  sample.x.resize(values, 0.0f);
  sample.bf16.resize(values, 0);
  sample.ids.resize(slots, -1);
  sample.weights.resize(slots, 0.0f);
  return sample;
}

// The sample through the target, its rows handed over as `dtype`, f32 or bf16.
absl::StatusOr<std::vector<float>> RunTarget(const CheckTarget& target, const Sample& sample, DType dtype, int64_t tokens,
                                             WorkerPool& pool, Scratch& scratch) {
  const int64_t hidden = target.desc.hidden;
  const void* x = dtype == DType::kBf16 ? static_cast<const void*>(sample.bf16.data()) : sample.x.data();
  std::vector<float> out(sample.x.size());
  const MoeBatch batch = {{x, dtype, tokens, hidden}, sample.ids, sample.weights, target.desc.top_k};
  absl::Status status = RunPrepared(target.prepared, batch, {out.data(), DType::kF32, tokens, hidden}, pool, scratch);
  if (!status.ok()) return status;
  return out;
}

}  // namespace

const Backend* FindReference(std::span<const Backend* const> backends) {
  for (const Backend* backend : backends) {
    if (backend->Name() == "reference") return backend;
  }
  return nullptr;
}

double SelfCheckBound(const QuantScheme& scheme) {
  double bound = 0.01;
  for (const LinearScheme* linear : {&scheme.gate, &scheme.up, &scheme.down}) {
    if (linear->input.mode == ActivationMode::kNone) continue;
    const ElementType element = linear->input.element;
    bound = std::max(bound, element == ElementType::kInt8 ? 0.02 : element == ElementType::kFp8E4m3 ? 0.06 : 0.10);
  }
  return bound;
}

absl::StatusOr<SelfCheckRow> CheckPart(const CheckTarget& target, const Backend& reference, CheckSize size, uint64_t seed,
                                       WorkerPool& pool, Scratch& scratch) {
  const MoeDesc& desc = target.desc;
  const int64_t tokens = size.tokens = std::min(size.tokens, desc.max_tokens);
  const Sample sample = MakeSample(desc, size, seed);
  absl::StatusOr<std::vector<float>> want = RunReference(target, reference, sample, tokens, pool, scratch);
  if (!want.ok()) return want.status();

  SelfCheckRow row;
  for (DType dtype : {DType::kF32, DType::kBf16}) {
    const absl::StatusOr<std::vector<float>> got = RunTarget(target, sample, dtype, tokens, pool, scratch);
    if (!got.ok()) return got.status();
    row.max_rel = std::max(row.max_rel, LargestRelativeError(*got, *want, desc.hidden));
  }
  if (target.backend.OnGpu()) {
    int64_t rows = tokens;
    const Sample large = WithIdleRows(target, sample, &rows);
    want->resize(static_cast<size_t>(rows * desc.hidden), 0.0f);  // rows without experts are zero
    const absl::StatusOr<std::vector<float>> got = RunTarget(target, large, DType::kBf16, rows, pool, scratch);
    if (!got.ok()) return got.status();
    row.max_rel = std::max(row.max_rel, LargestRelativeError(*got, *want, desc.hidden));
  }
  row.backend = target.backend.Name();
  row.scheme = Describe(target.prepared.ExecutedScheme());
  row.tokens = tokens;
  row.bound = SelfCheckBound(target.prepared.ExecutedScheme());
  row.passed = row.max_rel <= row.bound;
  return row;
}

absl::StatusOr<SelfCheckRow> CheckLayer(const LoadedLayer& layer, const Backend& reference, int64_t tokens, uint64_t seed,
                                        WorkerPool& pool, Scratch& scratch) {
  const LayerPlan& plan = layer.plan;
  absl::StatusOr<SelfCheckRow> row =
      CheckPart({plan.routed, *plan.experts, *layer.choice.backend, *layer.routed}, reference, FullCheck(plan.routed, tokens), seed,
                pool, scratch);
  if (!row.ok()) return row.status();
  row->layer = layer.plan.layer;
  if (layer.shared == nullptr) return row;
  const absl::StatusOr<SelfCheckRow> shared =
      CheckPart({plan.shared, *plan.shared_expert, *layer.shared_choice.backend, *layer.shared}, reference,
                FullCheck(plan.shared, tokens), seed, pool, scratch);
  if (!shared.ok()) return shared.status();
  if (shared->max_rel / shared->bound > row->max_rel / row->bound) {
    row->max_rel = shared->max_rel;
    row->bound = shared->bound;
  }
  row->passed = row->passed && shared->passed;
  return row;
}

}  // namespace moed
