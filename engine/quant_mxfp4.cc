// gpt-oss's own method: the routed experts are fused MXFP4 tensors, everything else is unquantized.
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_schemes.h"

namespace moed {
namespace {

class Mxfp4Config : public QuantConfig {
 public:
  std::string Method() const override { return "mxfp4"; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (!InRoutedExperts(query.canonical()) || NeverQuantized(query.canonical()) || excluded.Has(query)) {
      return DeclaredScheme{};
    }
    DeclaredScheme declared = MxWeights(ElementType::kFp4E2m1);
    declared.container = DeclaredScheme::Container::kMxfp4Fused;
    return declared;
  }

  bool mixtral_names = false;
  NameList excluded;
};

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseMxfp4Config(const QuantSource& source, const nlohmann::json& description) {
  auto config = std::make_shared<Mxfp4Config>();
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  if (auto status = AddEntries(source, &reader, "modules_to_not_convert", &NameList::AddPart, &config->excluded); !status.ok()) {
    return status;
  }
  return QuantConfigPtr(config);
}

}  // namespace moed
