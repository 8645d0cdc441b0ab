#include "engine/device_json.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/json_text.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr int64_t kMaxBytes = int64_t{1} << 50;

std::string Join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) absl::StrAppend(&text, text.empty() ? "" : ", ", name);
  return text;
}

absl::Status RefuseUnknownKeys(const json& object, const std::string& where, const std::vector<std::string>& known) {
  for (const auto& item : object.items()) {
    if (std::find(known.begin(), known.end(), item.key()) != known.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat(where, item.key(), ": unknown key; valid keys: ", Join(known)));
  }
  return absl::OkStatus();
}

void ReadIsa(ConfigReader* reader, IsaFlags* isa) {
  for (const std::string& name : reader->StringsOrEmpty("isa")) {
    const auto& flags = IsaFlagNames();
    const auto at = std::find_if(flags.begin(), flags.end(), [&](const IsaFlagName& flag) { return name == flag.name; });
    if (at != flags.end()) {
      isa->*(at->flag) = true;
      continue;
    }
    std::vector<std::string> valid;
    for (const IsaFlagName& flag : flags) valid.push_back(flag.name);
    reader->Fail("isa", absl::StrCat("flags out of ", Join(valid)));
  }
}

// "9.0": one or two digits, a point, one digit.
bool ParseCapability(const std::string& text, DeviceInfo* device) {
  const size_t point = text.find('.');
  if (point == std::string::npos || point == 0 || point > 2 || text.size() != point + 2) return false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (i != point && (text[i] < '0' || text[i] > '9')) return false;
  }
  for (size_t i = 0; i < point; ++i) device->cuda_major = device->cuda_major * 10 + (text[i] - '0');
  device->cuda_minor = text[point + 1] - '0';
  return true;
}

absl::Status ReadGpu(const json& object, DeviceInfo* device) {
  constexpr char kWhere[] = "device: gpu.";
  auto status = RefuseUnknownKeys(object, kWhere, {"compute_capability", "multiprocessors", "free_bytes"});
  if (!status.ok()) return status;
  ConfigReader reader(object, kWhere);
  device->has_gpu = true;
  if (!ParseCapability(reader.StringOr("compute_capability", ""), device)) {
    reader.Fail("compute_capability", "a string such as \"9.0\"");
  }
  device->gpu_multiprocessors = static_cast<int>(reader.Int("multiprocessors", 1, 65535));
  device->gpu_free_bytes = static_cast<uint64_t>(reader.Int("free_bytes", 0, kMaxBytes));
  return reader.status();
}

}  // namespace

absl::StatusOr<DeviceInfo> DeviceFromJson(const std::string& text) {
  const auto document = ParseJson(text, "device");
  if (!document.ok()) return document.status();
  constexpr char kWhere[] = "device: ";
  auto status = RefuseUnknownKeys(document->root, kWhere, {"name", "isa", "cores", "memory_bytes", "gpu"});
  if (!status.ok()) return status;
  ConfigReader reader(document->root, kWhere);
  DeviceInfo device;
  device.name = reader.StringOr("name", "device");
  ReadIsa(&reader, &device.isa);
  device.cores = static_cast<int>(reader.IntOr("cores", 1, 1, 65535));
  device.memory_bytes = static_cast<uint64_t>(reader.IntOr("memory_bytes", 0, 0, kMaxBytes));
  const json* gpu = reader.Find("gpu");
  if (gpu != nullptr && !gpu->is_object()) reader.Fail("gpu", "an object or null");
  if (!reader.status().ok()) return reader.status();
  if (gpu != nullptr) {
    if (status = ReadGpu(*gpu, &device); !status.ok()) return status;
  }
  return device;
}

}  // namespace moed
