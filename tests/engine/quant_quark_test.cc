// Quark: specifications of weights and inputs, and which one applies to a module.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

std::string Quark(const std::string& weight, const std::string& input = "null", const std::string& more = "") {
  return R"({"quant_method": "quark", "global_quant_config": {"weight": )" + weight + R"(, "input_tensors": )" + input +
         R"(, "output_tensors": null, "bias": null})" + more + "}";
}

constexpr char kInt8[] = R"({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 0, "symmetric": true})";
constexpr char kFp4[] =
    R"({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"})";
constexpr char kTwoStages[] = R"([{"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
    {"dtype": "int4", "qscheme": "per_channel", "ch_axis": 0, "symmetric": true}])";

std::string Int4(const std::string& dtype, const std::string& symmetric) {
  return R"({"dtype": ")" + dtype + R"(", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "symmetric": )" +
         symmetric + "}";
}

TEST_CASE("Quark's int8 and FP8 weights have one scale a channel or a tensor") {
  struct Row {
    const char* weight;
    ElementType element;
    GroupShape group;
  };
  for (const Row& row :
       std::vector<Row>{{kInt8, ElementType::kInt8, {1, 0}},
                        {R"({"dtype": "int8", "qscheme": "per_tensor", "symmetric": null})", ElementType::kInt8, {0, 0}},
                        {R"({"dtype": "fp8_e4m3", "qscheme": "per_channel"})", ElementType::kFp8E4m3, {1, 0}},
                        {R"({"dtype": "fp8_e4m3", "qscheme": "per_tensor"})", ElementType::kFp8E4m3, {0, 0}}}) {
    const DeclaredScheme declared = ExpertOf(Quark(row.weight));
    CHECK(declared.container == (row.element == ElementType::kInt8 ? Container::kInt8 : Container::kFp8));
    CHECK(declared.linear.weights.element == row.element);
    CHECK(declared.linear.weights.group == row.group);
    CHECK(declared.linear.input.mode == ActivationMode::kNone);
  }
}

TEST_CASE("Quark's MX weights have E8M0 scales for 32 inputs") {
  DeclaredScheme declared = ExpertOf(Quark(kFp4));
  CHECK(declared.container == Container::kFp4);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}});
  declared = ExpertOf(Quark(R"({"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"})"));
  CHECK(declared.container == Container::kFp8);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}});
}

TEST_CASE("Quark's grouped int4 is signed, uint4 has zero points, and pack_method is the nibble order") {
  DeclaredScheme declared = ExpertOf(Quark(Int4("uint4", "false"), "null", R"(, "export": {"pack_method": "reorder"})"));
  CHECK(declared.container == Container::kTransposedInt4);
  CHECK(declared.linear.weights.element == ElementType::kInt4);
  CHECK(declared.linear.weights.group == GroupShape{1, 32});
  CHECK(declared.linear.weights.zero_points);
  CHECK(declared.awq_order);
  CHECK_FALSE(declared.twos_complement);
  declared = ExpertOf(Quark(Int4("int4", "true"), "null", R"(, "export": {"pack_method": "order"})"));
  CHECK(declared.twos_complement);
  CHECK_FALSE(declared.awq_order);
  CHECK_FALSE(declared.linear.weights.zero_points);
  CHECK(ExpertOf(Quark(Int4("int4", "false"))).linear.weights.zero_points);
}

TEST_CASE("Quark's two-stage weights are int4 channels under an FP8 scale of the whole matrix") {
  const DeclaredScheme declared =
      ExpertOf(Quark(kTwoStages, R"({"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": true})"));
  CHECK(declared.container == Container::kTwoStageInt4);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kInt4, ScaleType::kF32, {1, 0}, GlobalScale::kMultiplier});
  CHECK(declared.twos_complement);
  CHECK(declared.awq_order);
  CHECK(declared.linear.input == ActivationScheme{ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}});
}

TEST_CASE("Quark's inputs are static per tensor, dynamic per token, or MX by their calculation mode") {
  const auto input = [](const std::string& text) { return ExpertOf(Quark(kInt8, text)).linear.input; };
  ActivationScheme wanted{ActivationMode::kStatic, ElementType::kInt8, ScaleType::kF32, {0, 0}};
  CHECK(input(R"({"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": false})") == wanted);
  wanted.zero_points = true;
  CHECK(input(R"({"dtype": "int8", "qscheme": "per_tensor", "symmetric": false})") == wanted);
  wanted = ActivationScheme{ActivationMode::kDynamic, ElementType::kFp8E4m3, ScaleType::kF32, {1, 0}};
  CHECK(input(R"({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 1, "is_dynamic": true})") == wanted);
  const std::string mx =
      R"({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": true)";
  wanted = ActivationScheme{ActivationMode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}, ScaleRule::kMxEven};
  CHECK(input(mx + R"(, "scale_calculation_mode": "even", "round_method": "half_even"})") == wanted);
  wanted.rule = ScaleRule::kMxFloor;
  CHECK(input(mx + R"(, "scale_calculation_mode": "floor"})") == wanted);
  wanted.rule = ScaleRule::kMxCeil;
  CHECK(input(mx + R"(, "scale_calculation_mode": "ceil"})") == wanted);
}

TEST_CASE("Quark specifications that are not served are refused by key and value") {
  struct Row {
    std::string weight;
    std::string input;
    const char* part;
  };
  const std::string fp6 = R"(", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"})";
  for (const Row& row : std::vector<Row>{
           {R"({"dtype": "fp6_e2m3)" + fp6, "null",
            "weight.dtype: \"fp6_e2m3\" (the bit order of FP6 files is not specified)"},
           {R"({"dtype": "fp6_e3m2)" + fp6, "null",
            "weight.dtype: \"fp6_e3m2\" (the bit order of FP6 files is not specified)"},
           {R"({"dtype": "uint8", "qscheme": "per_tensor"})", "null", "weight.dtype: \"uint8\""},
           {R"({"dtype": "int8", "qscheme": "per_group", "group_size": 32})", "null", "weight.qscheme: \"per_group\""},
           {R"({"dtype": "int8", "qscheme": "per_channel", "ch_axis": 1})", "null", "weight.ch_axis: 1"},
           {R"({"dtype": "int8", "qscheme": "per_tensor", "symmetric": false})", "null", "weight.symmetric: false"},
           {R"({"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": true})", "null", "weight.is_dynamic: true"},
           {R"({"dtype": "int4", "qscheme": "per_channel"})", "null", "weight.qscheme: \"per_channel\""},
           {Int4("uint4", "true"), "null", "weight.symmetric: true with dtype \"uint4\""},
           {R"({"dtype": "fp4", "qscheme": "per_group", "group_size": 32})", "null",
            "weight.qscheme: \"per_group\" with scale_format"},
           {R"({"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "e8m0"})", "null",
            "weight.group_size: 16"},
           {"null", kInt8, "weight: null with quantized activations"},
           {"[]", "null", "weight: a list of 0"},
           {std::string("[") + kInt8 + ", " + kInt8 + "]", "null", "weight[0].dtype: \"int8\""},
           {kInt8, "[]", "input_tensors"},
           {kInt8, R"({"dtype": "int8", "qscheme": "per_channel"})", "input_tensors.qscheme: \"per_channel\", static,"},
           {kInt8, R"({"dtype": "fp4", "qscheme": "per_tensor"})", "input_tensors.dtype: \"fp4\""},
           {kInt8, R"({"dtype": "int8", "qscheme": "per_tensor", "is_dynamic": true, "symmetric": false})",
            "input_tensors.symmetric"},
           {kInt8, R"({"dtype": "int8", "qscheme": "per_tensor", "round_method": "floor"})",
            "input_tensors.round_method: \"floor\""},
           {kInt8, kFp4, "input_tensors.is_dynamic: false"}}) {
    const std::string message = NotServedOf(Quark(row.weight, row.input));
    INFO(message);
    CHECK(Contains(message, std::string("global_quant_config.") + row.part));
    CHECK(Contains(message, "is not supported (served: "));
  }
}

TEST_CASE("Quark values of a wrong type, and files without codes, are refused at once") {
  for (const auto& [quant, part] : std::vector<std::pair<std::string, std::string>>{
           {R"({"quant_method": "quark"})", "global_quant_config: wanted an object"},
           {Quark("4"), "global_quant_config.weight: wanted"},
           {Quark(R"({"qscheme": "per_tensor"})"), "weight.dtype: wanted a string"},
           {Quark(R"({"dtype": "int4", "qscheme": "per_group"})"), "weight.group_size: wanted"},
           {Quark("[1, 2]"), "weight[0]: wanted an object"},
           {Quark(kInt8, "4"), "input_tensors: wanted"},
           {Quark(kInt8, "null", R"(, "export": {"weight_format": "fake_quantized"})"), "export.weight_format"},
           {Quark(kInt8, "null", R"(, "export": {"pack_method": "mixed"})"), "export.pack_method"},
           {Quark(kInt8, "null", R"(, "exclude": "lm_head")"), "exclude: wanted a list"},
           {Quark(kInt8, "null", R"(, "layer_quant_config": [])"), "layer_quant_config: wanted an object"},
           {Quark(kInt8, "null", R"(, "layer_quant_config": {"*.up": 4})"),
            "layer_quant_config[\"*.up\"]: wanted an object"}}) {
    const std::string message = Refusal(QuantText(quant));
    INFO(message);
    CHECK(Contains(message, part));
  }
}

TEST_CASE("Quark's exceptions come first, then layers by glob in the file's order, then the type, then the whole") {
  const std::string more = R"(, "exclude": ["model.layers.0.mlp.experts.1.up_proj", "re:.*layers\\.9\\.", "*.experts.7.*"],
      "layer_quant_config": {"*.experts.2.down_proj": {},
          "*.down_proj": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
          "*.experts.2.*": {"weight": )" +
                           std::string(kFp4) + "}}";
  const auto at = [](const ModelConfig& config, const std::string& module) { return Declared(config, module).container; };
  const ModelConfig config = GoodQuant(Quark(kInt8, "null", more));
  CHECK(at(config, "model.layers.0.mlp.experts.1.up_proj") == Container::kPlain);
  CHECK(at(config, "model.layers.0.mlp.experts.11.up_proj") == Container::kInt8);
  CHECK(at(config, "model.layers.9.mlp.experts.1.up_proj") == Container::kPlain);
  CHECK(at(config, "model.layers.0.mlp.experts.7.down_proj") == Container::kPlain);
  CHECK(at(config, "model.layers.0.mlp.experts.2.down_proj") == Container::kPlain);
  CHECK(at(config, "model.layers.0.mlp.experts.3.down_proj") == Container::kFp8);
  CHECK(at(config, "model.layers.0.mlp.experts.2.up_proj") == Container::kFp4);
  const std::string type = R"(, "layer_type_quant_config": {"<class 'torch.nn.modules.linear.Linear'>": {"weight": )" +
                           std::string(kFp4) + R"(}, "Embedding": {"weight": )" + kInt8 + "}}";
  CHECK(at(GoodQuant(Quark(kInt8, "null", type)), kExpert) == Container::kFp4);
}

}  // namespace
}  // namespace moed
