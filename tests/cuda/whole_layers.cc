#include "tests/cuda/whole_layers.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <utility>

#include "engine/routing.h"
#include "kernels/convert.h"
#include "kernels/cuda/cuda_backends.h"
#include "tests/cuda/gpu_layers.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"

namespace moed::testing {
namespace {

constexpr int64_t kMostRows = 1024;
constexpr size_t kPoisonBytes = size_t{48} << 20;

// A range of another reader's experts.
class ExpertRange : public ExpertReader {
 public:
  ExpertRange(const ExpertReader& all, int first) : all_(all), first_(first) {}
  absl::Status Read(int expert, ExpertWeights* out) const override { return all_.Read(first_ + expert, out); }

 private:
  const ExpertReader& all_;
  const int first_;
};

// Multiples of 1/64 in [-1, 1).
std::vector<float> Sixtyfourths(size_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.Below(128) - 64) / 64.0f;
  return values;
}

MoeDesc DescOf(const LayerSpec& spec, int experts, int top_k) {
  LinearScheme linear;
  linear.weights = spec.scheme;
  MoeDesc desc = MakeDesc(experts, top_k, spec.hidden, spec.intermediate, UniformScheme(linear));
  desc.max_tokens = kMostRows;
  return desc;
}

std::unique_ptr<PreparedMoe> PrepareOnGpu(const MoeDesc& desc, const ExpertReader& experts) {
  auto moe = cuda::CudaBackends().back()->Prepare(desc, experts, Pool());
  INFO(moe.status());
  REQUIRE(moe.ok());
  return *std::move(moe);
}

std::vector<float> ToFloat(const TensorView& view) {
  std::vector<float> values(static_cast<size_t>(view.rows * view.cols));
  for (int64_t row = 0; row < view.rows; ++row) RowToFloat(view, row, values.data() + row * view.cols);
  return values;
}

// Relative error of a row for float32 products or bf16 operands, and for one rounding to the output's type.
double BoundOf(DType x, DType out) {
  const double product = x == DType::kF32 ? 3e-5 : 0.01;
  return product + (out == DType::kF32 ? 0.0 : out == DType::kF16 ? 1e-3 : 4e-3);
}

double Dot(std::span<const float> a, std::span<const float> b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += static_cast<double>(a[i]) * b[i];
  return sum;
}

LayerSpec Family(RouterRule::Score score, RouterRule::Normalize normalize, int top_k) {
  LayerSpec spec;
  spec.rule.score = score;
  spec.rule.normalize = normalize;
  spec.top_k = top_k;
  return spec;
}

}  // namespace

LayerSpec::LayerSpec() : scheme(Weights(ElementType::kInt4, ScaleType::kF16, {1, 16})) {}

std::vector<LayerSpec> FamilySpecs() {
  using Rule = RouterRule;
  std::vector<LayerSpec> specs = {
      Family(Rule::Score::kSoftmax, Rule::Normalize::kSum, 2),           // mixtral
      Family(Rule::Score::kSoftmax, Rule::Normalize::kNone, 4),          // olmoe, qwen2_moe
      Family(Rule::Score::kSoftmaxOfChosen, Rule::Normalize::kNone, 4),  // gpt_oss
      Family(Rule::Score::kSigmoid, Rule::Normalize::kSum, 4),           // minimax
      Family(Rule::Score::kSigmoid, Rule::Normalize::kNone, 1),          // llama4
      Family(Rule::Score::kSoftmax, Rule::Normalize::kPNorm, 4),         // dbrx
      Family(Rule::Score::kSparseMixer, Rule::Normalize::kNone, 2),      // phimoe
      Family(Rule::Score::kSqrtSoftplus, Rule::Normalize::kSum, 4),      // deepseek_v4
      Family(Rule::Score::kSoftmax, Rule::Normalize::kNone, 3),          // deepseek_v2
      Family(Rule::Score::kSigmoid, Rule::Normalize::kSum, 4),           // deepseek_v3, kimi_k2, glm4_moe
  };
  specs[2].gate_bias = true;
  specs[4].rule.weight_on_input = true;
  specs[5].rule.norm_p = 2.0f;
  for (size_t i : {3, 7, 9}) specs[i].rule.correction_bias = true;
  for (size_t i : {8, 9}) specs[i].rule.groups = 4, specs[i].rule.groups_kept = 2, specs[i].rule.scaling = 2.5f;
  specs[9].rule.group_score = Rule::GroupScore::kTopTwoSum;
  specs[9].rule.norm_epsilon = 1e-20f;
  return specs;
}

DeviceCall LayerInput::Call(RoutingKind kind) const {
  DeviceCall call;
  call.x = batch.view().x;
  call.routing = kind;
  if (kind == RoutingKind::kLogits) call.logits = logits;
  if (kind != RoutingKind::kIds) return call;
  call.top_k = batch.top_k;
  call.ids = batch.ids;
  call.weights = batch.weights;
  return call;
}

LayerRun RunWhole(const DeviceLayer& layer, DeviceCall call, DType out_dtype, Lane& lane) {
  PoisonLane(lane, kPoisonBytes);
  LayerRun run;
  run.bytes.assign(static_cast<size_t>(call.x.rows * call.x.cols) * DTypeBytes(out_dtype), 0xFF);
  call.used_ids = &run.ids;
  call.used_weights = &run.weights;
  run.status = layer.Forward(call, {run.bytes.data(), out_dtype, call.x.rows, call.x.cols}, lane, &Pool());
  run.out = ToFloat({run.bytes.data(), out_dtype, call.x.rows, call.x.cols});
  return run;
}

WholeLayer::WholeLayer(const LayerSpec& spec, uint64_t seed) : spec_(spec), router_{spec.rule, spec.experts, spec.top_k} {
  MoeDesc all = DescOf(spec, spec.experts, spec.top_k);
  all.weight_on_input = spec.rule.weight_on_input;
  MoeDesc held = all;
  if (spec.held > 0) held.num_experts = spec.held;
  const RandomExperts experts(all, seed);
  const ExpertRange range(experts, spec.first);
  routed_ = PrepareOnGpu(held, range);
  routed_judge_ = JudgeOf(held, range);
  if (spec.shared) {
    const MoeDesc desc = DescOf(spec, 1, 1);
    const RandomExperts shared(desc, seed + 1);
    shared_ = PrepareOnGpu(desc, shared);
    shared_judge_ = JudgeOf(desc, shared);
  }
  const size_t experts_count = static_cast<size_t>(spec.experts), hidden = static_cast<size_t>(spec.hidden);
  gate_ = Sixtyfourths(experts_count * hidden, seed + 2);
  if (spec.gate_bias) gate_bias_ = Sixtyfourths(experts_count, seed + 3);
  if (spec.shared_gate) shared_gate_ = Sixtyfourths(hidden, seed + 4);
  correction_bias_ = RandomBias(router_, static_cast<uint32_t>(seed));
  auto layer = Gpu().Assemble(parts());
  INFO(layer.status());
  REQUIRE(layer.ok());
  layer_ = *std::move(layer);
}

DeviceLayerParts WholeLayer::parts() const {
  DeviceLayerParts parts;
  parts.routed = routed_.get();
  parts.shared = shared_.get();
  parts.num_experts = spec_.experts;
  parts.first_expert = spec_.first;
  parts.top_k = spec_.top_k;
  parts.hidden = spec_.hidden;
  parts.rule = spec_.rule;
  parts.gate = gate_;
  parts.gate_bias = gate_bias_;
  parts.correction_bias = correction_bias_;
  parts.shared_gate = shared_gate_;
  return parts;
}

LayerInput WholeLayer::Input(int64_t rows, DType dtype, uint64_t seed, int top_k) const {
  const MoeDesc desc = DescOf(spec_, spec_.experts, spec_.top_k);
  LayerInput input = {RandomBatch(desc, rows, top_k > 0 ? top_k : spec_.top_k, dtype, seed),
                      RandomLogits(router_, static_cast<int>(rows), static_cast<uint32_t>(seed))};
  const std::vector<float> values = Sixtyfourths(static_cast<size_t>(rows * spec_.hidden), seed + 1);
  for (int64_t row = 0; row < rows; ++row) {
    RowFromFloat(values.data() + row * spec_.hidden, row, {input.batch.x.data(), dtype, rows, spec_.hidden});
  }
  return input;
}

std::vector<float> WholeLayer::GateLogits(const LayerInput& input) const {
  const std::vector<float> x = ToFloat(input.batch.view().x);
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  std::vector<float> logits;
  for (size_t row = 0; row < x.size(); row += hidden) {
    for (size_t e = 0; e < static_cast<size_t>(spec_.experts); ++e) {
      const double bias = gate_bias_.empty() ? 0.0 : gate_bias_[e];
      const std::span<const float> of_row(x.data() + row, hidden), of_expert(gate_.data() + e * hidden, hidden);
      logits.push_back(static_cast<float>(Dot(of_row, of_expert) + bias));
    }
  }
  return logits;
}

std::vector<double> WholeLayer::SharedFactors(const LayerInput& input) const {
  const std::vector<float> x = ToFloat(input.batch.view().x);
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  std::vector<double> factors;
  for (size_t row = 0; row < x.size(); row += hidden) {
    const double dot = shared_gate_.empty() ? 0.0 : Dot(std::span(x).subspan(row, hidden), shared_gate_);
    factors.push_back(shared_gate_.empty() ? 1.0 : 1.0 / (1.0 + std::exp(-dot)));
  }
  return factors;
}

void WholeLayer::CheckRouting(const LayerInput& input, RoutingKind kind, const LayerRun& run) const {
  if (kind == RoutingKind::kIds) {
    CHECK(run.ids == input.batch.ids);
    CHECK(run.weights == input.batch.weights);
    return;
  }
  const bool gate = kind == RoutingKind::kGate;
  const std::vector<float> logits = gate ? GateLogits(input) : input.logits;
  const size_t rows = static_cast<size_t>(input.batch.rows);
  const size_t k = static_cast<size_t>(spec_.top_k), experts = static_cast<size_t>(spec_.experts);
  std::vector<int32_t> ids(rows * k);
  std::vector<float> weights(rows * k);
  const auto route = gate ? RouteOwnGate : Route;
  const absl::Status status = route(spec_.rule, spec_.experts, spec_.top_k, logits, correction_bias_, ids, weights);
  INFO(status);
  REQUIRE(status.ok());
  REQUIRE((run.ids.size() == ids.size() && run.weights.size() == weights.size()));
  for (size_t row = 0; row < rows; ++row) {
    bool swapped = false;
    for (size_t i = row * k; i < (row + 1) * k; ++i) {
      if (run.ids[i] == ids[i]) continue;
      INFO("row " << row << ": expert " << run.ids[i] << ", wanted " << ids[i]);
      REQUIRE((run.ids[i] >= 0 && run.ids[i] < spec_.experts));
      const Choice choice = ChoiceOf(router_, std::span(logits).subspan(row * experts, experts), correction_bias_);
      REQUIRE(MayBeSwapped(router_, choice, run.ids[i], ids[i]));
      swapped = true;
    }
    for (size_t i = row * k; !swapped && i < (row + 1) * k; ++i) {
      CHECK(run.weights[i] == Approx(weights[i]).epsilon(WeightTolerance(router_)).margin(1e-35));
    }
  }
}

std::vector<float> WholeLayer::Expected(const LayerInput& input, const LayerRun& run, bool routed_only) const {
  std::vector<int32_t> local = run.ids;
  const int held = spec_.held > 0 ? spec_.held : spec_.experts;
  for (int32_t& id : local) id = id >= spec_.first && id < spec_.first + held ? id - spec_.first : -1;
  MoeBatch batch = input.batch.view();
  batch.ids = local;
  batch.weights = run.weights;
  batch.top_k = batch.x.rows > 0 ? static_cast<int>(run.ids.size() / static_cast<size_t>(batch.x.rows)) : 1;
  const auto routed = RunOnGpu(*routed_judge_, batch, DType::kF32);
  INFO(routed.status());
  REQUIRE(routed.ok());
  std::vector<float> sum = *routed;
  if (!spec_.shared || routed_only) return sum;
  const std::vector<int32_t> zeros(static_cast<size_t>(batch.x.rows), 0);
  const std::vector<float> ones(zeros.size(), 1.0f);
  batch.ids = zeros, batch.weights = ones, batch.top_k = 1;
  const auto shared = RunOnGpu(*shared_judge_, batch, DType::kF32);
  INFO(shared.status());
  REQUIRE(shared.ok());
  const std::vector<double> factors = SharedFactors(input);
  for (size_t i = 0; i < sum.size(); ++i) {
    sum[i] = static_cast<float>(sum[i] + factors[i / static_cast<size_t>(spec_.hidden)] * (*shared)[i]);
  }
  return sum;
}

void WholeLayer::Check(const LayerInput& input, RoutingKind kind, const LayerRun& run, DType out_dtype, bool routed_only) const {
  INFO(router_.Name() << ", M=" << input.batch.rows << ", routing " << static_cast<int>(kind) << ", "
                      << DTypeName(input.batch.dtype) << " to " << DTypeName(out_dtype) << ": " << run.status);
  REQUIRE(run.status.ok());
  if (input.batch.rows == 0) return;
  CheckRouting(input, kind, run);
  const double bound = BoundOf(input.batch.dtype, out_dtype);
  const Judgement judgement = Judge(run.out, Expected(input, run, routed_only), spec_.hidden, bound);
  INFO(judgement.reason);
  CHECK(judgement.passed);
}

}  // namespace moed::testing
