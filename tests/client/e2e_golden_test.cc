// The whole way, moectl to kernels: real checkpoints served by a real moed, the answers compared with golden outputs by
// `moectl forward --expect`. All of them are served at once, by the reference and by what the oracle picks, and with
// activations as the files say, without quantizing them, and with int8 ones wherever they may be.
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
  std::string activations;
  double bound;
};
const std::vector<Way> kWays = {{"require:reference", "file", 1e-4},
                                {"require:reference", "none", 1e-4},
                                {"auto", "file", 0.01},
                                {"auto", "none", 0.01},
                                {"require:reference", "int8", 0.04},
                                {"auto", "int8", 0.04}};

// Rows that other correct arithmetic may route otherwise: the server's gate sums in its own order...
constexpr double kGateGap = 1e-3;
// ... while logits sent by the client only pass through the scores' own rounding.
constexpr double kLogitsGap = 1e-6;

bool QuantizesActivations(const std::string& scheme) { return scheme.find("16-bit activations") == std::string::npos; }

// The golden tensor of the routed experts that a layer is held to, and how closely. Where activations are quantized, another
// order of additions may move a value over a rounding border, whatever the arithmetic: the scheme has a bound of its own. A
// scheme without a golden output of its own (its activation scale spans the request, or is the operator's) is compared with
// unquantized ones.
struct Target {
  std::string tensor = "y";
  double bound = 0.0;
};

Target TargetOf(const GoldenModel& model, int layer, const std::string& scheme, const Way& way) {
  if (!QuantizesActivations(scheme) || way.activations == "int8") return {"y", way.bound};
  if (!model.Has(layer, "y_q")) return {"y", 0.10};
  if (way.policy == "require:reference") return {"y_q", way.bound};
  if (scheme.find("fp4 dynamic") != std::string::npos) return {"y_q", 0.10};
  return {"y_q",
          scheme.find("fp8 dynamic") != std::string::npos || scheme.find("fp8 static") != std::string::npos ? 0.06 : 0.02};
}

std::vector<std::string> Forward(const GoldenModel& model, int layer, const std::vector<std::string>& more) {
  const std::string prefix = std::to_string(layer) + ".";
  std::vector<std::string> arguments = {"forward", "--model",          model.name, "--layer",    std::to_string(layer),
                                        "--input", model.GoldenFile(), "--hidden", prefix + "x", "--dtype",
                                        "f32"};
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

// One layer of one model, served in one way.
struct ServedLayer {
  const GoldenModel& model;
  int layer;
  std::string scheme;  // executed
  std::string backend;
};

// Serves all golden models in every way and hands each of their layers to `check`, once for each policy and executed scheme.
template <typename Check>
void ForEachServedLayer(const Check& check) {
  const std::vector<GoldenModel> models = GoldenModels();
  std::vector<std::string> named;
  for (const GoldenModel& model : models) named.push_back(model.name + "=" + model.path);
  for (const Way& way : kWays) {
    INFO("--policy " << way.policy << " --activations " << way.activations);
    const RunningServer server(named, {"--policy", way.policy, "--activations", way.activations});
    const Json status = server.MoectlJson({"status"});
    REQUIRE(status["models"].size() == models.size());
    for (size_t at = 0; at < models.size(); ++at) {
      const Json& served = status["models"][at];
      REQUIRE(served["name"] == models[at].name);
      REQUIRE(served["layers"].size() == models[at].layers.size());
      for (const Json& row : served["layers"]) {
        INFO(models[at].path << ", layer " << row["layer"]);
        CHECK((way.activations != "none" || !QuantizesActivations(row["executed_scheme"])));
        // Where the operator's choice is the file's, the two ways are one.
        if (way.activations != "file" && row["scheme"] == row["executed_scheme"]) continue;
        const bool int8 = row["executed_scheme"].get<std::string>().ends_with("int8 dynamic token activations");
        CHECK((way.activations == "file" || int8 == (way.activations == "int8")));
        check(server, way, ServedLayer{models[at], row["layer"], row["executed_scheme"], row["backend"]});
      }
    }
  }
}

}  // namespace

TEST_CASE("Routed experts give the golden outputs with the golden ids and weights") {
  ForEachServedLayer([](const RunningServer& server, const Way& way, const ServedLayer& served) {
    const std::string prefix = std::to_string(served.layer) + ".";
    const Target target = TargetOf(served.model, served.layer, served.scheme, way);
    INFO(served.scheme << ", compared with " << target.tensor);
    const Json report =
        server.MoectlJson(Forward(served.model, served.layer,
                                  {"--ids", prefix + "topk_ids", "--weights", prefix + "topk_weights", "--routed-only",
                                   "--expect", prefix + target.tensor, "--max-rel", std::to_string(target.bound)}));
    CheckReport(report, 0);
    CHECK(report["scheme"] == served.scheme);
    CHECK(report["backend"] == served.backend);
    CHECK((served.backend == "reference") == (way.policy == "require:reference"));
  });
}

// The block of the original model has unquantized activations.
TEST_CASE("The server's own router, and logits sent by the client, pick the golden experts and give the golden block") {
  ForEachServedLayer([](const RunningServer& server, const Way& way, const ServedLayer& served) {
    if (QuantizesActivations(served.scheme)) return;
    const std::string prefix = std::to_string(served.layer) + ".";
    for (const bool own_router : {true, false}) {
      INFO((own_router ? "own router" : "logits"));
      const std::vector<int64_t> close = RowsDecidedByLess(served.model, served.layer, own_router ? kGateGap : kLogitsGap);
      REQUIRE(close.size() < 24);  // of 48: else the comparison would be worth little
      std::vector<std::string> arguments = Forward(
          served.model, served.layer,
          {"--expect", prefix + "y_block", "--max-rel", std::to_string(way.bound), "--expect-ids", prefix + "topk_ids"});
      if (!own_router) arguments.insert(arguments.end(), {"--logits", prefix + "router_logits"});
      AddSkip(close, &arguments);
      const Json report = server.MoectlJson(arguments);
      CheckReport(report, static_cast<int64_t>(close.size()));
      CHECK(report["different_routing_rows"].empty());
      CHECK(report["exempt_routing_rows"] == close.size());
    }
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
