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

void CompareBatched(const PreparedMoe& moe, const MoeDesc& desc, const RandomBatch& batch, const std::vector<float>& run, Lane* lane) {
  const BatchedRows rows(desc, batch);
  const auto got = RunBatchedLayer(moe, rows, DType::kF32, Pool(), lane);
  REQUIRE(got.ok());
  CHECK(got->intact);
  const Judgement judgement = Judge(CombineByHand(batch, rows, *got), run, desc.hidden, 1e-6);
  INFO("batched experts: " << judgement.reason);
  CHECK(judgement.passed);
}

}  // namespace moed::testing
