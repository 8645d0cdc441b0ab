// The whole way, moectl to kernels: real checkpoints served by a real moed, the answers compared with golden outputs by
// `moectl forward --expect`. Each model is served twice, by the reference and by what the oracle picks.
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

using Json = nlohmann::json;

// A way to serve, and the relative error that it may have when the arithmetic is its own (float32 on the wire allows no
// more than the weight-only bound; the reference is exact but for the order of its sums).
struct Way {
  std::string policy;
  std::string max_rel;
};
const std::vector<Way> kWays = {{"require:reference", "1e-4"}, {"auto", "0.01"}};

// Rows that other correct arithmetic may route otherwise: the server's gate sums in its own order...
constexpr double kGateGap = 1e-3;
// ... while logits sent by the client only pass through the scores' own rounding.
constexpr double kLogitsGap = 1e-6;

std::vector<std::string> Forward(const GoldenModel& model, int layer, const std::vector<std::string>& more) {
  const std::string prefix = std::to_string(layer) + ".";
  std::vector<std::string> arguments = {"forward",    "--layer",          std::to_string(layer),
                                        "--input",    model.GoldenFile(), "--hidden",
                                        prefix + "x", "--dtype",          "f32"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

void AddSkip(const std::vector<int64_t>& rows, std::vector<std::string>* arguments) {
  if (!rows.empty()) arguments->insert(arguments->end(), {"--skip-rows", RowsText(rows)});
}

void CheckReport(const Json& report, int64_t exempt) {
  CHECK(report["rows"] == 48);
  CHECK(report["passed"] == true);
  CHECK(report["max_rel"].is_number());
  CHECK(report["exempt_rows"] == exempt);
  CHECK(report["compared_rows"] == 48 - exempt);
  CHECK(!report["backend"].get<std::string>().empty());
  CHECK(!report["scheme"].get<std::string>().empty());
  CHECK(report["generation"].is_number_unsigned());
  for (const char* key : {"receive", "queue", "compute", "send"}) CHECK(report["times_us"][key].is_number_integer());
}

// Serves every golden model in every way and hands each of its layers to `check`.
template <typename Check>
void ForEachServedLayer(const Check& check) {
  for (const GoldenModel& model : GoldenModels()) {
    for (const Way& way : kWays) {
      INFO(model.path << " with --policy " << way.policy);
      const RunningServer server({model.path}, {"--policy", way.policy});
      for (int layer : model.layers) {
        INFO("layer " << layer);
        check(server, model, layer, way);
      }
    }
  }
}

}  // namespace

TEST_CASE("Routed experts give the golden outputs with the golden ids and weights") {
  ForEachServedLayer([](const RunningServer& server, const GoldenModel& model, int layer, const Way& way) {
    const std::string prefix = std::to_string(layer) + ".";
    const Json report = server.MoectlJson(Forward(model, layer,
                                                  {"--ids", prefix + "topk_ids", "--weights", prefix + "topk_weights",
                                                   "--routed-only", "--expect", prefix + "y", "--max-rel", way.max_rel}));
    CheckReport(report, 0);
    if (way.policy == "require:reference") CHECK(report["backend"] == "reference");
  });
}

TEST_CASE("The server's own router picks the golden experts and gives the golden block") {
  ForEachServedLayer([](const RunningServer& server, const GoldenModel& model, int layer, const Way& way) {
    const std::string prefix = std::to_string(layer) + ".";
    const std::vector<int64_t> close = RowsDecidedByLess(model, layer, kGateGap);
    REQUIRE(close.size() < 24);  // of 48: else the comparison would be worth little
    std::vector<std::string> arguments = Forward(
        model, layer, {"--expect", prefix + "y_block", "--max-rel", way.max_rel, "--expect-ids", prefix + "topk_ids"});
    AddSkip(close, &arguments);
    const Json report = server.MoectlJson(arguments);
    CheckReport(report, static_cast<int64_t>(close.size()));
    CHECK(report["different_routing_rows"].empty());
    CHECK(report["exempt_routing_rows"] == close.size());
  });
}

TEST_CASE("Logits sent by the client are routed by the checkpoint's rule") {
  ForEachServedLayer([](const RunningServer& server, const GoldenModel& model, int layer, const Way& way) {
    const std::string prefix = std::to_string(layer) + ".";
    const std::vector<int64_t> close = RowsDecidedByLess(model, layer, kLogitsGap);
    REQUIRE(close.size() < 24);
    std::vector<std::string> arguments = Forward(model, layer,
                                                 {"--logits", prefix + "router_logits", "--expect", prefix + "y_block",
                                                  "--max-rel", way.max_rel, "--expect-ids", prefix + "topk_ids"});
    AddSkip(close, &arguments);
    const Json report = server.MoectlJson(arguments);
    CheckReport(report, static_cast<int64_t>(close.size()));
    CHECK(report["different_routing_rows"].empty());
  });
}

TEST_CASE("A comparison that fails exits with 1 and names the worst row") {
  const GoldenModel model = CheckedInModel("gptq-int4-g32-sym");
  const RunningServer server({model.path});
  // The output of a layer is not its input: every row is wrong.
  const Finished human = server.Moectl(Forward(model, 0, {"--expect", "0.x", "--max-rel", "0.01"}));
  CHECK(human.exit_code == 1);
  CHECK(human.out.find("largest relative error of a row") != std::string::npos);
  CHECK(human.out.find("FAILED") != std::string::npos);
  const Json report = server.MoectlJson(Forward(model, 0, {"--expect", "0.x", "--max-rel", "0.01"}), 1);
  CHECK(report["passed"] == false);
  CHECK(report["max_rel"].get<double>() > 0.01);
  CHECK(report["worst_row"].get<int>() >= 0);
}

}  // namespace moed::testing
