#include "kernels/quant.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace moed {

int ElementBits(ElementType element) {
  switch (element) {
    case ElementType::kF32: return 32;
    case ElementType::kBf16:
    case ElementType::kF16: return 16;
    case ElementType::kInt8:
    case ElementType::kFp8E4m3: return 8;
    case ElementType::kFp6E2m3:
    case ElementType::kFp6E3m2: return 6;
    case ElementType::kInt4:
    case ElementType::kFp4E2m1: return 4;
  }
  return 0;
}

bool IsInteger(ElementType element) { return element == ElementType::kInt4 || element == ElementType::kInt8; }

bool IsUnquantized(ElementType element) {
  return element == ElementType::kF32 || element == ElementType::kBf16 || element == ElementType::kF16;
}

const char* ElementName(ElementType element) {
  switch (element) {
    case ElementType::kF32: return "f32";
    case ElementType::kBf16: return "bf16";
    case ElementType::kF16: return "f16";
    case ElementType::kInt4: return "int4";
    case ElementType::kInt8: return "int8";
    case ElementType::kFp8E4m3: return "fp8";
    case ElementType::kFp4E2m1: return "fp4";
    case ElementType::kFp6E2m3: return "fp6_e2m3";
    case ElementType::kFp6E3m2: return "fp6_e3m2";
  }
  return "?";
}

int ScaleBytes(ScaleType type) {
  switch (type) {
    case ScaleType::kNone: return 0;
    case ScaleType::kF32: return 4;
    case ScaleType::kBf16:
    case ScaleType::kF16: return 2;
    case ScaleType::kE8m0:
    case ScaleType::kE4m3: return 1;
  }
  return 0;
}

const char* ScaleName(ScaleType type) {
  switch (type) {
    case ScaleType::kNone: return "none";
    case ScaleType::kF32: return "f32";
    case ScaleType::kBf16: return "bf16";
    case ScaleType::kF16: return "f16";
    case ScaleType::kE8m0: return "e8m0";
    case ScaleType::kE4m3: return "e4m3";
  }
  return "?";
}

bool ActivationScheme::operator==(const ActivationScheme& other) const {
  if (mode != other.mode) return false;
  if (mode == ActivationMode::kNone) return true;
  return element == other.element && scale == other.scale && group == other.group && rule == other.rule &&
         zero_points == other.zero_points && global_scale == other.global_scale;
}

QuantScheme UniformScheme(const LinearScheme& linear) { return {linear, linear, linear}; }

int64_t GroupCount(int64_t size, int32_t group) {
  if (size <= 0) return 0;
  return group <= 0 ? 1 : (size + group - 1) / group;
}

namespace {

// "g32", "channel", "tensor", "block 128x128".
std::string GroupName(const GroupShape& group, const char* per_row) {
  if (group.rows == 0) return "tensor";
  if (group.cols == 0) return per_row;
  if (group.rows == 1) return absl::StrCat("g", group.cols);
  return absl::StrCat("block ", group.rows, "x", group.cols);
}

std::string Describe(const ActivationScheme& scheme) {
  if (scheme.mode == ActivationMode::kNone) return "16-bit activations";
  return absl::StrCat(ElementName(scheme.element), scheme.mode == ActivationMode::kDynamic ? " dynamic " : " static ",
                      GroupName(scheme.group, "token"), " activations");
}

std::string Describe(const LinearScheme& scheme) {
  return absl::StrCat(moed::Describe(scheme.weights), ", ", Describe(scheme.input));
}

}  // namespace

std::string Describe(const WeightScheme& scheme) {
  if (IsUnquantized(scheme.element)) return ElementName(scheme.element);
  std::string text = absl::StrCat(ElementName(scheme.element), " ", GroupName(scheme.group, "channel"));
  if (IsInteger(scheme.element)) absl::StrAppend(&text, scheme.zero_points ? " asymmetric" : " symmetric");
  if (scheme.act_order) absl::StrAppend(&text, " act-order");
  absl::StrAppend(&text, ", ", ScaleName(scheme.scale), " scales");
  if (scheme.global_scale != GlobalScale::kNone) absl::StrAppend(&text, " with a global scale");
  return text;
}

std::string Describe(const QuantScheme& scheme) {
  if (scheme.gate == scheme.up && scheme.gate == scheme.down) return Describe(scheme.gate);
  return absl::StrCat("gate ", Describe(scheme.gate), "; up ", Describe(scheme.up), "; down ", Describe(scheme.down));
}

}  // namespace moed
