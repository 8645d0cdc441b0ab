// The commands' own parts: the shapes of explain's output, devices by name, and what dequantize refuses.
#include <catch2/catch.hpp>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "nlohmann/json.hpp"
#include "server/commands.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using nlohmann::json;

LayerExplanation Layer(int number, const std::string& choice) {
  LayerExplanation layer;
  layer.layer = number;
  layer.scheme = "int4 g32";
  layer.choice = choice;
  layer.bytes = 3 << 20;
  layer.workspace_bytes = 2048;
  BackendVerdict good, bad;
  good.name = "cpu_generic";
  bad.name = "cpu_amx";
  bad.verdict.reasons = {{"isa_missing", "amx_tile"}, {"shape_unsupported", "I=640 is not a multiple of 128"}};
  layer.backends = {bad, good};
  return layer;
}

}  // namespace

TEST_CASE("The JSON of explain has the keys of the contract") {
  ExplainReport report;
  report.device = "h200";
  report.layers = {Layer(1, "cpu_generic")};
  const json document = json::parse(ExplainJson(report), nullptr, false);
  REQUIRE(document.is_object());
  CHECK(document["device"] == "h200");
  CHECK(document["fits"] == true);
  const json& layer = document["layers"][0];
  CHECK(layer["layer"] == 1);
  CHECK(layer["scheme"] == "int4 g32");
  CHECK(layer["choice"] == "cpu_generic");
  CHECK(layer["bytes"] == 3 << 20);
  CHECK(layer["workspace_bytes"] == 2048);
  CHECK(layer["backends"][0]["name"] == "cpu_amx");
  CHECK(layer["backends"][0]["ok"] == false);
  CHECK(layer["backends"][0]["reasons"][1]["code"] == "shape_unsupported");
  CHECK(layer["backends"][0]["reasons"][1]["text"] == "I=640 is not a multiple of 128");
  CHECK(layer["backends"][1]["ok"] == true);
  CHECK(layer["backends"][1]["reasons"].is_array());
  CHECK(layer["backends"][1]["reasons"].empty());
}

TEST_CASE("Text that is not UTF-8 does not break the JSON") {
  ExplainReport report;
  report.device = "\xff";
  CHECK_FALSE(json::parse(ExplainJson(report), nullptr, false).is_discarded());
}

TEST_CASE("Explain fits only when every layer and shared expert has a backend") {
  ExplainReport report;
  report.layers = {Layer(1, "cpu_generic"), Layer(2, "cpu_generic")};
  CHECK(EverythingFits(report));
  report.layers[1].shared_scheme = "bf16";
  CHECK_FALSE(EverythingFits(report));
  report.layers[1].shared_choice = "cpu_generic";
  CHECK(EverythingFits(report));
  report.layers[0].choice = "";
  CHECK_FALSE(EverythingFits(report));
  CHECK_THAT(ExplainText(report), Contains("NO BACKEND") && Contains("DOES NOT FIT"));
  report.layers[0].choice = "cpu_generic";
  report.fits = false;
  CHECK_FALSE(EverythingFits(report));
}

TEST_CASE("The text of explain shows equal neighbours once and every reason") {
  ExplainReport report;
  report.device = "this";
  report.layers = {Layer(1, "cpu_generic"), Layer(2, "cpu_generic"), Layer(4, "cpu_generic"), Layer(5, "cpu_avx2")};
  report.need.host = {12 << 20, 2048};
  const std::string text = ExplainText(report);
  CHECK_THAT(text, Contains("layers 1-2: int4 g32") && Contains("layer 4: ") && Contains("layer 5: "));
  CHECK_THAT(text, Contains("isa_missing: amx_tile") && Contains("I=640 is not a multiple of 128"));
  CHECK_THAT(text, Contains("weights 12.0 MiB, workspace 2.0 KiB: fits") && !Contains("on the GPU"));
  report.need.gpu = {5 << 20, 1024};
  report.lanes = 3;
  CHECK_THAT(ExplainText(report), Contains("on the GPU: weights 5.0 MiB, workspace 1.0 KiB for each of 3 lanes\nweights 12.0 MiB"));
}

TEST_CASE("An unknown device is refused with the known ones") {
  const absl::Status status = ReadDevice("h2000").status();
  CHECK(absl::IsNotFound(status));
  CHECK_THAT(std::string(status.message()), Contains("h200, ") && Contains("cpu-amx") && Contains("'h2000'"));
  CHECK(ReadDevice("this").ok());
  CHECK(ReadDevice("h200").ok());
}

TEST_CASE("Dequantize refuses an existing output and leaves nothing behind when it fails") {
  std::string folder = "/tmp/moed_commands_test_XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const std::string out = folder + "/out.safetensors";
  DequantizeOptions options;
  options.path = folder;  // no config.json in it
  options.out = out;
  CHECK(absl::IsNotFound(Dequantize(options).status()));
  CHECK(std::filesystem::is_empty(folder));
  std::ofstream(out) << "precious";
  CHECK(absl::IsAlreadyExists(Dequantize(options).status()));
  options.force = true;
  CHECK(absl::IsNotFound(Dequantize(options).status()));
  CHECK(std::filesystem::file_size(out) == 8);
  std::filesystem::remove_all(folder);
}

}  // namespace moed
