// The "fp8" method (DeepSeek-V3 and its relatives) and its int8 sibling "blockwise_int8": one scheme for every linear module
// but a list of exceptions. DeepSeek-V4 stores its routed experts in FP4 under the same description.
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_schemes.h"

namespace moed {
namespace {

using nlohmann::json;

class BlockConfig : public QuantConfig {
 public:
  explicit BlockConfig(std::string method) : method_(std::move(method)) {}
  std::string Method() const override { return method_; }

  absl::StatusOr<DeclaredScheme> For(const std::string& module) const override {
    if (auto status = CheckModuleName(module); !status.ok()) return status;
    const ModuleQuery query(module, mixtral_names);
    if (NeverQuantized(query.canonical()) || excluded.Has(query)) return DeclaredScheme{};
    return (InRoutedExperts(query.canonical()) ? experts : general).For(module);
  }

  bool mixtral_names = false;
  NameList excluded;
  Declaration general;
  Declaration experts;

 private:
  const std::string method_;
};

// weight_block_size as rows x cols; {0, 0}, one scale for the whole matrix, when absent.
GroupShape ReadBlock(ConfigReader* reader) {
  if (!reader->Has("weight_block_size")) return {0, 0};
  const std::vector<int64_t> block = reader->IntsOrEmpty("weight_block_size", 1, 1 << 20);
  if (block.size() != 2) {
    reader->Fail("weight_block_size", "two positive integers");
    return {0, 0};
  }
  return {static_cast<int32_t>(block[0]), static_cast<int32_t>(block[1])};
}

absl::Status ReadExceptions(const QuantSource& source, ConfigReader* reader, NameList* excluded) {
  for (const char* key : {"modules_to_not_convert", "ignored_layers"}) {
    if (auto status = AddEntries(source, reader, key, &NameList::AddPart, excluded); !status.ok()) return status;
  }
  return reader->status();
}

ScaleRule ReadScaleFormat(ConfigReader* reader) {
  const std::string format = reader->StringOr("scale_fmt", "float");
  if (format != "float" && format != "ue8m0") reader->Fail("scale_fmt", "null, \"float\" or \"ue8m0\"");
  return format == "ue8m0" ? ScaleRule::kAbsMaxPow2Up : ScaleRule::kAbsMax;
}

void DeclareFp8(ConfigReader* reader, Declaration* out) {
  const std::string format = reader->StringOr("fmt", "e4m3");
  if (format != "e4m3" && format != "float8_e4m3fn") {
    out->Refuse(reader->where() + "fmt", Quoted(format), "\"e4m3\", \"float8_e4m3fn\"");
  }
  const GroupShape block = ReadBlock(reader);
  const ScaleRule rule = ReadScaleFormat(reader);
  const bool blocks = block.cols > 0;
  out->scheme = ByteWeights(ElementType::kFp8E4m3, block);
  ActivationScheme& input = out->scheme.linear.input;
  const std::string activations = reader->StringOr("activation_scheme", "dynamic");
  if (activations == "dynamic") {
    input = DynamicInput(ElementType::kFp8E4m3, blocks ? GroupShape{1, block.cols} : GroupShape{0, 0}, rule);
  } else if (activations == "static" && !blocks) {
    input = StaticInput(ElementType::kFp8E4m3);
  } else {
    out->Refuse(reader->where() + "activation_scheme", Quoted(activations),
                blocks ? "\"dynamic\" with weight_block_size" : "\"dynamic\", \"static\"");
  }
}

// Experts that are stored in another way than the description says of the model.
void DeclareExperts(ConfigReader* reader, const QuantSource& source, BlockConfig* config) {
  config->experts = config->general;
  const std::string algorithm = reader->StringOr("moe_quant_algo", "");
  if (!algorithm.empty()) {
    config->experts.Refuse(reader->where() + "moe_quant_algo", Quoted(algorithm), "none: experts as the rest of the model");
  }
  ConfigReader model(source.document->root, "config.json: ");
  const std::string dtype = model.StringOr("expert_dtype", "fp8");
  if (!model.status().ok()) return reader->Fail("expert_dtype", "a string at the top of config.json");
  if (dtype == "fp4") {
    const ActivationScheme input = config->general.scheme.linear.input;
    config->experts.scheme = MxWeights(ElementType::kFp4E2m1);
    config->experts.scheme.linear.input = input;
  } else if (dtype != "fp8") {
    config->experts.Refuse("config.json: expert_dtype", Quoted(dtype), "\"fp8\", \"fp4\"");
  }
}

}  // namespace

absl::StatusOr<QuantConfigPtr> ParseFp8Config(const QuantSource& source, const json& description) {
  auto config = std::make_shared<BlockConfig>("fp8");
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  DeclareFp8(&reader, &config->general);
  DeclareExperts(&reader, source, config.get());
  if (auto status = ReadExceptions(source, &reader, &config->excluded); !status.ok()) return status;
  return QuantConfigPtr(config);
}

absl::StatusOr<QuantConfigPtr> ParseBlockwiseInt8Config(const QuantSource& source, const json& description) {
  auto config = std::make_shared<BlockConfig>("blockwise_int8");
  config->mixtral_names = source.mixtral_names;
  ConfigReader reader(description, source.where);
  const GroupShape block = reader.Has("weight_block_size") ? ReadBlock(&reader) : GroupShape{128, 128};
  config->general.scheme = ByteWeights(ElementType::kInt8, block);
  config->general.scheme.linear.input = DynamicInput(ElementType::kInt8, {1, block.cols});
  const std::string activations = reader.StringOr("activation_scheme", "dynamic");
  if (activations != "dynamic") {
    config->general.Refuse(source.where + "activation_scheme", Quoted(activations), "\"dynamic\"");
  }
  config->experts = config->general;
  if (auto status = ReadExceptions(source, &reader, &config->excluded); !status.ok()) return status;
  return QuantConfigPtr(config);
}

}  // namespace moed
