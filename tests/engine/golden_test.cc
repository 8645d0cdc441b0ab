// Real checkpoints, in process: every MoE layer against the golden outputs of its folder, for the reference and for the automatic
// choice. The folders of tests/data, and those of the directory that the environment variable MOED_MODELS names.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/judge.h"

namespace moed {
namespace {

namespace fs = std::filesystem;

struct Golden {
  explicit Golden(const std::string& folder) {
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> opened = SafetensorsFile::Open(folder + "/golden.safetensors");
    REQUIRE(opened.ok());
    file = *std::move(opened);
  }

  bool Has(int layer, const std::string& name) const { return file->Find(std::to_string(layer) + "." + name) != nullptr; }

  template <typename T>
  std::vector<T> Read(int layer, const std::string& name) const {
    const TensorInfo* info = file->Find(std::to_string(layer) + "." + name);
    REQUIRE(info != nullptr);
    std::vector<T> values(info->bytes / sizeof(T));
    REQUIRE(file->Read(*info, 0, {reinterpret_cast<uint8_t*>(values.data()), info->bytes}).ok());
    return values;
  }

  std::unique_ptr<SafetensorsFile> file;
};

std::vector<std::string> Folders() {
  std::vector<std::string> folders;
  const char* more = std::getenv("MOED_MODELS");
  for (const std::string& parent : {std::string("tests/data"), std::string(more == nullptr ? "" : more)}) {
    if (parent.empty()) continue;
    for (const fs::directory_entry& entry : fs::directory_iterator(parent)) {
      if (fs::exists(entry.path() / "golden.safetensors")) folders.push_back(entry.path().string());
    }
  }
  return folders;
}

std::unique_ptr<Engine> LoadEngine(const std::string& folder, const std::string& policy, int64_t max_tokens = 8192) {
  EngineOptions options;
  options.threads = 2;
  options.device = ThisDevice();
  options.policy = *Policy::Parse(policy);
  options.max_tokens = max_tokens;
  auto engine = std::make_unique<Engine>(options, LinkedBackends());
  const absl::Status planned = engine->Plan("m", folder);
  INFO(planned.ToString());
  REQUIRE(planned.ok());
  const absl::Status loaded = engine->Load("m", {});
  INFO(loaded.ToString());
  REQUIRE(loaded.ok());
  return engine;
}

// Rows whose routing hangs on a gap below 1e-3 may differ from the golden; they are left out where ids differ.
int CountDifferingRows(const ForwardInfo& info, const std::vector<int32_t>& want, int64_t rows, std::vector<bool>* differs) {
  const size_t k = want.size() / static_cast<size_t>(rows);
  int count = 0;
  for (int64_t row = 0; row < rows; ++row) {
    std::vector<int32_t> a(info.ids.begin() + row * k, info.ids.begin() + (row + 1) * k);
    std::vector<int32_t> b(want.begin() + row * k, want.begin() + (row + 1) * k);
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    (*differs)[row] = a != b;
    count += a != b;
  }
  return count;
}

// What a layer's routed output is held to: the golden of its scheme, and the bound. Where activations are quantized, another
// order of additions may move a value over a rounding border, so only the reference is held to 1e-4 there; a scheme without a
// golden of its own (its activation scale spans the request) is compared with unquantized activations.
struct Target {
  std::string name = "y";
  double bound = 1e-4;
};

Target TargetOf(const Golden& golden, const LayerStatus& layer, bool reference) {
  if (layer.executed_scheme.find("16-bit activations") != std::string::npos) return {};
  if (!golden.Has(layer.layer, "y_q")) return {"y", 0.10};
  if (reference) return {"y_q", 1e-4};
  const bool fp4 = layer.executed_scheme.find("fp4 dynamic") != std::string::npos;
  const bool fp8 = layer.executed_scheme.find("fp8 dynamic") != std::string::npos ||
                   layer.executed_scheme.find("fp8 static") != std::string::npos;
  return {"y_q", fp4 ? 0.10 : fp8 ? 0.06 : 0.02};
}

void CheckFolder(const std::string& folder, const std::string& policy) {
  INFO(folder << " " << policy);
  const Golden golden(folder);
  std::unique_ptr<Engine> engine = LoadEngine(folder, policy);
  const ModelStatus status = engine->Status()[0];
  for (const LayerStatus& layer : status.layers) {
    const std::vector<uint16_t> x = golden.Read<uint16_t>(layer.layer, "x");
    const std::vector<int32_t> ids = golden.Read<int32_t>(layer.layer, "topk_ids");
    const std::vector<float> weights = golden.Read<float>(layer.layer, "topk_weights");
    const Target target = TargetOf(golden, layer, policy == "require:reference");
    const std::vector<float> y = golden.Read<float>(layer.layer, target.name);
    std::vector<float> block = golden.Read<float>(layer.layer, "y_block");
    const int64_t hidden = status.hidden, rows = static_cast<int64_t>(x.size()) / hidden;
    std::vector<float> out(y.size());
    const MutableTensorView view = {out.data(), DType::kF32, rows, hidden};

    ForwardCall call;
    call.layer = layer.layer;
    call.hidden = {x.data(), DType::kBf16, rows, hidden};
    call.routing = RoutingByIds{static_cast<int>(ids.size() / rows), ids, weights};
    call.routed_only = true;
    ForwardInfo info;
    REQUIRE(engine->Forward("m", call, view, &info).ok());
    const testing::Judgement routed = testing::Judge(out, y, hidden, target.bound);
    INFO("layer " << layer.layer << ", " << layer.executed_scheme << ": " << routed.reason);
    CHECK(routed.passed);
    CHECK(info.backend == layer.backend);
    if (target.name != "y" || target.bound != 1e-4) continue;  // y_block has unquantized activations

    call.routing = RoutingByGate{};
    call.routed_only = false;
    info.want_routing = true;
    REQUIRE(engine->Forward("m", call, view, &info).ok());
    std::vector<bool> differs(rows);
    CHECK(CountDifferingRows(info, ids, rows, &differs) <= 1);
    for (int64_t row = 0; row < rows; ++row) {
      if (differs[row]) std::memcpy(&block[row * hidden], &out[row * hidden], hidden * sizeof(float));
    }
    const testing::Judgement judgement = testing::Judge(out, block, hidden, target.bound);
    INFO("layer " << layer.layer << ": " << judgement.reason);
    CHECK(judgement.passed);
  }
}

}  // namespace

TEST_CASE("There are at least three checkpoints to test with") { CHECK(Folders().size() >= 3); }

TEST_CASE("The reference agrees with every golden output") {
  for (const std::string& folder : Folders()) CheckFolder(folder, "require:reference");
}

TEST_CASE("The automatic choice agrees with every golden output") {
  for (const std::string& folder : Folders()) CheckFolder(folder, "auto");
}

TEST_CASE("The portable backend agrees with every golden output") {
  for (const std::string& folder : Folders()) CheckFolder(folder, "require:cpu_generic");
}

TEST_CASE("A call in chunks gives the bits of a call at once") {
  for (const std::string& folder : Folders()) {
    if (folder.find("quark-int4-fp8") != std::string::npos) continue;  // its scale spans the request: never in chunks
    const Golden golden(folder);
    std::unique_ptr<Engine> whole = LoadEngine(folder, "auto"), chunked = LoadEngine(folder, "auto", 5);
    const int layer = whole->Status()[0].layers[0].layer;
    const std::vector<uint16_t> x = golden.Read<uint16_t>(layer, "x");
    const int64_t hidden = whole->Status()[0].hidden, rows = static_cast<int64_t>(x.size()) / hidden;
    ForwardCall call;
    call.layer = layer;
    call.hidden = {x.data(), DType::kBf16, rows, hidden};
    std::vector<uint16_t> a(x.size()), b(x.size());
    ForwardInfo info;
    REQUIRE(whole->Forward("", call, {a.data(), DType::kBf16, rows, hidden}, &info).ok());
    REQUIRE(chunked->Forward("", call, {b.data(), DType::kBf16, rows, hidden}, &info).ok());
    CHECK(a == b);
  }
}

TEST_CASE("The self-check passes on every checkpoint") {
  for (const std::string& folder : Folders()) {
    std::unique_ptr<Engine> engine = LoadEngine(folder, "auto");
    const absl::StatusOr<std::vector<SelfCheckRow>> rows = engine->SelfCheck("", -1, 8, 7);
    REQUIRE(rows.ok());
    CHECK(rows->size() == engine->Status()[0].layers.size());
    for (const SelfCheckRow& row : *rows) {
      CHECK(row.passed);
      CHECK(row.backend != "reference");
      if (row.bound != 0.01) continue;  // products of quantized activations can be exact, or off by a code
      CHECK(row.max_rel > 0.0);
      CHECK(row.max_rel < 1e-4);
    }
  }
}

}  // namespace moed
