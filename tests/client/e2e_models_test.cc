// What real checkpoints are taken for, and what they cost once loaded: `moed explain` on every golden model against what its
// quantizer wrote, and the bytes of `moectl status` against the bytes of the experts in the files.
#include <catch2/catch.hpp>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

using Json = nlohmann::json;

// Schemes of the routed experts, one for all layers or one for each, and that of the shared expert; empty: there is none.
struct Expected {
  std::vector<std::string> schemes;
  std::string shared = {};
};

const std::string kPlain = "bf16, 16-bit activations";
const std::string kWeightOnly = ", 16-bit activations";
const std::string kFp8Channel = "fp8 channel, bf16 scales, fp8 dynamic token activations";
const std::string kInt8Channel = "int8 channel symmetric, bf16 scales, int8 dynamic token activations";
const std::string kInt4Bf16 = "int4 g32 symmetric, bf16 scales";
const std::string kMx = "fp4 g32, e8m0 scales";
const std::string kNv = "fp4 g16, e4m3 scales with a global scale";
const std::string kFp4Input = ", fp4 dynamic g16 activations";
const std::string kBlock = "fp8 block 128x128, f32 scales, fp8 dynamic g128 activations";

// By folder: the table of the collection's README, and the types that the files' headers show.
const std::map<std::string, Expected>& ExpectedSchemes() {
  static const auto* const table = new std::map<std::string, Expected>{
      {"autoround-auto_round-int4-g32-sym", {{"int4 g32 symmetric, f16 scales" + kWeightOnly}}},
      {"awq-int4-g32", {{"int4 g32 asymmetric, bf16 scales" + kWeightOnly}}},
      {"ct-fp8-channel-dynamic", {{kFp8Channel}, kFp8Channel}},
      {"ct-fp8-tensor-static", {{"fp8 tensor, bf16 scales, fp8 static tensor activations"}}},
      {"ct-mixed-layers", {{kInt4Bf16 + kWeightOnly, kFp8Channel}, kPlain}},
      {"ct-mxfp4", {{kMx + ", fp4 dynamic g32 activations"}}},
      {"ct-mxfp8", {{"fp8 g32, e8m0 scales, fp8 dynamic g32 activations"}, kPlain}},
      {"ct-nvfp4", {{kNv + kFp4Input}}},
      {"ct-w4a16-channel", {{"int4 channel symmetric, bf16 scales" + kWeightOnly}}},
      {"ct-w4a16-g32-actorder", {{"int4 g32 symmetric act-order, bf16 scales" + kWeightOnly}}},
      {"ct-w4a16-g32-sharded", {{kInt4Bf16 + kWeightOnly}}},
      {"ct-w4a16-g32-sym", {{kInt4Bf16 + kWeightOnly}, kPlain}},
      {"ct-w4a16-g64-asym", {{"int4 g64 asymmetric, bf16 scales" + kWeightOnly}}},
      {"ct-w4a8-int8-g32", {{kInt4Bf16 + ", int8 dynamic token activations"}}},
      {"ct-w4afp8-g32", {{kInt4Bf16 + ", fp8 dynamic token activations"}}},
      {"ct-w8a16-channel", {{"int8 channel symmetric, bf16 scales" + kWeightOnly}}},
      {"ct-w8a8-int8-dynamic", {{kInt8Channel}, kInt8Channel}},
      {"ct-w8a8-int8-static", {{"int8 channel symmetric, bf16 scales, int8 static tensor activations"}}},
      {"ct-w8a8-int8-tensor", {{"int8 tensor symmetric, bf16 scales, int8 dynamic token activations"}}},
      {"gptq-int4-g32-asym", {{"int4 g32 asymmetric, f16 scales" + kWeightOnly}}},
      {"gptq-int4-g32-desc_act", {{"int4 g32 symmetric act-order, f16 scales" + kWeightOnly}, kPlain}},
      {"gptq-int4-g32-sym", {{"int4 g32 symmetric, f16 scales" + kWeightOnly}}},
      {"gptq-int4-g64-sym", {{"int4 g64 symmetric, f16 scales" + kWeightOnly}}},
      {"gptq-int8-g32", {{"int8 g32 symmetric, f16 scales" + kWeightOnly}}},
      {"gptq_v2-int4-g32-asym-edge", {{"int4 g32 asymmetric, f16 scales" + kWeightOnly}}},
      {"hf-fp8-block128", {{kBlock}, kBlock}},
      {"hf-mxfp4-gptoss", {{kMx + kWeightOnly}}},
      {"modelopt-fp8", {{"fp8 tensor, f32 scales, fp8 static tensor activations"}}},
      {"modelopt-nvfp4", {{kNv + kFp4Input}, kNv + kFp4Input}},
      {"modelopt-w4a16-nvfp4", {{kNv + kWeightOnly}}},
      {"quark-int4-fp8", {{"int4 channel symmetric, f32 scales with a global scale, fp8 dynamic tensor activations"}}},
      {"quark-int8-perchannel", {{kInt8Channel}}},
      {"quark-int8-pertensor", {{"int8 tensor symmetric, f32 scales, int8 static tensor activations"}}},
      {"quark-mxfp4", {{kMx + ", fp4 dynamic g32 activations"}}},
      {"quark-mxfp4-gptoss", {{kMx + ", fp4 dynamic g32 activations"}}},
      {"quark-uint4-g32", {{"int4 g32 asymmetric, bf16 scales" + kWeightOnly}}},
      {"tiny-deepseekv3-bf16", {{kPlain}, kPlain}},
      {"tiny-gptoss-bf16", {{kPlain}}},
      {"tiny-mixtral-bf16", {{kPlain}}},
      {"tiny-qwen3moe-bf16", {{kPlain}}},
  };
  return *table;
}

// int4 that its tool stores one value a byte: what is held is half of it.
bool HasLooseInt4(const std::string& folder) { return folder == "ct-w4a8-int8-g32" || folder == "ct-w4afp8-g32"; }

}  // namespace

TEST_CASE("Explain names the scheme that each checkpoint was written in, layer by layer") {
  size_t known = 0;
  for (const GoldenModel& model : GoldenModels()) {
    const auto expected = ExpectedSchemes().find(model.name);
    if (expected == ExpectedSchemes().end()) continue;
    ++known;
    const Finished finished = RunToEnd({kMoed, "explain", model.path, "--json"});
    INFO(model.path << ": " << finished.out << finished.err);
    REQUIRE(finished.exit_code == 0);
    const Json report = Json::parse(finished.out, nullptr, false);
    REQUIRE(report["layers"].size() == model.layers.size());
    CHECK(report["fits"] == true);
    const std::vector<std::string>& schemes = expected->second.schemes;
    for (size_t at = 0; at < model.layers.size(); ++at) {
      const Json& layer = report["layers"][at];
      CHECK(layer["layer"] == model.layers[at]);
      CHECK(layer["scheme"] == schemes[schemes.size() == 1 ? 0 : at]);
      CHECK(layer["shared_scheme"] == expected->second.shared);
      CHECK(layer["choice"] != "");
      CHECK(layer["choice"] != "reference");
    }
  }
  CHECK(known >= 3);  // those of tests/data
}

// Above: zero points of 4 bits are held as bytes, and panels are padded. Below: group indices and symmetric zero points are
// checked and dropped.
TEST_CASE("A loaded layer holds what its experts take in the file, from 5 % less to 8 % more") {
  const std::vector<GoldenModel> models = GoldenModels();
  std::vector<std::string> named;
  for (const GoldenModel& model : models) named.push_back(model.name + "=" + model.path);
  const RunningServer server(named);
  const Json status = server.MoectlJson({"status"});
  REQUIRE(status["models"].size() == models.size());
  for (size_t at = 0; at < models.size(); ++at) {
    REQUIRE(status["models"][at]["layers"].size() == models[at].layers.size());
    for (const Json& layer : status["models"][at]["layers"]) {
      const double held = layer["bytes"].get<double>();
      const double stored = static_cast<double>(models[at].ExpertBytes(layer["layer"]));
      const auto [least, most] = HasLooseInt4(models[at].name) ? std::pair(0.50, 0.60) : std::pair(0.95, 1.08);
      INFO(models[at].path << ", layer " << layer["layer"] << " on " << layer["backend"] << ": " << held << " bytes held, "
                           << stored << " in the file");
      CHECK(held >= least * stored);
      CHECK(held <= most * stored);
    }
  }
}

}  // namespace moed::testing
