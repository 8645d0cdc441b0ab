// ModelOpt: one algorithm by name for all linear modules but a list of globs, or with MIXED_PRECISION one for each listed
// module. The description is quantization_config itself, or, in the side file, the object "quantization" in it.
#include <algorithm>
#include <cctype>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_schemes.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr char kServed[] =
    "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, NVFP4_AWQ, W4A16_NVFP4, MXFP8, MIXED_PRECISION";

class ModelOptConfig : public QuantConfig {
 public:
  std::string Method() const override { return "modelopt"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical()) || excluded.Has(query)) return DeclaredScheme{};
    if (!mixed) return general.For(module);
    // Experts may be listed one by one or by what contains them: the nearest entry counts.
    for (const std::string& name : WithContainers(query.canonical())) {
      const auto layer = layers.find(name);
      if (layer != layers.end()) return layer->second.For(module);
    }
    for (const auto& [glob, declaration] : patterns) {
      if (glob.Matches(query)) return declaration.For(module);
    }
    return DeclaredScheme{};
  }

  bool mixtral_names = false;
  NameList excluded;
  bool mixed = false;
  Declaration general;                                       // unless mixed
  std::unordered_map<std::string, Declaration> layers;       // canonical
  std::vector<std::pair<ModuleGlob, Declaration>> patterns;  // sorted by their text
};

void DeclareFp8(const std::string& algorithm, DeclaredScheme* scheme) {
  const ElementType fp8 = ElementType::kFp8E4m3;
  if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
    *scheme = ByteWeights(fp8, {1, 0});
    scheme->linear.input = DynamicInput(fp8, {1, 0});
  } else if (algorithm == "FP8_PB_WO") {
    *scheme = ByteWeights(fp8, {128, 128});
  } else {
    *scheme = ByteWeights(fp8, {0, 0});
    scheme->linear.input = StaticInput(fp8);
  }
}

// One algorithm from `reader`, whose keys are quant_algo and group_size.
Declaration DeclareAlgorithm(ConfigReader* reader) {
  Declaration out;
  const std::string key = reader->where() + "quant_algo";
  if (!reader->Has("quant_algo")) reader->Fail("quant_algo", absl::StrCat("one of ", kServed));
  std::string name = reader->StringOr("quant_algo", "");
  const std::string shown = Quoted(name);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  int64_t group = 0;
  if (name == "FP8" || name == "FP8_PER_CHANNEL_PER_TOKEN" || name == "FP8_PB_WO") {
    DeclareFp8(name, &out.scheme);
    if (name == "FP8_PB_WO") group = 128;
  } else if (name == "NVFP4" || name == "NVFP4_AWQ" || name == "W4A16_NVFP4") {
    out.scheme = NvFp4Weights(GlobalScale::kMultiplier);
    if (name != "W4A16_NVFP4") out.scheme.linear.input = NvFp4Input();
    group = 16;
  } else if (name == "MXFP8") {
    out.scheme = MxWeights(ElementType::kFp8E4m3);
    out.scheme.linear.input = MxInput(ElementType::kFp8E4m3, ScaleRule::kMxCeil);
    group = 32;
  } else if (name == "W4A8_MXFP4_FP8") {
    // Its weights are plain MXFP4, but its files say of the FP8 activations neither a scale nor what one would span.
    out.Refuse(key, absl::StrCat(shown, ", whose files do not tell the scales of its FP8 activations,"), kServed);
  } else {
    out.Refuse(key, shown, kServed);
  }
  const int64_t given = reader->IntOr("group_size", group, -1, 1 << 20);
  if (group > 0 && given != group && given > 0) {
    out.Refuse(reader->where() + "group_size", absl::StrCat(given, " with quant_algo ", shown), absl::StrCat(group));
  }
  return out;
}

absl::Status ParseLayers(ConfigReader* reader, ModelOptConfig* config) {
  const json* layers = reader->Find("quantized_layers");
  if (layers == nullptr || !layers->is_object()) {
    reader->Fail("quantized_layers", "an object of modules, for MIXED_PRECISION");
    return reader->status();
  }
  for (const auto& [name, fields] : layers->items()) {
    const std::string where = absl::StrCat(reader->where(), "quantized_layers[\"", name, "\"]");
    if (!fields.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": wanted an object, got ", Shown(fields)));
    }
    ConfigReader own(fields, where + ".");
    Declaration declaration = DeclareAlgorithm(&own);
    if (!own.status().ok()) return own.status();
    if (!HasWildcard(name)) {
      config->layers.emplace(CanonicalModule(name), std::move(declaration));
      continue;
    }
    auto glob = ModuleGlob::Compile(name);
    if (!glob.ok()) return absl::InvalidArgumentError(absl::StrCat(where, ": ", std::string(glob.status().message())));
    config->patterns.emplace_back(*std::move(glob), std::move(declaration));
  }
  return absl::OkStatus();
}

bool IsMixed(const json& description) {
  const auto algorithm = description.find("quant_algo");
  return algorithm != description.end() && (*algorithm == "MIXED_PRECISION" || *algorithm == "mixed_precision");
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseModelOptConfig(const QuantSource& source, const json& description) {
  ConfigReader outer(description, source.where);
  const json* nested = outer.Find("quantization");
  if (nested != nullptr && !nested->is_object()) outer.Fail("quantization", "an object");
  if (!outer.status().ok()) return outer.status();
  auto config = std::make_shared<ModelOptConfig>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(nested != nullptr ? *nested : description, source.where + (nested != nullptr ? "quantization." : ""));
  for (const char* key : {"exclude_modules", "ignore"}) {
    if (auto status = AddEntries(source, &reader, key, &NameList::AddGlob, &config->excluded); !status.ok()) return status;
  }
  config->mixed = IsMixed(nested != nullptr ? *nested : description);
  if (config->mixed) {
    if (auto status = ParseLayers(&reader, config.get()); !status.ok()) return status;
  } else {
    config->general = DeclareAlgorithm(&reader);
  }
  if (!reader.status().ok()) return reader.status();
  return QuantConfigPtr(config);
}

}  // namespace moed
