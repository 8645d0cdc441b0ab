#include "engine/quant_config.h"

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
  const std::string method = reader.StringOr("quant_method", source.default_method);
  if (!reader.status().ok()) return reader.status();
  if (method == "gptq") return ParseGptqConfig(source, *description);
  if (method == "compressed-tensors") return ParseCompressedTensorsConfig(source, *description);
  return absl::InvalidArgumentError(absl::StrCat(source.where, "quant_method: ",
                                                 method.empty() ? "nothing" : absl::StrCat("\"", method, "\""),
                                                 " is not supported (served: gptq, compressed-tensors)"));
}

}  // namespace moed
