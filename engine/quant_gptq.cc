// GPTQ: one set of properties for all linear modules, exceptions by pattern ("dynamic"), and optionally a list of the
// modules inside a block that are quantized at all.
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_integer.h"

namespace moed {
namespace {

using nlohmann::json;

class GptqConfig : public QuantConfig {
 public:
  std::string Method() const override { return "gptq"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical())) return DeclaredScheme{};
    if (!listed.empty() && listed.count(InsideBlock(query.canonical())) == 0) return DeclaredScheme{};
    IntegerSettings settings = general;
    if (!dynamic.Apply(query, &settings)) return DeclaredScheme{};
    return DeclareGptq(settings, v2).For(module);
  }

  IntegerSettings general;
  bool v2 = false;
  bool mixtral_names = false;
  DynamicRules dynamic;
  std::unordered_set<std::string> listed;  // canonical names inside a block; empty: all modules
};

// A list of names, or a list of lists of names: they differ in the order of quantization only.
void ParseListed(ConfigReader* reader, GptqConfig* config) {
  const std::string key = "modules_in_block_to_quantize";
  const json* lists = reader->Find(key);
  if (lists == nullptr) return;
  const std::string wanted = "a list of lists of module names";
  if (!lists->is_array()) return reader->Fail(key, wanted);
  for (const json& entry : *lists) {
    const json names = entry.is_array() ? entry : json::array({entry});
    for (const json& name : names) {
      if (!name.is_string()) return reader->Fail(key, wanted);
      config->listed.insert(InsideBlock(CanonicalModule(name.get<std::string>())));
    }
  }
}

// The version of the container: how zero points are stored.
void ParseFormat(ConfigReader* reader, GptqConfig* config) {
  const std::string format = reader->StringOr("checkpoint_format", reader->StringOr("format", "gptq"));
  if (format != "gptq" && format != "gptq_v2") {
    reader->Fail(reader->Has("checkpoint_format") ? "checkpoint_format" : "format",
                 "\"gptq\" or \"gptq_v2\" (other packings are not supported)");
  }
  if (reader->StringOr("format", format) != format) {
    reader->Fail("format", absl::StrCat("the same as checkpoint_format (\"", format, "\")"));
  }
  if (reader->BoolOr("is_marlin_format", false)) reader->Fail("is_marlin_format", "false (marlin is not supported)");
  if (reader->StringOr("pack_dtype", "int32") != "int32") {
    reader->Fail("pack_dtype", "\"int32\" (other packings are not supported)");
  }
  config->v2 = format == "gptq_v2";
}

// "static_groups" is a key of its own in older files and one of "meta" in newer ones.
bool StaticGroups(ConfigReader* reader) {
  const bool own = reader->BoolOr("static_groups", false);
  const json* meta = reader->Find("meta");
  if (meta == nullptr || !meta->is_object()) return own;
  ConfigReader meta_reader(*meta, reader->where() + "meta.");
  const bool in_meta = meta_reader.BoolOr("static_groups", false);
  if (!meta_reader.status().ok()) reader->Fail("meta", "static_groups true or false");
  return own || in_meta;
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseGptqConfig(const QuantSource& source, const json& description) {
  auto config = std::make_shared<GptqConfig>();
  ConfigReader reader(description, source.where);
  config->mixtral_names = source.mixtral_names;
  config->general.bits = {reader.Int("bits", 1, 32), source.where + "bits"};
  config->general.group_size = {ReadGroupSize(&reader, "group_size", 0), source.where + "group_size"};
  config->general.symmetric = {reader.BoolOr("sym", true), source.where + "sym"};
  config->general.act_order = {reader.BoolOr("desc_act", false), source.where + "desc_act"};
  config->general.static_groups = StaticGroups(&reader);
  ParseFormat(&reader, config.get());
  ParseListed(&reader, config.get());
  if (!reader.status().ok()) return reader.status();
  if (auto status = config->dynamic.Parse(source, description); !status.ok()) return status;
  return QuantConfigPtr(config);
}

}  // namespace moed
