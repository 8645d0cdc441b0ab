// Quark: a configuration for all layers, others by glob over names or by the type of a layer, and a list of exceptions.
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_quark_specs.h"
#include "engine/quant_schemes.h"

namespace moed {
namespace {

using nlohmann::json;

struct NamedDeclaration {
  NameList name;  // of one entry
  Declaration declaration;
};

class QuarkConfig : public QuantConfig {
 public:
  std::string Method() const override { return "quark"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical()) || excluded.Has(query)) return DeclaredScheme{};
    for (const NamedDeclaration& layer : layers) {
      if (layer.name.Has(query)) return layer.declaration.For(module);
    }
    return (linear ? *linear : general).For(module);
  }

  bool mixtral_names = false;
  NameList excluded;
  std::vector<NamedDeclaration> layers;  // in the order of the file
  std::optional<Declaration> linear;     // of the type Linear, which every module is that is asked for
  Declaration general;
};

// The object at `key`, or null when it is absent.
const json* Section(ConfigReader* reader, const std::string& key) {
  const json* section = reader->Find(key);
  if (section == nullptr || section->is_object()) return section;
  reader->Fail(key, "an object");
  return nullptr;
}

absl::StatusOr<Declaration> DeclareEntry(const json& layer, const std::string& where, const std::string& pack_method) {
  if (layer.is_object()) return DeclareQuarkLayer(layer, where + ".", pack_method);
  return absl::InvalidArgumentError(absl::StrCat(where, ": wanted an object, got ", Shown(layer)));
}

absl::Status ParseLayers(const QuantSource& source, const json& layers, const std::string& pack_method,
                         QuarkConfig* config) {
  for (const std::string& name : KeysInOrder(source, "layer_quant_config")) {
    const std::string where = absl::StrCat(source.where, "layer_quant_config[\"", name, "\"]");
    auto declaration = DeclareEntry(layers[name], where, pack_method);
    if (!declaration.ok()) return declaration.status();
    NamedDeclaration entry;
    if (auto status = entry.name.AddGlob(name, source.patterns.get()); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", std::string(status.message())));
    }
    entry.declaration = *std::move(declaration);
    config->layers.push_back(std::move(entry));
  }
  return absl::OkStatus();
}

// Types are class names, with or without a module path: "Linear", "<class 'torch.nn.modules.linear.Linear'>".
absl::Status ParseTypes(const QuantSource& source, const json& types, const std::string& pack_method,
                        QuarkConfig* config) {
  for (const auto& [type, layer] : types.items()) {
    const std::string name = type.substr(0, type.find_last_not_of("'>") + 1);
    if (name.substr(name.rfind('.') + 1) != "Linear") continue;
    const std::string where = absl::StrCat(source.where, "layer_type_quant_config[\"", type, "\"]");
    auto declaration = DeclareEntry(layer, where, pack_method);
    if (!declaration.ok()) return declaration.status();
    config->linear = *std::move(declaration);
  }
  return absl::OkStatus();
}

// How int4 codes are packed; checks that the file holds codes at all.
absl::StatusOr<std::string> ReadExport(const json* section, const std::string& where) {
  if (section == nullptr) return std::string("reorder");
  ConfigReader reader(*section, where + "export.");
  const std::string method = reader.StringOr("pack_method", "reorder");
  if (method != "reorder" && method != "order") reader.Fail("pack_method", "\"reorder\" or \"order\"");
  if (reader.StringOr("weight_format", "real_quantized") != "real_quantized") {
    reader.Fail("weight_format", "\"real_quantized\" (other formats hold no quantized weights)");
  }
  if (!reader.status().ok()) return reader.status();
  return method;
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseQuarkConfig(const QuantSource& source, const json& description) {
  auto config = std::make_shared<QuarkConfig>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  const json* general = Section(&reader, "global_quant_config");
  const json* layers = Section(&reader, "layer_quant_config");
  const json* types = Section(&reader, "layer_type_quant_config");
  const json* exported = Section(&reader, "export");
  if (general == nullptr) reader.Fail("global_quant_config", "an object");
  if (auto status = AddEntries(source, &reader, "exclude", &NameList::AddGlob, &config->excluded); !status.ok()) return status;
  const auto pack_method = ReadExport(exported, source.where);
  if (!pack_method.ok()) return pack_method.status();
  auto declaration = DeclareQuarkLayer(*general, source.where + "global_quant_config.", *pack_method);
  if (!declaration.ok()) return declaration.status();
  config->general = *std::move(declaration);
  if (layers != nullptr) {
    if (auto status = ParseLayers(source, *layers, *pack_method, config.get()); !status.ok()) return status;
  }
  if (types != nullptr) {
    if (auto status = ParseTypes(source, *types, *pack_method, config.get()); !status.ok()) return status;
  }
  return QuantConfigPtr(config);
}

}  // namespace moed
