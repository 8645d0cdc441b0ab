#include "tests/support/cpu_layers.h"

#include <catch2/catch.hpp>
#include <utility>

#include "kernels/cpu/cpu_backends.h"
#include "tests/support/batched_rows.h"
#include "tests/support/judge.h"
#include "tests/support/skip.h"

namespace moed::testing {

WorkerPool& Pool() {
  static WorkerPool pool(2);
  return pool;
}

std::vector<const Backend*> BackendsFor(const MoeDesc& desc) {
  std::vector<const Backend*> able;
  for (const Backend* backend : cpu::CpuBackends()) {
    const Verdict verdict = backend->Check(desc, ThisDevice());
    if (verdict.ok()) able.push_back(backend);
    if (!verdict.ok() && verdict.reasons[0].code == "isa_missing") Skip(backend->Name() + ": " + verdict.reasons[0].text);
  }
  REQUIRE(!able.empty());
  REQUIRE(able.back()->Name() == "cpu_generic");
  return able;
}

std::unique_ptr<PreparedMoe> Prepare(const Backend& backend, const MoeDesc& desc, const ExpertReader& experts) {
  absl::StatusOr<std::unique_ptr<PreparedMoe>> moe = backend.Prepare(desc, experts, Pool());
  INFO(backend.Name() << ": " << moe.status().ToString());
  REQUIRE(moe.ok());
  return *std::move(moe);
}

WeightScheme Weights(ElementType element, ScaleType scale, GroupShape group, bool zero_points) {
  WeightScheme scheme;
  scheme.element = element;
  scheme.scale = scale;
  scheme.group = group;
  scheme.zero_points = zero_points;
  return scheme;
}

ActivationScheme Input(ActivationMode mode, ElementType element, ScaleType scale, GroupShape group, ScaleRule rule) {
  ActivationScheme scheme;
  scheme.mode = mode;
  scheme.element = element;
  scheme.scale = scale;
  scheme.group = group;
  scheme.rule = rule;
  return scheme;
}

ActivationScheme Int8(ActivationMode mode, int32_t rows) { return Input(mode, ElementType::kInt8, ScaleType::kF32, {rows, 0}); }

void CompareBatched(const PreparedMoe& moe, const MoeDesc& desc, const RandomBatch& batch, const std::vector<float>& run) {
  const BatchedRows rows(desc, batch);
  const auto got = RunBatchedLayer(moe, rows, DType::kF32, Pool());
  REQUIRE(got.ok());
  CHECK(got->intact);
  const Judgement judgement = Judge(CombineByHand(batch, rows, *got), run, desc.hidden, 1e-6);
  INFO("batched experts: " << judgement.reason);
  CHECK(judgement.passed);
}

}  // namespace moed::testing
