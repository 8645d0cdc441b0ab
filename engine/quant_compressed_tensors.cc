// compressed-tensors: groups of modules by targets, each with a scheme, and a list of modules that no group applies to.
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_compressed_args.h"
#include "engine/quant_config.h"
#include "engine/quant_schemes.h"

namespace moed {
namespace {

using nlohmann::json;

struct Group {
  NameList targets;
  bool quantizes = false;  // it has a scheme
  Declaration declaration;
};

class CompressedTensorsConfig : public QuantConfig {
 public:
  std::string Method() const override { return "compressed-tensors"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical())) return DeclaredScheme{};
    if (ignore.Find(query) != NameList::Match::kNone) return DeclaredScheme{};
    const Group* best = nullptr;
    NameList::Match best_match = NameList::Match::kNone;
    for (const Group& group : groups) {
      const NameList::Match match = group.targets.Find(query);
      if (match > best_match) {
        best = &group;
        best_match = match;
      }
    }
    if (best == nullptr || !best->quantizes) return DeclaredScheme{};
    return best->declaration.For(module);
  }

  NameList ignore;
  std::vector<Group> groups;  // in the order of the file: among equally strong targets the first wins
  bool mixtral_names = false;
};

// An object, or null when the key is absent or null.
const json* ObjectOrNull(ConfigReader* reader, const std::string& key) {
  const json* value = reader->Find(key);
  if (value != nullptr && !value->is_object()) reader->Fail(key, "an object or null");
  return value;
}

absl::StatusOr<Group> ParseGroup(const QuantSource& source, const json& object, const std::string& where,
                                 const std::string& global_format) {
  Group group;
  ConfigReader reader(object, where);
  if (!reader.Has("targets")) reader.Fail("targets", "a list of strings");
  if (auto status = AddEntries(source, &reader, "targets", &NameList::Add, &group.targets); !status.ok()) return status;
  const std::string format = reader.StringOr("format", global_format);
  const json* weights = ObjectOrNull(&reader, "weights");
  const json* input = ObjectOrNull(&reader, "input_activations");
  const json* output = ObjectOrNull(&reader, "output_activations");
  if (!reader.status().ok()) return reader.status();
  group.quantizes = weights != nullptr || input != nullptr || output != nullptr;
  Declaration* const declaration = &group.declaration;
  if (output != nullptr) declaration->Refuse(where + "output_activations", Shown(*output), "null");
  if (weights == nullptr) {
    if (input != nullptr) declaration->Refuse(where + "weights", "null with quantized activations", "an object");
    return group;
  }
  if (auto status = DeclareCompressedWeights(*weights, where, format, declaration); !status.ok()) return status;
  if (input != nullptr) {
    if (auto status = DeclareCompressedInput(*input, where, format, declaration); !status.ok()) return status;
  }
  return group;
}

// Keys that change what every weight means.
void CheckWholeFile(ConfigReader* reader) {
  const json* transform = reader->Find("transform_config");
  if (transform != nullptr && !transform->empty()) {
    reader->Fail("transform_config", "null or {} (rotations are not supported)");
  }
  const json* sparsity = reader->Find("sparsity_config");
  if (sparsity == nullptr || sparsity->empty()) return;
  const bool dense = sparsity->is_object() && sparsity->contains("format") && (*sparsity)["format"] == "dense";
  if (!dense) reader->Fail("sparsity_config", "null, {} or the format \"dense\" (sparse weights are not supported)");
}

absl::Status ParseGroups(const QuantSource& source, const json& groups, const std::string& global_format,
                         CompressedTensorsConfig* config) {
  for (const std::string& name : KeysInOrder(source, "config_groups")) {
    const std::string where = absl::StrCat(source.where, "config_groups.", name);
    const json& object = groups[name];
    if (!object.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": wanted an object, got ", Shown(object)));
    }
    auto group = ParseGroup(source, object, where + ".", global_format);
    if (!group.ok()) return group.status();
    config->groups.push_back(*std::move(group));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseCompressedTensorsConfig(const QuantSource& source, const json& description) {
  auto config = std::make_shared<CompressedTensorsConfig>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  CheckWholeFile(&reader);
  const std::string format = reader.StringOr("format", "");
  if (auto status = AddEntries(source, &reader, "ignore", &NameList::Add, &config->ignore); !status.ok()) return status;
  const json* groups = reader.Find("config_groups");
  if (groups == nullptr || !groups->is_object()) reader.Fail("config_groups", "an object of groups");
  if (!reader.status().ok()) return reader.status();
  if (auto status = ParseGroups(source, *groups, format, config.get()); !status.ok()) return status;
  return QuantConfigPtr(config);
}

}  // namespace moed
