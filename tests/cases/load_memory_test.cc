// B66: loading takes what the loaded model takes, and no second copy of it.
//
// The case's model, 8 layers of RC(64, 1024, 512), with a quarter of the experts; so is the allowance beside the model.
#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "engine/explain.h"
#include "kernels/backends.h"
#include "tests/support/case_calls.h"
#include "tests/support/load_child.h"
#include "tests/support/sanitizer.h"
#include "tests/support/skip.h"

namespace moed::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kAllowance = 50 * kMiB;
constexpr int kLayers = 8;

// One layer's tensors under the names of every layer: the bytes are what counts here.
void RepeatLayer(CheckpointBuilder& builder) {
  nlohmann::json config = nlohmann::json::parse(builder.GetFile("config.json"), nullptr, false);
  config["num_hidden_layers"] = kLayers;
  builder.SetConfig(config.dump());
  const std::vector<BuilderTensor> first = builder.tensors();
  const std::string prefix = "model.layers.0.";
  for (int layer = 1; layer < kLayers; ++layer) {
    for (const BuilderTensor& tensor : first) {
      REQUIRE(tensor.name.rfind(prefix, 0) == 0);
      builder.Add("model.layers." + std::to_string(layer) + "." + tensor.name.substr(prefix.size()), tensor.dtype,
                  tensor.shape, tensor.bytes);
    }
  }
}

// Bytes that the engine will hold.
int64_t TotalBytes(const std::string& path) {
  const absl::StatusOr<ExplainReport> report =
      ExplainCheckpoint(path, ThisDevice(), LinkedBackends(), Policy(), ActivationChoice::kFile, -1, 8192);
  REQUIRE(report.ok());
  REQUIRE(report->layers.size() == kLayers);
  int64_t total = 0;
  for (const LayerExplanation& layer : report->layers) total += static_cast<int64_t>(layer.bytes);
  return total;
}

}  // namespace

TEST_CASE("B66: the peak of a load is the model and two layers, and what stays is the model") {
  if (kAddressSanitizer) return Skip("AddressSanitizer changes the memory that a process takes");
  CaseScheme int4_128 = CaseSchemeNamed("int4");
  int4_128.experts.group = 128;
  for (CaseScheme scheme : {int4_128, CaseSchemeNamed("int4 act-order"), CaseSchemeNamed("fp8")}) {
    ModelSpec spec = SpecOf(scheme, 16, 2, 1024, 512);
    spec.keep_reference = false;
    const CaseModel model(spec, scheme, RepeatLayer);
    const int64_t total = TotalBytes(model.path());
    REQUIRE(total > 90 * kMiB);  // so that a second copy is more than the allowance
    const LoadOutcome outcome = LoadInChild(model.path(), {}, 120);
    INFO(scheme.name << ": total " << total / kMiB << " MiB, peak " << outcome.peak / kMiB << ", held "
                     << outcome.held / kMiB << outcome.trouble << outcome.error);
    REQUIRE(outcome.ok);
    CHECK(outcome.peak <= total + 2 * total / kLayers + kAllowance);
    CHECK(outcome.held <= total * 115 / 100 + kAllowance);
    CHECK(outcome.held > total / 2);  // the probe sees what the engine holds
  }
}

}  // namespace moed::testing
