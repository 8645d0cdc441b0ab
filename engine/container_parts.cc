#include "engine/container_parts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/packing.h"
#include "kernels/number_formats.h"

namespace moed {

int64_t GroupSize(const LinearSource& source) {
  const int32_t cols = source.linear().weights.group.cols;
  return cols > 0 ? cols : source.cols;
}

int64_t GroupsAlongK(const LinearSource& source) { return GroupCount(source.cols, source.linear().weights.group.cols); }

absl::Status CheckInteger(const LinearSource& source) {
  if (IsInteger(source.linear().weights.element)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(source.module, ": ", ContainerName(source.declared.container),
                                                 " holds int4 or int8, ", "the config declares ",
                                                 Describe(source.linear().weights)));
}

std::vector<Shape> ScaleShapes(const LinearSource& source, GroupShape group) {
  const int64_t rows = GroupCount(source.rows, group.rows), cols = GroupCount(source.cols, group.cols);
  if (group.rows == 0 && group.cols == 0) return {Shape{1}, Shape{}, Shape{1, 1}};
  std::vector<Shape> shapes = {Shape{rows, cols}};
  if (cols == 1) shapes.push_back(Shape{rows});
  if (group.rows > 1) shapes.push_back(Shape{rows, 1, cols, 1});
  return shapes;
}

absl::Status TakeFloatScales(LinearSource* source) {
  const TensorRef& scales = source->scales;
  if (!scales) return absl::OkStatus();
  MOED_RETURN_IF_ERROR(CheckFloat(scales));
  WeightScheme& weights = source->declared.linear.weights;
  weights.scale = FloatScaleType(scales.info->dtype);
  const GroupShape channel = {1, 0};
  if (weights.group == GroupShape{0, 0}) {
    const std::vector<Shape> shapes = ScaleShapes(*source, weights.group);
    const bool tensor = std::find(shapes.begin(), shapes.end(), scales.info->shape) != shapes.end();
    if (!tensor && CheckShape(scales, ScaleShapes(*source, channel)).ok()) weights.group = channel;
  }
  return CheckShape(scales, ScaleShapes(*source, weights.group));
}

absl::Status FindGroupIndex(TensorFinder& finder, const std::string& name, LinearSource* source) {
  source->g_idx = finder.Optional(name);
  MOED_RETURN_IF_ERROR(CheckShape(source->g_idx, {Shape{source->cols}}));
  MOED_RETURN_IF_ERROR(CheckDtype(source->g_idx, {StDtype::kI32}));
  WeightScheme& weights = source->declared.linear.weights;
  weights.act_order = weights.act_order && source->g_idx && GroupsAlongK(*source) > 1;
  return absl::OkStatus();
}

absl::Status ReadGroupIndex(const LinearSource& source, bool unset_means_none, LinearWeights* out) {
  if (!source.g_idx) return absl::OkStatus();
  std::vector<uint8_t> raw;
  absl::Status status = ReadBytes(source.g_idx, &raw);
  if (!status.ok()) return AtTensor(source.g_idx, status);
  std::vector<int32_t>& index = out->group_index;
  ReadInt32(raw, &index);
  const int64_t group = GroupSize(source);
  const bool act_order = source.linear().weights.act_order;
  if (unset_means_none && std::find(index.begin(), index.end(), -1) != index.end()) {
    for (int64_t k = 0; k < source.cols; ++k) index[k] = static_cast<int32_t>(k / group);
  }
  status = act_order ? CheckGroupRange(index, GroupsAlongK(source)) : CheckTrivialGroupIndex(index, group);
  if (!act_order) index.clear();
  return AtTensor(source.g_idx, status);
}

namespace {

// Index of the first of the little-endian words whose bits of `mask` are all set, the number of words when there is none. One
// pass without leaving the loop, so that the compiler can do many at once, and a second one where it found something.
template <typename Word>
size_t FirstWithAllSet(std::span<const uint8_t> bytes, Word mask) {
  const size_t count = bytes.size() / sizeof(Word);
  const auto word = [&](size_t at) {
    Word value;
    std::memcpy(&value, bytes.data() + at * sizeof(Word), sizeof(Word));
    return value;
  };
  Word found = 0;
  for (size_t at = 0; at < count; ++at) found |= (word(at) & mask) == mask;
  if (found == 0) return count;
  size_t at = 0;
  while ((word(at) & mask) != mask) ++at;
  return at;
}

// Index of the first scale that is NaN or infinite: all bits of its exponent are set.
size_t FirstNotFinite(ScaleType type, std::span<const uint8_t> scales) {
  if (type == ScaleType::kF32) return FirstWithAllSet<uint32_t>(scales, 0x7F800000u);
  return FirstWithAllSet<uint16_t>(scales, type == ScaleType::kF16 ? 0x7C00 : 0x7F80);
}

absl::Status BadScale(size_t at, const std::string& value, const char* want) {
  return absl::InvalidArgumentError(absl::StrCat("scale ", at, " is ", value, ", want ", want));
}

}  // namespace

absl::Status CheckScaleValues(ScaleType type, std::span<const uint8_t> scales) {
  if (type == ScaleType::kE8m0) {
    const auto bad = std::find(scales.begin(), scales.end(), 0xFF);
    if (bad == scales.end()) return absl::OkStatus();
    return BadScale(bad - scales.begin(), "the NaN byte 0xFF", "an E8M0 exponent 0x00 .. 0xFE");
  }
  if (type == ScaleType::kE4m3) {
    const auto bad = std::find_if(scales.begin(), scales.end(), [](uint8_t byte) { return byte >= 0x7F; });
    if (bad == scales.end()) return absl::OkStatus();
    const bool nan = *bad == 0x7F || *bad == 0xFF;
    return BadScale(bad - scales.begin(),
                    absl::StrCat(nan ? "the NaN byte 0x" : "the negative byte 0x",
                                 absl::Hex(static_cast<unsigned>(*bad), absl::kZeroPad2)),
                    "an E4M3 scale 0x00 .. 0x7e");
  }
  const size_t size = static_cast<size_t>(ScaleBytes(type)), bad = FirstNotFinite(type, scales);
  if (bad == scales.size() / size) return absl::OkStatus();
  const StDtype dtype = type == ScaleType::kF32 ? StDtype::kF32 : type == ScaleType::kF16 ? StDtype::kF16 : StDtype::kBf16;
  return BadScale(bad, absl::StrCat(ElementAsFloat(dtype, scales.data() + bad * size)), "a finite number");
}

absl::Status CheckFp8Codes(std::span<const uint8_t> codes) {
  const size_t bad = FirstWithAllSet<uint8_t>(codes, 0x7F);
  if (bad == codes.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("element ", bad, " is the NaN byte 0x", absl::Hex(static_cast<unsigned>(codes[bad])),
                                                 ", want a finite FP8 code"));
}

absl::Status CheckAllZero(const TensorRef& tensor) {
  if (!tensor) return absl::OkStatus();
  std::vector<uint8_t> raw;
  absl::Status status = ReadBytes(tensor, &raw);
  if (!status.ok()) return AtTensor(tensor, status);
  const auto bad = std::find_if(raw.begin(), raw.end(), [](uint8_t byte) { return byte != 0; });
  if (bad == raw.end()) return absl::OkStatus();
  const size_t element = (bad - raw.begin()) / std::max(StDtypeBits(tensor.info->dtype) / 8, 1);
  return TensorError(tensor,
                     absl::StrCat("element ", element, " is not zero, want zero points of 0 since the scheme is symmetric"));
}

absl::Status ReadScales(const LinearSource& source, LinearWeights* out) {
  absl::Status status = ReadBytes(source.scales, &out->scales);
  if (status.ok()) status = CheckScaleValues(source.linear().weights.scale, out->scales);
  return AtTensor(source.scales, status);
}

absl::Status ReadTransposedScales(const LinearSource& source, LinearWeights* out) {
  std::vector<uint8_t> raw;
  absl::Status status = ReadBytes(source.scales, &raw);
  if (status.ok()) status = CheckScaleValues(source.linear().weights.scale, raw);
  if (!status.ok()) return AtTensor(source.scales, status);
  TransposeElements(raw, GroupsAlongK(source), source.rows, ScaleBytes(source.linear().weights.scale), &out->scales);
  return absl::OkStatus();
}

absl::StatusOr<float> ReadNumber(const TensorRef& tensor, bool zero_allowed) {
  std::vector<float> values;
  absl::Status status = ReadFloats(tensor, &values);
  if (!status.ok()) return AtTensor(tensor, status);
  const float value = values.front();
  if (std::isfinite(value) && (value > 0.0f || (zero_allowed && value == 0.0f))) return value;
  return TensorError(tensor,
                     absl::StrCat("is ", value, ", want a finite number ", zero_allowed ? "of at least 0" : "above 0"));
}

}  // namespace moed
