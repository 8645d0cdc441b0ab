// `--activations int8` through the real programs: what runs, on which backend, how near to the reference that quantizes in the same
// way, and that explaining and serving agree.
#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"
#include "tests/support/case_calls.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Json = nlohmann::json;

constexpr int kRows = 9, kExperts = 8, kTopK = 2, kHidden = 256, kIntermediate = 128;
constexpr char kInt8Token[] = ", int8 dynamic token activations";

// A checkpoint of one layer, and a call of nine rows.
struct Case {
  explicit Case(const std::string& scheme)
      : model(SpecOf(CaseSchemeNamed(scheme), kExperts, kTopK, kHidden, kIntermediate), CaseSchemeNamed(scheme)) {
    Write({});
  }

  // The call's file, with `expected` [kRows, kHidden] unless empty.
  void Write(const std::vector<float>& expected) const {
    const CaseInput input = RoutedInput(kRows, kHidden, kExperts, kTopK);
    CheckpointBuilder file;
    file.AddFloats("x", StDtype::kBf16, {kRows, kHidden}, input.x);
    file.AddInt32("ids", {kRows, kTopK}, input.ids);
    file.AddFloats("weights", StDtype::kF32, {kRows, kTopK}, input.weights);
    file.AddFloats("exact", StDtype::kF32, {kRows, kHidden}, ExactRows(model.layer(), input));
    if (!expected.empty()) file.AddFloats("y", StDtype::kF32, {kRows, kHidden}, expected);
    REQUIRE(file.Write(call.path()).ok());
  }

  // `moectl forward`, float32 out, whatever its comparison says.
  Json Forward(const RunningServer& server, std::vector<std::string> more) const {
    std::vector<std::string> arguments = {"forward", "--layer", "0", "--input", call.File("model.safetensors"), "--hidden", "x",
                                          "--ids", "ids", "--weights", "weights", "--dtype", "f32"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return server.MoectlJson(arguments);
  }

  // Makes what a server with `options` answers the expected output of further calls.
  void ExpectAnswerOf(const std::vector<std::string>& options) const {
    const RunningServer server({model.path()}, options);
    Forward(server, {"--output", call.File("answer.safetensors")});
    Write(ReadGolden(call.File("answer.safetensors"), "output").values);
  }

  CaseModel model;
  TempDir call;
};

Json Explain(const std::string& path, std::vector<std::string> more) {
  more.insert(more.begin(), {kMoed, "explain", path, "--json"});
  const Finished finished = RunToEnd(more);
  INFO(finished.out << finished.err);
  REQUIRE(finished.exit_code == 0);
  return Json::parse(finished.out, nullptr, false)["layers"][0];
}

size_t CountOf(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("With int8 activations every backend that takes the layer answers as the reference that quantizes likewise") {
  for (const std::string scheme : {"int4", "int4 act-order", "mxfp4"}) {
    const Case each(scheme);
    each.ExpectAnswerOf({"--policy", "require:reference", "--activations", "int8"});
    size_t ran = 0;
    const Json explained = Explain(each.model.path(), {"--activations", "int8"});
    for (const Json& backend : explained["backends"]) {
      if (backend["ok"] != true) continue;
      const std::string name = backend["name"];
      INFO(scheme << " on " << name);
      ++ran;
      RunningServer server({each.model.path()}, {"--policy", "require:" + name, "--activations", "int8"});
      const Json layer = server.MoectlJson({"status"})["models"][0]["layers"][0];
      CHECK(layer["backend"] == name);
      CHECK(layer["scheme"].get<std::string>().ends_with(", 16-bit activations"));
      CHECK(layer["executed_scheme"].get<std::string>().ends_with(kInt8Token));
      for (const auto& [tensor, bound] : {std::pair("y", "0.02"), std::pair("exact", "0.04")}) {
        const Json report = each.Forward(server, {"--expect", tensor, "--max-rel", bound});
        CHECK(report["passed"] == true);
        CHECK(report["backend"] == name);
        CHECK(report["scheme"] == layer["executed_scheme"]);
      }
      CHECK(server.MoectlJson({"smoke"})["passed"] == true);
      CHECK(CountOf(server.process().Stdout(), "int8 activations:") == 0);  // every layer takes them
    }
    CHECK(ran >= 1);
  }
}

TEST_CASE("Explain and serve agree on scheme and backend for every choice of activations, also with features masked") {
  const Case int4("int4");
  for (const std::string features : {"-avx2", "-avx512f,-amx_tile", "-amx_tile", "-avx512vnni,-amx_tile", ""}) {
    for (const std::string choice : {"file", "none", "int8"}) {
      std::vector<std::string> options = {"--activations", choice};
      if (!features.empty()) options.insert(options.end(), {"--cpu-features", features});
      INFO(features << " " << choice);
      const Json explained = Explain(int4.model.path(), options);
      const RunningServer server({int4.model.path()}, options);
      const Json served = server.MoectlJson({"status"})["models"][0]["layers"][0];
      CHECK(explained["choice"] == served["backend"]);
      CHECK(explained["scheme"] == served["executed_scheme"]);
      CHECK(explained["bytes"] == served["bytes"]);
      CHECK((explained["scheme"].get<std::string>().ends_with(kInt8Token)) == (choice == "int8"));
      CHECK(server.MoectlJson({"explain"})["layers"][0]["choice"] == served["backend"]);
    }
  }
}

TEST_CASE("A backend of 16-bit activations that is required for int8 ones is refused with what it wants, by serve and by explain") {
  const Case int4("int4");
  for (const std::string command : {"serve", "explain"}) {
    std::vector<std::string> arguments = {kMoed, command};
    if (command == "serve") arguments.push_back("--model");
    arguments.insert(arguments.end(), {int4.model.path(), "--activations", "int8", "--policy", "require:cpu_avx512bf16"});
    const Finished finished = RunToEnd(arguments);
    INFO(finished.out << finished.err);
    CHECK(finished.exit_code == (command == "serve" ? 2 : 1));
    const std::string& said = command == "serve" ? finished.err : finished.out;
    CHECK(said.find("the required backend cpu_avx512bf16 cannot run this layer") != std::string::npos);
    CHECK(said.find("activations that are not quantized, got int4 g64 symmetric, bf16 scales" + std::string(kInt8Token)) !=
          std::string::npos);
  }
}

TEST_CASE("A bf16 model is served to the bit as without int8 activations, and the log says once that its layers keep the file's") {
  const Case bf16("bf16");
  bf16.ExpectAnswerOf({});
  RunningServer server({bf16.model.path()}, {"--activations", "int8"});
  const Json report = bf16.Forward(server, {"--expect", "y", "--max-rel", "0"});
  CHECK(report["passed"] == true);
  CHECK(report["scheme"] == "bf16, 16-bit activations");
  const std::string log = server.process().Stdout();
  INFO(log);
  CHECK(CountOf(log, "int8 activations: 1 of 1 layers keep what the file says") == 1);
  CHECK(CountOf(log, "int8 activations") == 1);
}

}  // namespace moed::testing
