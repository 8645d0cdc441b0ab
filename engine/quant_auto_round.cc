// AutoRound: the containers of GPTQ or AWQ, chosen by packing_format, with exceptions by name or pattern ("extra_config"),
// and optionally the blocks that are quantized at all.
#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_integer.h"

namespace moed {
namespace {

using nlohmann::json;

enum class Packing : uint8_t { kGptq, kGptqV2, kAwq };

// From 16 bits on the tool leaves a module as it is.
constexpr int64_t kUnquantizedBits = 16;

struct PatternOverride {
  Pattern pattern;
  IntegerOverride fields;
};

class AutoRoundConfig : public QuantConfig {
 public:
  std::string Method() const override { return "auto-round"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical()) || !InQuantizedBlock(query.canonical())) return DeclaredScheme{};
    IntegerSettings settings = general;
    if (const IntegerOverride* fields = Exception(query)) fields->ApplyTo(&settings);
    if (settings.bits.value >= kUnquantizedBits) return DeclaredScheme{};
    if (packing == Packing::kAwq) return DeclareAwq(settings).For(module);
    return DeclareGptq(settings, packing == Packing::kGptqV2).For(module);
  }

  IntegerSettings general;
  Packing packing = Packing::kGptq;
  bool mixtral_names = false;
  std::vector<std::string> blocks;  // "layers.0" or "layers"; empty: all
  std::unordered_map<std::string, IntegerOverride> by_name;  // canonical
  std::vector<PatternOverride> by_pattern;                   // in the order of the file

 private:
  bool InQuantizedBlock(const std::string& canonical) const {
    if (blocks.empty()) return true;
    for (const std::string& block : blocks) {
      if (canonical == block || canonical.rfind(block + ".", 0) == 0) return true;
    }
    return false;
  }

  const IntegerOverride* Exception(const ModuleQuery& query) const {
    const auto named = by_name.find(query.canonical());
    if (named != by_name.end()) return &named->second;
    for (const PatternOverride& exception : by_pattern) {
      if (query.Matches(exception.pattern)) return &exception.fields;
    }
    return nullptr;
  }
};

void ParsePacking(ConfigReader* reader, AutoRoundConfig* config) {
  const std::string packing = reader->StringOr("packing_format", "");
  if (packing == "auto_round:auto_gptq") {
    config->packing = Packing::kGptq;
  } else if (packing == "auto_round" || packing == "auto_round:gptqmodel") {
    config->packing = Packing::kGptqV2;
  } else if (packing == "auto_round:auto_awq") {
    config->packing = Packing::kAwq;
  } else {
    reader->Fail("packing_format",
                 "\"auto_round:auto_gptq\", \"auto_round:auto_awq\", \"auto_round\" or \"auto_round:gptqmodel\"");
  }
}

// "model.layers.0,model.layers.1" or a list of such; a name may also be that of all blocks, "model.layers".
void ParseBlocks(ConfigReader* reader, AutoRoundConfig* config) {
  const std::string key = "block_name_to_quantize";
  const json* value = reader->Find(key);
  if (value == nullptr) return;
  const std::vector<std::string> texts =
      value->is_string() ? std::vector<std::string>{value->get<std::string>()} : reader->StringsOrEmpty(key);
  for (const std::string& text : texts) {
    for (size_t at = 0; at <= text.size();) {
      const size_t comma = std::min(text.find(',', at), text.size());
      std::string name = text.substr(at, comma - at);
      at = comma + 1;
      name.erase(0, name.find_first_not_of(' '));
      name.erase(name.find_last_not_of(" .") + 1);
      const size_t layers = name.rfind("layers");
      if (!name.empty()) config->blocks.push_back(layers == std::string::npos ? name : name.substr(layers));
    }
  }
}

absl::Status AddException(const QuantSource& source, const std::string& name, const json& fields, AutoRoundConfig* config) {
  const std::string key = absl::StrCat(source.where, "extra_config[\"", name, "\"]");
  if (!fields.is_object()) return absl::InvalidArgumentError(absl::StrCat(key, ": wanted an object, got ", Shown(fields)));
  ConfigReader reader(fields, key + ".");
  IntegerOverride exception = ReadOverride(&reader);
  const bool quantizes = !exception.bits || exception.bits->value < kUnquantizedBits;
  if (quantizes && reader.StringOr("data_type", "int") != "int") reader.Fail("data_type", "\"int\"");
  if (!reader.status().ok()) return reader.status();
  if (name.find_first_of("*+?^$()[]{}|\\") == std::string::npos) {
    config->by_name.emplace(CanonicalModule(name), std::move(exception));
    return absl::OkStatus();
  }
  // The tool searches for the pattern anywhere in the name.
  auto pattern = Pattern::Compile(name.rfind(".*", 0) == 0 ? name : absl::StrCat(".*(?:", name, ")"),
                                  source.patterns.get());
  if (!pattern.ok()) return absl::InvalidArgumentError(absl::StrCat(key, ": ", std::string(pattern.status().message())));
  config->by_pattern.push_back({*std::move(pattern), std::move(exception)});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseAutoRoundConfig(const QuantSource& source, const json& description) {
  auto config = std::make_shared<AutoRoundConfig>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  ParsePacking(&reader, config.get());
  config->general.bits = {reader.Int("bits", 1, 32), source.where + "bits"};
  config->general.group_size = {ReadGroupSize(&reader, "group_size", 0), source.where + "group_size"};
  // The tool chooses AWQ's layout for asymmetric weights, and such files may leave the key out.
  config->general.symmetric = {reader.BoolOr("sym", config->packing != Packing::kAwq), source.where + "sym"};
  if (reader.StringOr("data_type", "int") != "int") reader.Fail("data_type", "\"int\"");
  if (reader.IntOr("act_bits", kUnquantizedBits, 1, 32) < kUnquantizedBits) {
    reader.Fail("act_bits", "16 (quantized activations are not supported)");
  }
  ParseBlocks(&reader, config.get());
  const json* exceptions = reader.Find("extra_config");
  if (exceptions != nullptr && !exceptions->is_object()) reader.Fail("extra_config", "an object of names and patterns");
  if (!reader.status().ok()) return reader.status();
  for (const std::string& name : KeysInOrder(source, "extra_config")) {
    if (auto status = AddException(source, name, (*exceptions)[name], config.get()); !status.ok()) return status;
  }
  return QuantConfigPtr(config);
}

}  // namespace moed
