// B68: one binary on processors that lack what it was built beside: under an emulator of old ones, and with features masked.
//
// qemu-x86_64 (qemu-user) emulates every instruction, so one that the chosen processor lacks ends the program as it would there.
#include <catch2/catch.hpp>

#include <optional>
#include <string>
#include <vector>

#include "kernels/backends.h"
#include "tests/client/running_server.h"
#include "tests/support/case_calls.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/process.h"
#include "tests/support/sanitizer.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

constexpr char kEmulator[] = "qemu-x86_64";
constexpr int kRows = 3, kExperts = 4, kTopK = 2, kHidden = 256, kIntermediate = 128;

struct OldProcessor {
  std::string cpu;      // as the emulator names it
  std::string backend;  // the best that runs there
  // Backends that cannot run there, with a flag that the refusal names.
  std::vector<std::pair<std::string, std::string>> too_new;
};
const std::vector<OldProcessor>& OldProcessors() {
  static const std::vector<OldProcessor> all = {
      {"Haswell",
       "cpu_avx2",
       {{"cpu_avxvnni", "avxvnni"}, {"cpu_avx512", "avx512f"}, {"cpu_avx512bf16", "avx512bf16"}, {"cpu_vnni", "avx512vnni"},
        {"cpu_amx", "amx_tile"}}},
      {"Nehalem", "cpu_generic", {{"cpu_avx2", "avx2"}, {"cpu_avx512", "avx512f"}, {"cpu_amx", "amx_tile"}}}};
  return all;
}

std::vector<std::string> Emulated(const std::string& cpu) { return {kEmulator, "-cpu", cpu}; }

// Why the emulator cannot be used; nothing when it can.
std::optional<std::string> WhyNotEmulated() {
  if (kAddressSanitizer || kThreadSanitizer) return "a sanitizer's shadow memory does not fit into the emulator's addresses";
  if (RunToEnd({kEmulator, "--version"}).exit_code != 0) return "needs qemu-x86_64 (package qemu-user)";
  return std::nullopt;
}

bool Linked(const std::string& name) {
  for (const Backend* backend : LinkedBackends()) {
    if (backend->Name() == name) return true;
  }
  return false;
}

// A checkpoint, and a file with a call of three rows and its exact answer.
struct Case {
  explicit Case(const std::string& scheme)
      : model(SpecOf(CaseSchemeNamed(scheme), kExperts, kTopK, kHidden, kIntermediate), CaseSchemeNamed(scheme)) {
    const CaseInput input = RoutedInput(kRows, kHidden, kExperts, kTopK);
    CheckpointBuilder file;
    file.AddFloats("x", StDtype::kBf16, {kRows, kHidden}, input.x);
    file.AddInt32("ids", {kRows, kTopK}, input.ids);
    file.AddFloats("weights", StDtype::kF32, {kRows, kTopK}, input.weights);
    file.AddFloats("y", StDtype::kF32, {kRows, kHidden}, ExactRows(model.layer(), input));
    REQUIRE(file.Write(call.path()).ok());
  }

  // Backend and answer of a server.
  void Check(const RunningServer& server, const std::string& backend) const {
    const nlohmann::json status = server.MoectlJson({"status"});
    CHECK(status["models"][0]["layers"][0]["backend"] == backend);
    const nlohmann::json report =
        server.MoectlJson({"forward", "--layer", "0", "--input", call.File("model.safetensors"), "--hidden", "x", "--ids",
                           "ids", "--weights", "weights", "--dtype", "f32", "--expect", "y", "--max-rel", "0.01"});
    CHECK(report["passed"] == true);
    CHECK(report["backend"] == backend);
    CHECK(report["max_rel"].get<double>() <= 0.01);
  }

  // A server that needs `backend` ends with 2, naming `flag`; a backend that this build does not have is named itself.
  void CheckRefused(const std::string& backend, const std::string& flag, const std::vector<std::string>& launcher,
                    const std::vector<std::string>& more = {}) const {
    std::vector<std::string> command = launcher;
    command.insert(command.end(), {kMoed, "serve", "--model", model.path(), "--listen", "127.0.0.1:0", "--policy",
                                   "require:" + backend});
    command.insert(command.end(), more.begin(), more.end());
    const Finished finished = RunToEnd(command);
    INFO("stderr: " << finished.err);
    CHECK(finished.exit_code == 2);
    CHECK(finished.err.find("error: ") != std::string::npos);
    CHECK(finished.err.find(backend) != std::string::npos);
    if (Linked(backend)) CHECK(finished.err.find(flag) != std::string::npos);
  }

  CaseModel model;
  TempDir call;
};

}  // namespace

TEST_CASE("B68: on an emulated old processor the server starts, names the backend that it uses, and computes right") {
  if (const auto why = WhyNotEmulated(); why.has_value()) return Skip(*why);
  for (const std::string scheme : {"int4", "bf16"}) {
    const Case each(scheme);
    for (const OldProcessor& old : OldProcessors()) {
      INFO(scheme << " on " << old.cpu);
      const RunningServer server({each.model.path()}, {}, Emulated(old.cpu));
      each.Check(server, old.backend);
      CHECK(server.MoectlJson({"smoke"})["passed"] == true);
    }
  }
}

TEST_CASE("B68: each backend that an emulated old processor has can be forced there, the others are refused by a flag") {
  if (const auto why = WhyNotEmulated(); why.has_value()) return Skip(*why);
  const Case int4("int4");
  for (const OldProcessor& old : OldProcessors()) {
    INFO(old.cpu);
    const RunningServer server({int4.model.path()}, {"--policy", "require:cpu_generic"}, Emulated(old.cpu));
    int4.Check(server, "cpu_generic");
    for (const auto& [backend, flag] : old.too_new) int4.CheckRefused(backend, flag, Emulated(old.cpu));
  }
}

TEST_CASE("B68: with the features of newer processors masked the server chooses and refuses as on an old one") {
  for (const std::string scheme : {"int4", "bf16"}) {
    const Case each(scheme);
    const RunningServer server({each.model.path()}, {"--cpu-features", "-avx2"});
    each.Check(server, "cpu_generic");
    each.CheckRefused("cpu_avx2", "avx2", {}, {"--cpu-features", "-avx2"});
    each.CheckRefused("cpu_avx512", "avx512f", {}, {"--cpu-features", "-avx512f"});
    each.CheckRefused("cpu_amx", "amx_tile", {}, {"--cpu-features", "-amx_tile"});
  }
}

}  // namespace moed
