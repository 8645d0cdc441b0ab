// check, and the explain command around the report of //engine:explain.
#include "server/commands.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "engine/device_json.h"
#include "engine/engine.h"
#include "engine/text_file.h"
#include "kernels/backends.h"
#include "nlohmann/json.hpp"
#include "server/recorder.h"
#include "server/security.h"
#include "server/setup.h"
#include "server/size_text.h"

namespace moed {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMaxDeviceFile = 1 << 20;

Json LayerJson(const LayerExplanation& layer) {
  Json backends = Json::array();
  for (const BackendVerdict& verdict : layer.backends) {
    Json reasons = Json::array();
    for (const Reason& reason : verdict.verdict.reasons) reasons.push_back({{"code", reason.code}, {"text", reason.text}});
    backends.push_back({{"name", verdict.name}, {"ok", verdict.verdict.ok()}, {"reasons", std::move(reasons)}});
  }
  return {{"layer", layer.layer},
          {"scheme", layer.scheme},
          {"choice", layer.choice},
          {"bytes", layer.bytes},
          {"workspace_bytes", layer.workspace_bytes},
          {"note", layer.note},
          {"shared_scheme", layer.shared_scheme},
          {"shared_choice", layer.shared_choice},
          {"backends", std::move(backends)}};
}

// Equal but for the layer's number.
bool SameExplanation(const LayerExplanation& a, const LayerExplanation& b) {
  Json left = LayerJson(a), right = LayerJson(b);
  left.erase("layer");
  right.erase("layer");
  return left == right;
}

std::string LayerText(const LayerExplanation& layer, int last) {
  std::string text = last > layer.layer ? absl::StrCat("layers ", layer.layer, "-", last) : absl::StrCat("layer ", layer.layer);
  absl::StrAppend(&text, ": ", layer.scheme, "\n  ", layer.choice.empty() ? "NO BACKEND" : layer.choice);
  if (!layer.choice.empty()) {
    absl::StrAppend(&text, ", ", SizeText(layer.bytes), last > layer.layer ? " each" : "", " and a workspace of ",
                    SizeText(layer.workspace_bytes));
  }
  absl::StrAppend(&text, "\n");
  if (!layer.note.empty()) absl::StrAppend(&text, "  note: ", layer.note, "\n");
  if (!layer.shared_scheme.empty()) {
    absl::StrAppend(&text, "  shared expert: ", layer.shared_scheme, ": ",
                    layer.shared_choice.empty() ? "NO BACKEND" : layer.shared_choice, "\n");
  }
  for (const BackendVerdict& verdict : layer.backends) {
    absl::StrAppend(&text, absl::StrFormat("    %-18s ", verdict.name), verdict.verdict.ok() ? "ok" : "no", "\n");
    for (const Reason& reason : verdict.verdict.reasons) absl::StrAppend(&text, "      ", reason.code, ": ", reason.text, "\n");
  }
  return text;
}

absl::StatusOr<ExplainReport> MakeReport(const ExplainOptions& options) {
  absl::StatusOr<DeviceInfo> device = ReadDevice(options.device);
  if (!device.ok()) return device.status();
  MaskFeatures(options.masked_features, &device->isa);
  MaskGpu(options.gpu, &*device);
  const std::vector<const Backend*> backends = LinkedBackends();
  absl::StatusOr<Policy> policy = ReadPolicy(options.policy, backends);
  if (!policy.ok()) return policy.status();
  return ExplainCheckpoint(options.path, *device, backends, *policy, ReadActivations(options.activations), options.layer,
                           options.max_tokens, options.lanes);
}

}  // namespace

absl::StatusOr<DeviceInfo> ReadDevice(const std::string& text) {
  if (text == "this") return LinkedDevice();
  const std::vector<std::string> names = BuiltInDeviceNames();
  if (std::find(names.begin(), names.end(), text) != names.end()) return BuiltInDevice(text);
  std::error_code error;
  if (!std::filesystem::exists(text, error)) {
    std::string list;
    for (const std::string& name : names) absl::StrAppend(&list, name, ", ");
    return absl::NotFoundError(absl::StrCat("--device: wanted ", list, "or a JSON file, got '", text, "'"));
  }
  absl::StatusOr<std::string> json = ReadTextFile(text, kMaxDeviceFile);
  if (!json.ok()) return json.status();
  absl::StatusOr<DeviceInfo> device = DeviceFromJson(*json);
  if (device.ok()) return device;
  return absl::Status(device.status().code(), absl::StrCat("--device ", text, ": ", device.status().message()));
}

bool EverythingFits(const ExplainReport& report) {
  const auto has_backend = [](const LayerExplanation& layer) {
    return !layer.choice.empty() && (layer.shared_scheme.empty() || !layer.shared_choice.empty());
  };
  return report.fits && std::all_of(report.layers.begin(), report.layers.end(), has_backend);
}

std::string ExplainJson(const ExplainReport& report) {
  Json layers = Json::array();
  for (const LayerExplanation& layer : report.layers) layers.push_back(LayerJson(layer));
  const Json document = {{"device", report.device}, {"layers", std::move(layers)}, {"fits", EverythingFits(report)}};
  return document.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ExplainText(const ExplainReport& report) {
  std::string text = absl::StrCat("device ", report.device, "\n");
  for (size_t i = 0; i < report.layers.size();) {
    size_t last = i;
    while (last + 1 < report.layers.size() && report.layers[last + 1].layer == report.layers[last].layer + 1 &&
           SameExplanation(report.layers[i], report.layers[last + 1])) {
      ++last;
    }
    absl::StrAppend(&text, LayerText(report.layers[i], report.layers[last].layer));
    i = last + 1;
  }
  const MemoryNeed::Part &host = report.need.host, &gpu = report.need.gpu;
  if (gpu != MemoryNeed::Part()) {
    absl::StrAppend(&text, "on the GPU: weights ", SizeText(gpu.weights), ", workspace ", SizeText(gpu.workspace), " for each of ",
                    report.lanes, " lanes\n");
  }
  absl::StrAppend(&text, "weights ", SizeText(host.weights), ", workspace ", SizeText(host.workspace), ": ",
                  EverythingFits(report) ? "fits" : "DOES NOT FIT", "\n");
  return text;
}

int RunExplain(const ExplainOptions& options) {
  absl::StatusOr<ExplainReport> report = MakeReport(options);
  if (!report.ok()) return ReportFailure(report.status());
  std::fputs((options.json ? ExplainJson(*report) : ExplainText(*report)).c_str(), stdout);
  return EverythingFits(*report) ? 0 : 1;
}

int RunCheck(const ServeOptions& options) {
  absl::Status checked = CheckSecurity(options);
  if (checked.ok() && !options.record.empty()) checked = CheckRecordFolder(options.record);
  if (!checked.ok()) return ReportFailure(checked);
  absl::StatusOr<std::unique_ptr<Engine>> engine = SetUpEngine(options);
  if (!engine.ok()) return ReportFailure(engine.status());
  for (const ModelStatus& model : (*engine)->Status()) {
    std::printf("model '%s': %zu MoE layers, %d experts, %s\n", model.name.c_str(), model.layers.size(), model.num_experts,
                model.path.c_str());
  }
  std::puts("ok");
  return 0;
}

}  // namespace moed
