// compressed-tensors: every format of weights and every treatment of activations.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "tests/engine/config_texts.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the whole header is helpers of this test
using Container = DeclaredScheme::Container;

// A description of one group for all modules; `input` may be "null".
std::string Group(const std::string& format, const std::string& weights, const std::string& input = "null") {
  return R"({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups":
      {"g": {"targets": ["Linear"],
      "format": ")" +
         format + R"(", "weights": )" + weights + R"(, "input_activations": )" + input + "}}}";
}

constexpr char kInt8Channel[] = R"({"num_bits": 8, "type": "int", "strategy": "channel"})";
constexpr char kFp8Channel[] = R"({"num_bits": 8, "type": "float", "strategy": "channel"})";
constexpr char kMxfp4[] =
    R"({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"})";
constexpr char kNvfp4[] = R"({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn"})";

TEST_CASE("Integer groups are served packed and unpacked, in 4 and 8 bits, by group, channel and tensor") {
  struct Row {
    const char* weights;
    ElementType element;
    GroupShape group;
    bool zero_points;
  };
  for (const Row& row :
       std::vector<Row>{{R"({"num_bits": 4, "strategy": "group", "group_size": 32})", ElementType::kInt4, {1, 32}, false},
                        {R"({"num_bits": 4, "group_size": 64, "symmetric": false})", ElementType::kInt4, {1, 64}, true},
                        {R"({"num_bits": 8, "group_size": -1, "type": "int"})", ElementType::kInt8, {1, 0}, false},
                        {R"({"num_bits": 8, "strategy": "tensor", "dynamic": false})", ElementType::kInt8, {0, 0}, false},
                        {R"({})", ElementType::kInt8, {0, 0}, false},
                        {kInt8Channel, ElementType::kInt8, {1, 0}, false}}) {
    INFO(row.weights);
    DeclaredScheme declared = ExpertOf(Group("pack-quantized", row.weights));
    CHECK(declared.container == Container::kPacked);
    CHECK(declared.linear.weights.element == row.element);
    CHECK(declared.linear.weights.group == row.group);
    CHECK(declared.linear.weights.zero_points == row.zero_points);
    const LinearScheme packed = declared.linear;
    declared = ExpertOf(Group("int-quantized", row.weights));
    CHECK(declared.container == Container::kInt8);
    CHECK(declared.linear == packed);
  }
}

TEST_CASE("Act-order \"group\" is declared for packed groups and refused elsewhere; \"weight\" leaves no trace") {
  for (const char* order : {"\"group\"", "\"dynamic\"", "true"}) {
    const std::string weights = std::string(R"({"num_bits": 4, "group_size": 32, "actorder": )") + order + "}";
    CHECK(ExpertOf(Group("pack-quantized", weights)).linear.weights.act_order);
    CHECK(Contains(NotServedOf(Group("int-quantized", weights)),
                   "config_groups.g.weights.actorder: \"group\" is not supported"));
  }
  for (const char* order : {"\"weight\"", "\"static\"", "false", "null"}) {
    const std::string weights = std::string(R"({"num_bits": 4, "group_size": 32, "actorder": )") + order + "}";
    CHECK_FALSE(ExpertOf(Group("pack-quantized", weights)).linear.weights.act_order);
  }
  CHECK(Contains(Refusal(QuantText(Group("pack-quantized", R"({"actorder": "up"})"))), "weights.actorder: wanted"));
}

TEST_CASE("FP8 groups are served by tensor, channel and block") {
  for (const char* format : {"float-quantized", "naive-quantized"}) {
    const auto group = [format](const std::string& rest) {
      const DeclaredScheme declared = ExpertOf(Group(format, R"({"num_bits": 8, "type": "float", )" + rest + "}"));
      CHECK(declared.container == Container::kFp8);
      CHECK(declared.linear.weights.element == ElementType::kFp8E4m3);
      return declared.linear.weights.group;
    };
    CHECK(group(R"("strategy": "tensor")") == GroupShape{0, 0});
    CHECK(group(R"("strategy": "channel")") == GroupShape{1, 0});
    CHECK(group(R"("strategy": "block", "block_structure": [128, 128])") == GroupShape{128, 128});
    CHECK(group(R"("strategy": "block", "block_structure": "64x128")") == GroupShape{64, 128});
  }
}

TEST_CASE("MX and NVFP4 groups declare their block, scale type and global scale") {
  DeclaredScheme declared = ExpertOf(Group("mxfp4-pack-quantized", kMxfp4));
  CHECK(declared.container == Container::kFp4);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32}});
  declared = ExpertOf(Group("mxfp8-quantized", R"({"num_bits": 8, "type": "float", "group_size": 32})"));
  CHECK(declared.container == Container::kFp8);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp8E4m3, ScaleType::kE8m0, {1, 32}});
  declared = ExpertOf(Group("nvfp4-pack-quantized", kNvfp4));
  CHECK(declared.container == Container::kFp4);
  CHECK(declared.linear.weights == WeightScheme{ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}, GlobalScale::kDivisor});
}

TEST_CASE("Activations are declared as the file treats them") {
  const auto input = [](const std::string& format, const char* weights, const std::string& activations) {
    return ExpertOf(Group(format, weights, activations)).linear.input;
  };
  ActivationScheme wanted;
  CHECK(input("int-quantized", kInt8Channel, "null") == wanted);
  wanted.mode = ActivationMode::kDynamic;
  wanted.group = {1, 0};
  const std::string token = R"("strategy": "token", "dynamic": true})";
  CHECK(input("int-quantized", kInt8Channel, R"({"num_bits": 8, "type": "int", )" + token) == wanted);
  wanted.element = ElementType::kFp8E4m3;
  CHECK(input("float-quantized", kFp8Channel, R"({"num_bits": 8, "type": "float", )" + token) == wanted);
  CHECK(input("pack-quantized", R"({"num_bits": 4, "group_size": 32})", R"({"num_bits": 8, "type": "float", )" + token) ==
        wanted);
  wanted.group = {1, 128};
  CHECK(input("float-quantized", kFp8Channel, R"({"type": "float", "group_size": 128, "dynamic": true})") == wanted);
  wanted.group = {0, 0};
  CHECK(input("float-quantized", kFp8Channel, R"({"type": "float", "strategy": "tensor", "dynamic": true})") == wanted);
  wanted.mode = ActivationMode::kStatic;
  CHECK(input("float-quantized", kFp8Channel, R"({"type": "float", "strategy": "tensor", "dynamic": false})") == wanted);
  wanted.element = ElementType::kInt8;
  CHECK(input("int-quantized", kInt8Channel, "{}") == wanted);
  wanted.zero_points = true;
  CHECK(input("int-quantized", kInt8Channel, R"({"symmetric": false})") == wanted);
}

TEST_CASE("MX and NVFP4 activations are declared with their rule") {
  ActivationScheme wanted;
  wanted.mode = ActivationMode::kDynamic;
  wanted.element = ElementType::kFp4E2m1;
  wanted.scale = ScaleType::kE8m0;
  wanted.group = {1, 32};
  wanted.rule = ScaleRule::kMxEven;
  const std::string mx = R"("type": "float", "group_size": 32, "dynamic": true)";
  CHECK(ExpertOf(Group("mxfp4-pack-quantized", kMxfp4, R"({"num_bits": 4, )" + mx + "}")).linear.input == wanted);
  wanted.element = ElementType::kFp8E4m3;
  CHECK(ExpertOf(Group("mxfp4-pack-quantized", kMxfp4, R"({"num_bits": 8, )" + mx + "}")).linear.input == wanted);
  CHECK(ExpertOf(Group("float-quantized", kFp8Channel, "{" + mx + R"(, "scale_dtype": "torch.uint8"})")).linear.input ==
        wanted);
  wanted = ActivationScheme{ActivationMode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}};
  wanted.global_scale = true;
  const std::string local =
      R"({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"})";
  CHECK(ExpertOf(Group("nvfp4-pack-quantized", kNvfp4, local)).linear.input == wanted);
}

TEST_CASE("Groups that are not served are refused with group, key and value") {
  struct Row {
    const char* format;
    const char* weights;
    const char* input;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{
           {"int-quantized", R"({"type": "float"})", "null", "weights.type: \"float\""},
           {"float-quantized", R"({"type": "int"})", "null", "weights.type: \"int\""},
           {"float-quantized", R"({"type": "float", "num_bits": 4})", "null", "weights.num_bits: 4"},
           {"float-quantized", R"({"type": "float", "group_size": 64})", "null", "weights.strategy: \"group\""},
           {"float-quantized", R"({"type": "float", "symmetric": false})", "null", "weights.symmetric: false"},
           {"mxfp4-pack-quantized", kNvfp4, "null", "weights.strategy: \"tensor_group\""},
           {"nvfp4-pack-quantized", kMxfp4, "null", "weights.strategy: \"group\""},
           {"mxfp8-quantized", R"({"type": "float", "group_size": 64})", "null", "weights.group_size: 64"},
           {"int-quantized", "null", "{}", "weights: null with quantized activations"},
           {"int-quantized", kInt8Channel, R"({"num_bits": 4})", "input_activations.num_bits: 4"},
           {"int-quantized", kInt8Channel, R"({"type": "bool"})", "input_activations.type: \"bool\""},
           {"int-quantized", kInt8Channel, R"({"strategy": "token"})", "input_activations.dynamic: false"},
           {"int-quantized", kInt8Channel, R"({"strategy": "channel"})", "input_activations.strategy: \"channel\""},
           {"int-quantized", kInt8Channel, R"({"dynamic": "local"})", "input_activations.dynamic: local"},
           {"int-quantized", kInt8Channel, R"({"dynamic": true, "symmetric": false})", "input_activations.symmetric: false"},
           {"float-quantized", kFp8Channel, R"({"type": "float", "symmetric": false})",
            "input_activations.symmetric: false"},
           {"mxfp4-pack-quantized", kMxfp4, R"({"type": "float", "group_size": 32})", "input_activations.dynamic: false"},
           {"nvfp4-pack-quantized", kNvfp4, R"({"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16,
             "dynamic": true})",
            "input_activations.dynamic: true"}}) {
    const std::string message = NotServedOf(Group(row.format, row.weights, row.input));
    INFO(message);
    CHECK(Contains(message, std::string("config_groups.g.") + row.part));
    CHECK(Contains(message, "is not supported (served: "));
  }
}

TEST_CASE("Block structures and dynamic flags of a wrong form are refused at once") {
  for (const char* block : {"null", "128", "[128]", "[0, 128]", "[128, \"128\"]", "\"128\"", "\"128x\"", "\"x128\"",
                            "\"128x128x1\"", "\"-1x128\"", "\"99999999999x1\""}) {
    const std::string weights = std::string(R"({"type": "float", "strategy": "block", "block_structure": )") + block + "}";
    INFO(weights);
    CHECK(Contains(Refusal(QuantText(Group("float-quantized", weights))), "weights.block_structure: wanted"));
  }
  CHECK(Contains(Refusal(QuantText(Group("int-quantized", kInt8Channel, R"({"dynamic": "often"})"))), "dynamic: wanted"));
  CHECK(Contains(Refusal(QuantText(Group("int-quantized", kInt8Channel, "8"))), "input_activations: wanted an object"));
}

}  // namespace
}  // namespace moed
