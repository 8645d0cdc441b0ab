#include "engine/quant_quark_specs.h"

#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/json_text.h"

namespace moed {
namespace {

using nlohmann::json;

// One tensor's specification.
struct Spec {
  std::string where;
  std::string dtype;
  std::string qscheme;
  std::optional<bool> symmetric;
  bool is_dynamic = false;
  int64_t group_size = 0;
  int64_t ch_axis = 0;
  std::string scale_format;
  std::string scale_mode;    // scale_calculation_mode
  std::string round_method;

  bool Mx() const { return qscheme == "per_group" && scale_format == "e8m0"; }
  void Refuse(const std::string& key, const std::string& value, const std::string& served, Declaration* out) const {
    out->Refuse(where + key, value, served);
  }
};

absl::StatusOr<Spec> ReadSpec(const json& object, const std::string& where) {
  ConfigReader reader(object, where);
  Spec spec;
  spec.where = where;
  spec.dtype = reader.StringOr("dtype", "");
  spec.qscheme = reader.StringOr("qscheme", "");
  for (const char* key : {"dtype", "qscheme"}) {
    if (!reader.Has(key)) reader.Fail(key, "a string");
  }
  if (reader.Has("symmetric")) spec.symmetric = reader.BoolOr("symmetric", true);
  spec.is_dynamic = reader.BoolOr("is_dynamic", false);
  spec.group_size = reader.IntOr("group_size", 0, 1, 1 << 20);
  if (spec.qscheme == "per_group" && !reader.Has("group_size")) reader.Fail("group_size", "a positive integer");
  spec.ch_axis = reader.IntOr("ch_axis", spec.qscheme == "per_channel" ? 0 : -1, -2, 2);
  spec.scale_format = reader.StringOr("scale_format", "");
  spec.scale_mode = reader.StringOr("scale_calculation_mode", "even");
  spec.round_method = reader.StringOr("round_method", "half_even");
  if (!reader.status().ok()) return reader.status();
  return spec;
}

// {0, 0} or {1, 0}; refuses other schemes.
GroupShape TensorOrChannel(const Spec& spec, Declaration* out) {
  if (spec.qscheme == "per_tensor") return {0, 0};
  if (spec.qscheme != "per_channel") {
    spec.Refuse("qscheme", absl::StrCat(Quoted(spec.qscheme), " with dtype ", Quoted(spec.dtype)),
                "\"per_tensor\", \"per_channel\"", out);
  } else if (spec.ch_axis != 0) {
    spec.Refuse("ch_axis", absl::StrCat(spec.ch_axis), "0: one scale for each output", out);
  }
  return {1, 0};
}

void DeclareMxWeights(const Spec& spec, ElementType element, Declaration* out) {
  if (!spec.Mx()) {
    const std::string scales = absl::StrCat(Quoted(spec.qscheme), " with scale_format ", Quoted(spec.scale_format));
    spec.Refuse("qscheme", absl::StrCat(scales, " and dtype ", Quoted(spec.dtype)), "\"per_group\" with \"e8m0\"", out);
  }
  if (spec.group_size != 32) spec.Refuse("group_size", absl::StrCat(spec.group_size), "32", out);
  out->scheme = MxWeights(element);
}

void DeclareInt4Weights(const Spec& spec, const std::string& pack_method, Declaration* out) {
  const bool is_signed = spec.dtype == "int4";
  const bool symmetric = spec.symmetric.value_or(is_signed);
  if (spec.qscheme != "per_group") {
    spec.Refuse("qscheme", absl::StrCat(Quoted(spec.qscheme), " with dtype ", Quoted(spec.dtype)), "\"per_group\"", out);
  }
  if (symmetric && !is_signed) spec.Refuse("symmetric", "true with dtype \"uint4\"", "false", out);
  DeclaredScheme& scheme = out->scheme;
  scheme.container = DeclaredScheme::Container::kTransposedInt4;
  scheme.twos_complement = is_signed;
  scheme.awq_order = pack_method == "reorder";
  scheme.linear.weights.element = ElementType::kInt4;
  scheme.linear.weights.group = InputGroup(spec.group_size);
  scheme.linear.weights.zero_points = !symmetric;
}

void DeclareWeights(const Spec& spec, const std::string& pack_method, Declaration* out) {
  const std::string& dtype = spec.dtype;
  if (dtype == "int8") {
    out->scheme = ByteWeights(ElementType::kInt8, TensorOrChannel(spec, out));
    if (!spec.symmetric.value_or(true)) spec.Refuse("symmetric", "false with dtype \"int8\"", "true", out);
  } else if (dtype == "fp8_e4m3" && spec.qscheme == "per_group") {
    DeclareMxWeights(spec, ElementType::kFp8E4m3, out);
  } else if (dtype == "fp8_e4m3") {
    out->scheme = ByteWeights(ElementType::kFp8E4m3, TensorOrChannel(spec, out));
  } else if (dtype == "fp4") {
    DeclareMxWeights(spec, ElementType::kFp4E2m1, out);
  } else if (dtype == "int4" || dtype == "uint4") {
    DeclareInt4Weights(spec, pack_method, out);
  } else {
    const bool fp6 = dtype == "fp6_e2m3" || dtype == "fp6_e3m2";
    spec.Refuse("dtype", absl::StrCat(Quoted(dtype), fp6 ? " (the bit order of FP6 files is not specified)" : ""),
                "\"int8\", \"fp8_e4m3\", \"fp4\", \"int4\", \"uint4\"", out);
  }
  if (spec.is_dynamic) spec.Refuse("is_dynamic", "true", "false", out);
}

// FP8 of the whole matrix, then int4 of its rows: only the second stage's codes are stored.
absl::Status DeclareTwoStages(const json& list, const std::string& where, const std::string& pack_method, Declaration* out) {
  if (list.size() != 2) {
    out->Refuse(where + "weight", absl::StrCat("a list of ", list.size()), "one specification, or fp8_e4m3 then int4");
    return absl::OkStatus();
  }
  std::vector<Spec> stages;
  for (size_t i = 0; i < 2; ++i) {
    const std::string stage = absl::StrCat(where, "weight[", i, "]");
    if (!list[i].is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(stage, ": wanted an object, got ", Shown(list[i])));
    }
    auto spec = ReadSpec(list[i], stage + ".");
    if (!spec.ok()) return spec.status();
    stages.push_back(*std::move(spec));
  }
  const auto want = [out](const Spec& spec, const std::string& key, const std::string& value, const std::string& served) {
    if (value != served) spec.Refuse(key, Quoted(value), Quoted(served), out);
  };
  want(stages[0], "dtype", stages[0].dtype, "fp8_e4m3");
  want(stages[0], "qscheme", stages[0].qscheme, "per_tensor");
  want(stages[1], "dtype", stages[1].dtype, "int4");
  want(stages[1], "qscheme", stages[1].qscheme, "per_channel");
  TensorOrChannel(stages[1], out);
  if (!stages[1].symmetric.value_or(true)) stages[1].Refuse("symmetric", "false", "true", out);
  for (const Spec& stage : stages) {
    if (stage.is_dynamic) stage.Refuse("is_dynamic", "true", "false", out);
  }
  DeclaredScheme& scheme = out->scheme;
  scheme.container = DeclaredScheme::Container::kTwoStageInt4;
  scheme.twos_complement = true;
  scheme.awq_order = pack_method == "reorder";
  scheme.linear.weights.element = ElementType::kInt4;
  scheme.linear.weights.scale = ScaleType::kF32;
  scheme.linear.weights.group = {1, 0};
  scheme.linear.weights.global_scale = GlobalScale::kMultiplier;
  return absl::OkStatus();
}

void DeclareMxInput(const Spec& spec, ElementType element, Declaration* out) {
  ScaleRule rule = ScaleRule::kMxEven;
  if (spec.scale_mode == "floor") {
    rule = ScaleRule::kMxFloor;
  } else if (spec.scale_mode == "ceil") {
    rule = ScaleRule::kMxCeil;
  } else if (spec.scale_mode != "even") {
    spec.Refuse("scale_calculation_mode", Quoted(spec.scale_mode), "\"even\", \"floor\", \"ceil\"", out);
  }
  if (spec.group_size != 32) spec.Refuse("group_size", absl::StrCat(spec.group_size), "32", out);
  if (!spec.is_dynamic) spec.Refuse("is_dynamic", "false with qscheme \"per_group\"", "true", out);
  out->scheme.linear.input = MxInput(element, rule);
}

void DeclareInput(const Spec& spec, Declaration* out) {
  const bool int8 = spec.dtype == "int8";
  const bool fp8 = spec.dtype == "fp8_e4m3";
  const bool mx = (fp8 || spec.dtype == "fp4") && spec.Mx();
  const ElementType element = int8 ? ElementType::kInt8 : fp8 ? ElementType::kFp8E4m3 : ElementType::kFp4E2m1;
  if (spec.round_method != "half_even") spec.Refuse("round_method", Quoted(spec.round_method), "\"half_even\"", out);
  if (mx) {
    DeclareMxInput(spec, element, out);
  } else if (!int8 && !fp8) {
    spec.Refuse("dtype", absl::StrCat(Quoted(spec.dtype), " with qscheme ", Quoted(spec.qscheme)),
                "\"int8\", \"fp8_e4m3\", and \"fp4\" per group with e8m0 scales", out);
  } else if (spec.qscheme == "per_tensor" && !spec.is_dynamic) {
    out->scheme.linear.input = StaticInput(element);
    out->scheme.linear.input.zero_points = int8 && !spec.symmetric.value_or(true);
  } else if (spec.is_dynamic && (spec.qscheme == "per_tensor" || spec.qscheme == "per_channel")) {
    // "per_channel" of a [tokens, features] tensor whose scales are made at run time means per token.
    out->scheme.linear.input = DynamicInput(element, spec.qscheme == "per_tensor" ? GroupShape{0, 0} : GroupShape{1, 0});
  } else {
    spec.Refuse("qscheme", absl::StrCat(Quoted(spec.qscheme), spec.is_dynamic ? ", dynamic," : ", static,"),
                "per_tensor static and dynamic, per_channel dynamic, per_group of 32 with e8m0 scales", out);
  }
  if (!spec.symmetric.value_or(true) && !out->scheme.linear.input.zero_points) {
    spec.Refuse("symmetric", "false", "true, and false for static int8", out);
  }
}

}  // namespace

absl::StatusOr<Declaration> DeclareQuarkLayer(const json& layer, const std::string& where, const std::string& pack_method) {
  Declaration out;
  ConfigReader reader(layer, where);
  const json* weight = reader.Find("weight");
  const json* input = reader.Find("input_tensors");
  if (weight != nullptr && !weight->is_object() && !weight->is_array()) reader.Fail("weight", "an object, a list or null");
  const bool input_list = input != nullptr && input->is_array();
  if (input != nullptr && !input->is_object() && !input_list) reader.Fail("input_tensors", "an object or null");
  if (!reader.status().ok()) return reader.status();
  for (const char* key : {"output_tensors", "bias"}) {
    if (reader.Has(key)) out.Refuse(where + key, Shown(*reader.Find(key)), "null");
  }
  if (input_list) out.Refuse(where + "input_tensors", Shown(*input), "one specification, or null");
  if (weight == nullptr) {
    if (input != nullptr) out.Refuse(where + "weight", "null with quantized activations", "a specification");
    return out;
  }
  if (weight->is_array()) {
    if (auto status = DeclareTwoStages(*weight, where, pack_method, &out); !status.ok()) return status;
  } else {
    const auto spec = ReadSpec(*weight, where + "weight.");
    if (!spec.ok()) return spec.status();
    DeclareWeights(*spec, pack_method, &out);
  }
  if (input == nullptr || input_list) return out;
  const auto spec = ReadSpec(*input, where + "input_tensors.");
  if (!spec.ok()) return spec.status();
  DeclareInput(*spec, &out);
  return out;
}

}  // namespace moed
