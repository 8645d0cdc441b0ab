#include "engine/quant_config.h"

#include <array>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

class PlainConfig : public QuantConfig {
 public:
  std::string Method() const override { return "none"; }
  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    return DeclaredScheme{};
  }
};

struct MethodEntry {
  const char* name;
  absl::StatusOr<QuantConfigPtr> (*parse)(const QuantSource&, const nlohmann::json&);
};
constexpr std::array<MethodEntry, 9> kMethods = {{{"gptq", ParseGptqConfig},
                                                  {"awq", ParseAwqConfig},
                                                  {"auto-round", ParseAutoRoundConfig},
                                                  {"compressed-tensors", ParseCompressedTensorsConfig},
                                                  {"fp8", ParseFp8Config},
                                                  {"blockwise_int8", ParseBlockwiseInt8Config},
                                                  {"mxfp4", ParseMxfp4Config},
                                                  {"modelopt", ParseModelOptConfig},
                                                  {"quark", ParseQuarkConfig}}};

// The method where the file does not name it: older ModelOpt exports are known by keys that no other tool writes.
std::string ImpliedMethod(const QuantSource& source, const nlohmann::json& description) {
  const auto producer = description.find("producer");
  const bool modelopt_producer = producer != description.end() && producer->is_object() && producer->contains("name") &&
                                 (*producer)["name"] == "modelopt";
  if (modelopt_producer || description.contains("quant_algo")) return "modelopt";
  return source.default_method;
}

}  // namespace

const char* ContainerName(DeclaredScheme::Container container) {
  switch (container) {
    case DeclaredScheme::Container::kPlain: return "unquantized (.weight)";
    case DeclaredScheme::Container::kGptq: return "GPTQ (.qweight along K)";
    case DeclaredScheme::Container::kAwq: return "AWQ (.qweight along N)";
    case DeclaredScheme::Container::kPacked: return "pack-quantized (.weight_packed)";
    case DeclaredScheme::Container::kInt8: return "int8 (.weight I8)";
    case DeclaredScheme::Container::kFp8: return "FP8 (.weight F8_E4M3)";
    case DeclaredScheme::Container::kFp4: return "FP4 (.weight or .weight_packed, two codes a byte)";
    case DeclaredScheme::Container::kTransposedInt4: return "Quark int4 (.weight I32 along N)";
    case DeclaredScheme::Container::kTwoStageInt4: return "Quark two-stage int4 (.weight I32 along K)";
    case DeclaredScheme::Container::kMxfp4Fused: return "fused MXFP4 (_blocks and _scales)";
  }
  return "?";
}

QuantConfigPtr PlainQuantConfig() { return std::make_shared<PlainConfig>(); }

absl::Status CheckModuleName(const std::string& module) {
  if (module.size() <= kMaxModuleName) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("module name of ", module.size(), " characters, allowed are ", kMaxModuleName));
}

absl::Status AddEntries(const QuantSource& source, ConfigReader* reader, const std::string& key,
                        absl::Status (NameList::*add)(const std::string&, PatternBudget*), NameList* list) {
  for (const std::string& entry : reader->StringsOrEmpty(key)) {
    if (auto status = (list->*add)(entry, source.patterns.get()); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(reader->where(), key, ": ", std::string(status.message())));
    }
  }
  return reader->status();
}

std::vector<std::string> KeysInOrder(const QuantSource& source, const std::string& key) {
  std::vector<std::string> path = source.path;
  path.push_back(key);
  const auto it = source.document->key_order.find(path);
  return it == source.document->key_order.end() ? std::vector<std::string>{} : it->second;
}

absl::StatusOr<QuantConfigPtr> ParseQuantConfig(const QuantSource& source) {
  const nlohmann::json* description = &source.document->root;
  for (const std::string& key : source.path) {
    const auto it = description->find(key);
    if (it == description->end() || !it->is_object()) {
      const std::string name = source.where.substr(0, source.where.find_last_not_of(". ") + 1);
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": wanted an object, got ", it == description->end() ? "nothing" : Shown(*it)));
    }
    description = &*it;
  }
  ConfigReader reader(*description, source.where);
  const std::string method = reader.StringOr("quant_method", ImpliedMethod(source, *description));
  if (!reader.status().ok()) return reader.status();
  std::string served;
  for (const MethodEntry& entry : kMethods) {
    if (method == entry.name) return entry.parse(source, *description);
    absl::StrAppend(&served, served.empty() ? "" : ", ", entry.name);
  }
  return absl::InvalidArgumentError(absl::StrCat(source.where, "quant_method: ",
                                                 method.empty() ? "nothing" : absl::StrCat("\"", method, "\""),
                                                 " is not supported (served: ", served, ")"));
}

}  // namespace moed
