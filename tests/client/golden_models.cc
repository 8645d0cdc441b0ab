#include "tests/client/golden_models.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "client/moed_client.h"
#include "engine/safetensors.h"

namespace moed::testing {
namespace {

constexpr char kData[] = "tests/data";

GoldenModel Describe(const std::string& path) {
  GoldenModel model{.name = std::filesystem::path(path).filename(), .path = path, .layers = {}};
  const auto file = SafetensorsFile::Open(model.GoldenFile());
  INFO(model.GoldenFile());
  REQUIRE(file.ok());
  for (const auto& [name, info] : (*file)->tensors()) {
    if (name.ends_with(".x")) model.layers.push_back(std::atoi(name.c_str()));
  }
  std::sort(model.layers.begin(), model.layers.end());
  REQUIRE(!model.layers.empty());
  return model;
}

std::vector<std::string> Folders(const std::string& path) {
  std::vector<std::string> folders;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (std::filesystem::exists(entry.path() / "golden.safetensors")) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

nlohmann::json Config(const GoldenModel& model) {
  std::ifstream file(model.path + "/config.json");
  nlohmann::json config = nlohmann::json::parse(file, nullptr, false);
  REQUIRE(config.is_object());
  return config;
}

// The distance between the count-th and the next of the values in descending order; infinite when there is no next.
double GapAfter(std::vector<double> values, size_t count) {
  if (count >= values.size()) return std::numeric_limits<double>::infinity();
  std::sort(values.begin(), values.end(), std::greater<>());
  return values[count - 1] - values[count];
}

// deepseek_v3: experts outside the best groups drop out. Lowers `gap` to the groups' own gap and returns the scores left.
std::vector<double> KeepGroups(const std::vector<double>& scores, size_t groups, size_t kept, double* gap) {
  const size_t size = scores.size() / groups;
  std::vector<std::pair<double, size_t>> ranked;
  for (size_t g = 0; g < groups; ++g) {
    std::vector<double> group(scores.begin() + g * size, scores.begin() + (g + 1) * size);
    std::sort(group.begin(), group.end(), std::greater<>());
    ranked.emplace_back(group[0] + (size > 1 ? group[1] : 0), g);
  }
  std::sort(ranked.begin(), ranked.end(), std::greater<>());
  if (kept < groups) *gap = std::min(*gap, ranked[kept - 1].first - ranked[kept].first);
  std::vector<double> left;
  for (size_t i = 0; i < kept; ++i) {
    const size_t g = ranked[i].second;
    left.insert(left.end(), scores.begin() + g * size, scores.begin() + (g + 1) * size);
  }
  return left;
}

// By how much the choice of one row is decided.
double RowGap(const nlohmann::json& config, const std::vector<float>& bias, const float* logits, size_t experts) {
  const std::string family = config["model_type"];
  const size_t k = config["num_experts_per_tok"];
  std::vector<double> scores(logits, logits + experts);
  if (family == "deepseek_v3") {
    for (size_t e = 0; e < experts; ++e) scores[e] = 1 / (1 + std::exp(-scores[e])) + bias[e];
    double gap = std::numeric_limits<double>::infinity();
    const std::vector<double> left = KeepGroups(scores, config["n_group"], config["topk_group"], &gap);
    return std::min(gap, GapAfter(left, k));
  }
  if (family != "gpt_oss") {
    double sum = 0;
    for (double& score : scores) sum += (score = std::exp(score));
    for (double& score : scores) score /= sum;
  }
  return GapAfter(scores, k);
}

}  // namespace

bool GoldenModel::Has(int layer, const std::string& tensor) const {
  const auto file = SafetensorsFile::Open(GoldenFile());
  REQUIRE(file.ok());
  return (*file)->Find(std::to_string(layer) + "." + tensor) != nullptr;
}

uint64_t GoldenModel::ExpertBytes(int layer) const {
  const std::string block = "layers." + std::to_string(layer) + ".";
  uint64_t bytes = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    if (entry.path().extension() != ".safetensors" || entry.path() == GoldenFile()) continue;
    const auto file = SafetensorsFile::Open(entry.path());
    REQUIRE(file.ok());
    for (const auto& [name, info] : (*file)->tensors()) {
      if (name.find(block) != std::string::npos && name.find("expert") != std::string::npos) bytes += info.bytes;
    }
  }
  REQUIRE(bytes > 0);
  return bytes;
}

std::vector<GoldenModel> GoldenModels() {
  std::vector<GoldenModel> models;
  for (const std::string& path : Folders(kData)) models.push_back(Describe(path));
  REQUIRE(!models.empty());
  const char* wide = std::getenv("MOED_MODELS");
  if (wide == nullptr || *wide == 0) return models;
  for (const std::string& path : Folders(wide)) {
    const std::string name = std::filesystem::path(path).filename();
    if (std::none_of(models.begin(), models.end(), [&](const GoldenModel& m) { return m.name == name; })) {
      models.push_back(Describe(path));
    }
  }
  return models;
}

GoldenModel CheckedInModel(const std::string& name) { return Describe(std::string(kData) + "/" + name); }

std::vector<int64_t> RowsDecidedByLess(const GoldenModel& model, int layer, double gap) {
  const nlohmann::json config = Config(model);
  const std::string prefix = std::to_string(layer) + ".";
  const GoldenTensor logits = ReadGolden(model.GoldenFile(), prefix + "router_logits");
  std::vector<float> bias;
  if (config["model_type"] == "deepseek_v3") {
    bias =
        ReadGolden(model.path + "/model.safetensors", "model.layers." + prefix + "mlp.gate.e_score_correction_bias").values;
  }
  const size_t experts = static_cast<size_t>(logits.shape.at(1));
  std::vector<int64_t> rows;
  for (int64_t row = 0; row < logits.shape[0]; ++row) {
    if (RowGap(config, bias, logits.values.data() + row * experts, experts) < gap) rows.push_back(row);
  }
  return rows;
}

std::string RowsText(const std::vector<int64_t>& rows) {
  std::string text;
  for (int64_t row : rows) text += (text.empty() ? "" : ",") + std::to_string(row);
  return text;
}

GoldenTensor ReadGolden(const std::string& path, const std::string& name) {
  INFO(path << " " << name);
  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  const TensorInfo* info = (*file)->Find(name);
  REQUIRE(info != nullptr);
  std::vector<uint8_t> bytes(info->bytes);
  REQUIRE((*file)->Read(*info, 0, bytes).ok());
  GoldenTensor tensor{.shape = info->shape, .values = {}};
  if (info->dtype == StDtype::kI32) {
    std::vector<int32_t> ids(bytes.size() / sizeof(int32_t));
    std::memcpy(ids.data(), bytes.data(), bytes.size());
    tensor.values.assign(ids.begin(), ids.end());
    return tensor;
  }
  REQUIRE((info->dtype == StDtype::kF32 || info->dtype == StDtype::kBf16));
  tensor.values = client::ToFloats(info->dtype == StDtype::kF32 ? client::DType::kF32 : client::DType::kBf16, bytes);
  return tensor;
}

}  // namespace moed::testing
