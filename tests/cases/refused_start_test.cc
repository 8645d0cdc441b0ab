// Acceptance cases of wrong checkpoints, end to end: `moed serve` exits with 2, says what is wrong in its first line on stderr,
// and is never ready.
#include <signal.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <filesystem>

#include "tests/client/running_server.h"
#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

ModelSpec SmallSpec(const std::string& scheme) { return SpecOf(CaseSchemeNamed(scheme), 4, 2, 64, 32); }

void CheckNeverReady(const std::string& path, const std::vector<std::string>& more,
                     const std::vector<std::string>& in_first_line) {
  const TempDir dir;
  std::vector<std::string> arguments = {kMoed,      "serve",       "--model",      path,
                                        "--listen", "127.0.0.1:0", "--ready-file", dir.File("ready.json")};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const Finished finished = RunToEnd(arguments);
  INFO("stderr: " << finished.err);
  CHECK(finished.exit_code == 2);
  for (const std::string& text : in_first_line) CHECK(finished.FirstError().find(text) != std::string::npos);
  CHECK_FALSE(std::filesystem::exists(dir.File("ready.json")));
  CHECK(finished.out.find("ready") == std::string::npos);
}

}  // namespace

TEST_CASE("B30: a server whose checkpoint lacks a shard does not start, and names it") {
  CheckpointBuilder builder;
  const CaseModel model(SmallSpec("bf16"), {}, [&](CheckpointBuilder& written) { builder = written; });
  REQUIRE(builder.Write(model.path(), 2).ok());
  REQUIRE(std::filesystem::remove(model.path() + "/model-00002-of-00002.safetensors"));
  CheckNeverReady(model.path(), {}, {"model-00002-of-00002.safetensors"});
}

TEST_CASE("B32: a server whose experts have another name does not start, and names them") {
  const CaseModel model(SmallSpec("bf16"), {},
                        [](CheckpointBuilder& builder) { CHECK(builder.RenameAll(".experts.2.", ".expertz.2.") == 3); });
  CheckNeverReady(model.path(), {}, {"3 tensors are missing", "model.layers.0.mlp.experts.2.gate_proj.weight"});
}

TEST_CASE("B22: a server that reads NaN in a scale ends before it is ready, and names tensor and index") {
  const CaseModel model(SmallSpec("nvfp4"), CaseSchemeNamed("nvfp4"), [](CheckpointBuilder& builder) {
    builder.Find("model.layers.0.mlp.experts.2.gate_proj.weight_scale")->bytes[7] = 0x7F;
  });
  CheckNeverReady(model.path(), {}, {"model.layers.0.mlp.experts.2.gate_proj.weight_scale", "scale 7"});
}

TEST_CASE("B15: a server whose zero points contradict sym ends before it is ready, and names the tensor") {
  ModelSpec spec = SmallSpec("bf16");
  spec.experts = {.format = ExpertFormat::kGptq, .group = 32, .gptq_v2 = true};
  const CaseModel model(spec, {}, [](CheckpointBuilder& builder) {
    PatchConfig(&builder, R"({"quantization_config": {"checkpoint_format": "gptq"}})");
  });
  CheckNeverReady(model.path(), {}, {".qzeros", "is 9, want 8"});
}

TEST_CASE(
    "B01, B02: a server with a forced backend that cannot run a layer does not start, and tells every backend's reasons") {
  ModelSpec spec = SmallSpec("bf16");
  spec.experts = {.format = ExpertFormat::kGptq, .group = 32, .group_index = GroupIndex::kShuffled};
  const CaseModel model(spec, {});
  CheckNeverReady(model.path(), {"--policy", "require:cpu_vnni"},  // its products want int8 activations
                  {"layer 0", "the required backend cpu_vnni cannot run this layer"});
  CheckNeverReady(model.path(), {"--policy", "require:cpu_frob"}, {"cpu_frob", "cpu_generic"});
}

TEST_CASE("B30, B32: stray files and unread tensors are told once in the log of a server that starts") {
  const CaseModel model(SmallSpec("bf16"), {}, [](CheckpointBuilder& builder) {
    const std::vector<float> values(16, 3.0f);
    builder.AddFloats("lm_head.weight", StDtype::kBf16, {4, 4}, values);
  });
  WriteFile(model.path() + "/stray.safetensors", "none of the model's");
  RunningServer server({model.path()});
  server.process().Signal(SIGTERM);
  CHECK(server.process().Wait(std::chrono::minutes(1)) == 0);
  const std::string log = server.process().Stdout();
  INFO(log);
  for (const std::string text :
       {"stray.safetensors: ignored", "1 tensors belong to no MoE layer and are not read, lm_head.weight"}) {
    const size_t first = log.find(text);
    REQUIRE(first != std::string::npos);
    CHECK(log.find(text, first + 1) == std::string::npos);
  }
}

}  // namespace moed
