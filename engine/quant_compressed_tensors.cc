// compressed-tensors: groups of modules by targets, each with a scheme, and a list of modules that no group applies to.
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"

namespace moed {
namespace {

using nlohmann::json;

struct Group {
  NameList targets;
  bool quantizes = false;  // it has a scheme for weights
  DeclaredScheme scheme;   // when it is served
  std::string refusal;     // when it is not: "WHEREconfig_groups.NAME...KEY: VALUE is not supported (served: ...)"
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
    if (!best->refusal.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(best->refusal, ", and it applies to ", module));
    }
    return best->scheme;
  }

  NameList ignore;
  std::vector<Group> groups;  // in the order of the file: among equally strong targets the first wins
  bool mixtral_names = false;
};

// Reads one group; collects its first property that is not served.
class GroupParser {
 public:
  GroupParser(const json& object, const std::string& where, const std::string& global_format)
      : reader_(object, where), where_(where), format_(reader_.StringOr("format", global_format)) {}

  absl::StatusOr<Group> Parse() {
    if (!reader_.Has("targets")) reader_.Fail("targets", "a list of strings");
    for (const std::string& target : reader_.StringsOrEmpty("targets")) {
      if (auto status = group_.targets.Add(target); !status.ok()) {
        return absl::InvalidArgumentError(absl::StrCat(where_, "targets: ", std::string(status.message())));
      }
    }
    for (const char* key : {"input_activations", "output_activations"}) {
      if (reader_.Has(key)) {
        Refuse(key, DescribeActivations(*reader_.Find(key)), "null: activations are not quantized");
        group_.quantizes = true;
      }
    }
    const json* weights = reader_.Find("weights");
    if (weights != nullptr && !weights->is_object()) reader_.Fail("weights", "an object or null");
    if (!reader_.status().ok()) return reader_.status();
    if (weights != nullptr) {
      group_.quantizes = true;
      group_.scheme.container = DeclaredScheme::Container::kPacked;
      if (format_ != "pack-quantized") Refuse("format", absl::StrCat("\"", format_, "\""), "\"pack-quantized\"");
      if (auto status = ParseWeights(*weights); !status.ok()) return status;
    }
    return std::move(group_);
  }

 private:
  void Refuse(const std::string& key, const std::string& value, const std::string& served) {
    if (!group_.refusal.empty()) return;
    group_.refusal = absl::StrCat(where_, key, ": ", value, " is not supported (served: ", served, ")");
  }

  static std::string DescribeActivations(const json& activations) {
    if (!activations.is_object()) return Shown(activations);
    const auto bits = activations.find("num_bits");
    const auto type = activations.find("type");
    return absl::StrCat(type == activations.end() ? "?" : Shown(*type), " of ",
                        bits == activations.end() ? "?" : Shown(*bits), " bits");
  }

  absl::Status ParseWeights(const json& weights) {
    ConfigReader reader(weights, where_ + "weights.");
    const std::string type = reader.StringOr("type", "int");
    const int64_t bits = reader.IntOr("num_bits", 8, 1, 32);
    const bool symmetric = reader.BoolOr("symmetric", true);
    const int64_t group_size = reader.IntOr("group_size", 0, -1, 1 << 20);
    if (reader.Has("group_size") && group_size == 0) reader.Fail("group_size", "null, -1 or a positive integer");
    const std::string inferred = group_size > 0 ? "group" : group_size == -1 ? "channel" : "tensor";
    const std::string strategy = reader.StringOr("strategy", inferred);
    if (strategy == "group" && group_size <= 0) reader.Fail("group_size", "a positive integer for the strategy group");
    if (strategy == "channel" && group_size > 0) reader.Fail("group_size", "null or -1 for the strategy channel");
    const json* dynamic = reader.Find("dynamic");
    if (dynamic != nullptr && !dynamic->is_boolean() && !dynamic->is_string()) {
      reader.Fail("dynamic", "true, false or a string");
    }
    const json* order = reader.Find("actorder");
    if (order != nullptr && !order->is_boolean() && !order->is_string()) {
      reader.Fail("actorder", "null, a string or a boolean");
    }
    if (!reader.status().ok()) return reader.status();

    if (type != "int") Refuse("weights.type", absl::StrCat("\"", type, "\""), "\"int\"");
    if (bits != 4) Refuse("weights.num_bits", absl::StrCat(bits), "4");
    if (!symmetric) Refuse("weights.symmetric", "false", "true");
    if (strategy != "group" && strategy != "channel") {
      Refuse("weights.strategy", absl::StrCat("\"", strategy, "\""), "\"group\", \"channel\"");
    }
    if (dynamic != nullptr && *dynamic != false) Refuse("weights.dynamic", Shown(*dynamic), "false");
    // "weight" orders the quantization only; "group" leaves scattered groups in the file.
    if (order != nullptr && *order != false && *order != "weight" && *order != "static") {
      Refuse("weights.actorder", Shown(*order), "null, \"weight\"");
    }
    group_.scheme.linear.weights.element = ElementType::kInt4;
    group_.scheme.linear.weights.group = {1, strategy == "group" ? static_cast<int32_t>(group_size) : 0};
    return absl::OkStatus();
  }

  ConfigReader reader_;
  const std::string where_;
  const std::string format_;
  Group group_;
};

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
    auto group = GroupParser(object, where + ".", global_format).Parse();
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
  for (const std::string& entry : reader.StringsOrEmpty("ignore")) {
    if (auto status = config->ignore.Add(entry); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(source.where, "ignore: ", std::string(status.message())));
    }
  }
  const json* groups = reader.Find("config_groups");
  if (groups == nullptr || !groups->is_object()) reader.Fail("config_groups", "an object of groups");
  if (!reader.status().ok()) return reader.status();
  if (auto status = ParseGroups(source, *groups, format, config.get()); !status.ok()) return status;
  return QuantConfigPtr(config);
}

}  // namespace moed
