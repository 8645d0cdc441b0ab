// GPTQ: one set of properties for all linear modules, exceptions by pattern ("dynamic"), and optionally a list of the
// modules inside a block that are quantized at all.
#include <optional>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"

namespace moed {
namespace {

using nlohmann::json;

// A value and the key that it came from, for messages.
template <typename T>
struct Sourced {
  T value{};
  std::string key;
};

struct Settings {
  Sourced<int64_t> bits;
  Sourced<int64_t> group_size;  // -1: one group per row
  Sourced<bool> symmetric;
  Sourced<bool> act_order;
  bool static_groups = false;   // act-order with contiguous groups: the file looks as without act-order
};

// One entry of "dynamic". `fields` overrides what it sets.
struct Rule {
  Pattern pattern;
  bool excluded = false;  // "-:": not quantized
  std::optional<Sourced<int64_t>> bits;
  std::optional<Sourced<int64_t>> group_size;
  std::optional<Sourced<bool>> symmetric;
  std::optional<Sourced<bool>> act_order;
  std::optional<bool> static_groups;
};

absl::Status Unsupported(const std::string& key, const std::string& value, const std::string& module,
                         const std::string& served) {
  return absl::InvalidArgumentError(
      absl::StrCat(key, ": ", value, " is not supported for ", module, " (served: ", served, ")"));
}

class GptqConfig : public QuantConfig {
 public:
  std::string Method() const override { return "gptq"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical())) return DeclaredScheme{};
    if (!listed.empty() && listed.count(InsideBlock(query.canonical())) == 0) return DeclaredScheme{};
    Settings settings = general;
    for (const Rule& rule : rules) {
      if (!query.Matches(rule.pattern)) continue;
      if (rule.excluded) return DeclaredScheme{};
      Override(rule, &settings);
      break;  // the first that matches decides
    }
    return Declare(settings, module);
  }

  Settings general;
  bool v2 = false;
  bool mixtral_names = false;
  std::vector<Rule> rules;                 // in the order of the file
  std::unordered_set<std::string> listed;  // canonical names inside a block; empty: all modules

 private:
  static void Override(const Rule& rule, Settings* settings) {
    if (rule.bits) settings->bits = *rule.bits;
    if (rule.group_size) settings->group_size = *rule.group_size;
    if (rule.symmetric) settings->symmetric = *rule.symmetric;
    if (rule.act_order) settings->act_order = *rule.act_order;
    if (rule.static_groups) settings->static_groups = *rule.static_groups;
  }

  absl::StatusOr<DeclaredScheme> Declare(const Settings& settings, const std::string& module) const {
    if (settings.bits.value != 4) {
      return Unsupported(settings.bits.key, absl::StrCat(settings.bits.value), module, "4");
    }
    if (!settings.symmetric.value) return Unsupported(settings.symmetric.key, "false", module, "true");
    // With one group per row, or with groups fixed beforehand, the order in which columns were quantized leaves no trace.
    const bool scattered = settings.act_order.value && settings.group_size.value != -1 && !settings.static_groups;
    if (scattered) {
      return Unsupported(settings.act_order.key, absl::StrCat("true with group_size ", settings.group_size.value), module,
                         "false, or group_size -1, or static_groups true");
    }
    DeclaredScheme declared;
    declared.container = DeclaredScheme::Container::kGptq;
    declared.gptq_v2 = v2;
    WeightScheme& weights = declared.linear.weights;
    weights.element = ElementType::kInt4;
    weights.group = {1, settings.group_size.value == -1 ? 0 : static_cast<int32_t>(settings.group_size.value)};
    return declared;
  }
};

int64_t GroupSize(ConfigReader* reader) {
  const int64_t size = reader->IntOr("group_size", -1, -1, 1 << 20);
  if (size == 0) reader->Fail("group_size", "-1 or a positive integer");
  return size;
}

absl::StatusOr<Rule> ParseRule(const std::string& name, const json& fields, const std::string& where) {
  const std::string key = absl::StrCat(where, "dynamic[\"", name, "\"]");
  if (!fields.is_object()) return absl::InvalidArgumentError(absl::StrCat(key, ": wanted an object, got ", Shown(fields)));
  Rule rule;
  rule.excluded = name.rfind("-:", 0) == 0;
  auto pattern = Pattern::Compile(rule.excluded || name.rfind("+:", 0) == 0 ? name.substr(2) : name);
  if (!pattern.ok()) return absl::InvalidArgumentError(absl::StrCat(key, ": ", std::string(pattern.status().message())));
  rule.pattern = *std::move(pattern);
  ConfigReader reader(fields, key + ".");
  if (reader.Has("bits")) rule.bits = {reader.Int("bits", 1, 32), key + ".bits"};
  if (reader.Has("group_size")) rule.group_size = {GroupSize(&reader), key + ".group_size"};
  if (reader.Has("sym")) rule.symmetric = {reader.BoolOr("sym", true), key + ".sym"};
  if (reader.Has("desc_act")) rule.act_order = {reader.BoolOr("desc_act", false), key + ".desc_act"};
  if (reader.Has("static_groups")) rule.static_groups = reader.BoolOr("static_groups", false);
  for (const char* fixed : {"format", "checkpoint_format", "pack_dtype"}) {
    if (reader.Has(fixed)) reader.Fail(fixed, "no exception from the whole file's value");
  }
  if (!reader.status().ok()) return reader.status();
  return rule;
}

absl::Status ParseRules(const QuantSource& source, const json& dynamic, GptqConfig* config) {
  for (const std::string& name : KeysInOrder(source, "dynamic")) {
    auto rule = ParseRule(name, dynamic[name], source.where);
    if (!rule.ok()) return rule.status();
    config->rules.push_back(*std::move(rule));
  }
  return absl::OkStatus();
}

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
  if (!reader.Has("group_size")) reader.Fail("group_size", "-1 or a positive integer");
  config->general.group_size = {GroupSize(&reader), source.where + "group_size"};
  config->general.symmetric = {reader.BoolOr("sym", true), source.where + "sym"};
  config->general.act_order = {reader.BoolOr("desc_act", false), source.where + "desc_act"};
  config->general.static_groups = StaticGroups(&reader);
  ParseFormat(&reader, config.get());
  ParseListed(&reader, config.get());
  const json* dynamic = reader.Find("dynamic");
  if (dynamic != nullptr && !dynamic->is_object()) reader.Fail("dynamic", "an object of patterns");
  if (!reader.status().ok()) return reader.status();
  if (dynamic != nullptr) {
    if (auto status = ParseRules(source, *dynamic, config.get()); !status.ok()) return status;
  }
  return QuantConfigPtr(config);
}

}  // namespace moed
