// AWQ: one set of properties for all linear modules but a list of exceptions; GPTQModel's files have its "dynamic" rules.
#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_integer.h"

namespace moed {
namespace {

using nlohmann::json;

class AwqConfig : public QuantConfig {
 public:
  std::string Method() const override { return "awq"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical()) || excluded.Has(query)) return DeclaredScheme{};
    IntegerSettings settings = general;
    if (!dynamic.Apply(query, &settings)) return DeclaredScheme{};
    return DeclareAwq(settings).For(module);
  }

  IntegerSettings general;
  bool mixtral_names = false;
  NameList excluded;
  DynamicRules dynamic;
};

// The layout has three keys: AutoAWQ's "version", and GPTQModel's "checkpoint_format" and "format". Missing: gemm.
void CheckLayout(ConfigReader* reader) {
  for (const char* key : {"version", "checkpoint_format", "format"}) {
    std::string layout = reader->StringOr(key, "gemm");
    std::transform(layout.begin(), layout.end(), layout.begin(), [](unsigned char c) { return std::tolower(c); });
    if (layout != "gemm") reader->Fail(key, "\"gemm\" (gemv, gemv_fast, marlin and other layouts are not supported)");
  }
  if (reader->StringOr("pack_dtype", "int32") != "int32") {
    reader->Fail("pack_dtype", "\"int32\" (other packings are not supported)");
  }
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseAwqConfig(const QuantSource& source, const json& description) {
  auto config = std::make_shared<AwqConfig>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  // Side files of AutoAWQ itself have the second names.
  const std::string bits = reader.Has("w_bit") && !reader.Has("bits") ? "w_bit" : "bits";
  const std::string group = reader.Has("q_group_size") && !reader.Has("group_size") ? "q_group_size" : "group_size";
  config->general.bits = {reader.Int(bits, 1, 32), source.where + bits};
  config->general.group_size = {ReadGroupSize(&reader, group, 0), source.where + group};
  config->general.symmetric = {!reader.BoolOr("zero_point", true), source.where + "zero_point"};
  config->general.act_order = {reader.BoolOr("desc_act", false), source.where + "desc_act"};
  CheckLayout(&reader);
  if (auto status = AddEntries(source, &reader, "modules_to_not_convert", &NameList::AddPart, &config->excluded); !status.ok()) {
    return status;
  }
  if (auto status = config->dynamic.Parse(source, description); !status.ok()) return status;
  return QuantConfigPtr(config);
}

}  // namespace moed
