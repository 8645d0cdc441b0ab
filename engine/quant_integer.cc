#include "engine/quant_integer.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {

using nlohmann::json;

void IntegerOverride::ApplyTo(IntegerSettings* settings) const {
  if (bits) settings->bits = *bits;
  if (group_size) settings->group_size = *group_size;
  if (symmetric) settings->symmetric = *symmetric;
  if (act_order) settings->act_order = *act_order;
  if (static_groups) settings->static_groups = *static_groups;
}

int64_t ReadGroupSize(ConfigReader* reader, const std::string& key, int64_t fallback) {
  const int64_t size = reader->IntOr(key, fallback, -1, 1 << 20);
  if (size == 0) reader->Fail(key, "-1 or a positive integer");
  return size;
}

IntegerOverride ReadOverride(ConfigReader* reader) {
  IntegerOverride fields;
  const std::string& where = reader->where();
  if (reader->Has("bits")) fields.bits = {reader->Int("bits", 1, 32), where + "bits"};
  if (reader->Has("group_size")) fields.group_size = {ReadGroupSize(reader, "group_size", -1), where + "group_size"};
  if (reader->Has("sym")) fields.symmetric = {reader->BoolOr("sym", true), where + "sym"};
  if (reader->Has("desc_act")) fields.act_order = {reader->BoolOr("desc_act", false), where + "desc_act"};
  if (reader->Has("static_groups")) fields.static_groups = reader->BoolOr("static_groups", false);
  return fields;
}

absl::Status DynamicRules::AddRule(const QuantSource& source, const std::string& name, const json& fields) {
  const std::string key = absl::StrCat(source.where, "dynamic[\"", name, "\"]");
  if (!fields.is_object()) return absl::InvalidArgumentError(absl::StrCat(key, ": wanted an object, got ", Shown(fields)));
  Rule rule;
  rule.excluded = name.rfind("-:", 0) == 0;
  const bool prefixed = rule.excluded || name.rfind("+:", 0) == 0;
  auto pattern = Pattern::Compile(prefixed ? name.substr(2) : name, source.patterns.get());
  if (!pattern.ok()) return absl::InvalidArgumentError(absl::StrCat(key, ": ", std::string(pattern.status().message())));
  rule.pattern = *std::move(pattern);
  ConfigReader reader(fields, key + ".");
  rule.fields = ReadOverride(&reader);
  for (const char* fixed : {"format", "checkpoint_format", "pack_dtype"}) {
    if (reader.Has(fixed)) reader.Fail(fixed, "no exception from the whole file's value");
  }
  if (!reader.status().ok()) return reader.status();
  rules_.push_back(std::move(rule));
  return absl::OkStatus();
}

absl::Status DynamicRules::Parse(const QuantSource& source, const json& description) {
  ConfigReader reader(description, source.where);
  const json* dynamic = reader.Find("dynamic");
  if (dynamic == nullptr) return absl::OkStatus();
  if (!dynamic->is_object()) reader.Fail("dynamic", "an object of patterns");
  if (!reader.status().ok()) return reader.status();
  for (const std::string& name : KeysInOrder(source, "dynamic")) {
    if (auto status = AddRule(source, name, (*dynamic)[name]); !status.ok()) return status;
  }
  return absl::OkStatus();
}

bool DynamicRules::Apply(const ModuleQuery& query, IntegerSettings* settings) const {
  for (const Rule& rule : rules_) {
    if (!query.Matches(rule.pattern)) continue;
    if (!rule.excluded) rule.fields.ApplyTo(settings);
    return !rule.excluded;
  }
  return true;
}

Declaration DeclareGptq(const IntegerSettings& settings, bool v2) {
  Declaration declaration;
  const int64_t bits = settings.bits.value;
  if (bits != 4 && bits != 8) declaration.Refuse(settings.bits.key, absl::StrCat(bits), "4, 8");
  DeclaredScheme& scheme = declaration.scheme;
  scheme.container = DeclaredScheme::Container::kGptq;
  scheme.gptq_v2 = v2;
  WeightScheme& weights = scheme.linear.weights;
  weights.element = bits == 8 ? ElementType::kInt8 : ElementType::kInt4;
  weights.group = InputGroup(settings.group_size.value);
  weights.zero_points = !settings.symmetric.value;
  // With one group per row, or with groups fixed beforehand, the order in which columns were quantized leaves no trace.
  weights.act_order = settings.act_order.value && settings.group_size.value != -1 && !settings.static_groups;
  return declaration;
}

Declaration DeclareAwq(const IntegerSettings& settings) {
  Declaration declaration;
  if (settings.bits.value != 4) declaration.Refuse(settings.bits.key, absl::StrCat(settings.bits.value), "4");
  if (settings.act_order.value) declaration.Refuse(settings.act_order.key, "true", "false: AWQ files have no g_idx");
  DeclaredScheme& scheme = declaration.scheme;
  scheme.container = DeclaredScheme::Container::kAwq;
  WeightScheme& weights = scheme.linear.weights;
  weights.element = ElementType::kInt4;
  weights.group = InputGroup(settings.group_size.value);
  weights.zero_points = !settings.symmetric.value;
  return declaration;
}

}  // namespace moed
