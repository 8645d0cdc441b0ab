#include "bench/cases.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace moed::bench {
namespace {

constexpr Activation kSwigluOai7{Activation::Kind::kSwigluOai, 1.702f, true, 7.0f};

constexpr Shape kShapes[] = {{"qwen3-30b", 128, 8, 2048, 768},
                             {"mixtral-8x7b", 8, 2, 4096, 14336},
                             // 32 of its 256 experts: all of them do not fit into the memory of most machines.
                             {"deepseek-v3-slice", 32, 8, 7168, 2048},
                             {"gpt-oss-20b", 32, 4, 2880, 2880, kSwigluOai7, true}};
constexpr Shape kPairShapes[] = {{"rc-176", 128, 8, 1024, 176}, {"rc-192", 128, 8, 1024, 192}};

NamedScheme Named(const char* name, ElementType element, ScaleType scale, GroupShape group) {
  LinearScheme linear;
  linear.weights.element = element;
  linear.weights.scale = scale;
  linear.weights.group = group;
  return {name, UniformScheme(linear)};
}

NamedScheme WithZeroPoints(NamedScheme named) {
  for (LinearScheme* linear : {&named.scheme.gate, &named.scheme.up, &named.scheme.down}) linear->weights.zero_points = true;
  return named;
}

NamedScheme WithGlobalScale(NamedScheme named) {
  for (LinearScheme* linear : {&named.scheme.gate, &named.scheme.up, &named.scheme.down}) {
    linear->weights.global_scale = GlobalScale::kMultiplier;
  }
  return named;
}

// The same weights with activations quantized to int8, one dynamic scale a token.
NamedScheme WithInt8Activations(const NamedScheme& named) {
  NamedScheme result{named.name + "-a8", named.scheme};
  for (LinearScheme* linear : {&result.scheme.gate, &result.scheme.up, &result.scheme.down}) {
    linear->input.mode = ActivationMode::kDynamic;
    linear->input.element = ElementType::kInt8;
  }
  return result;
}

bool QuantizesToInt8(const ActivationScheme& input) {
  return input.mode != ActivationMode::kNone && input.element == ElementType::kInt8;
}

}  // namespace

std::span<const Shape> Shapes() { return kShapes; }
std::span<const Shape> PairShapes() { return kPairShapes; }

std::vector<NamedScheme> Schemes() {
  const NamedScheme g128 = Named("int4-g128", ElementType::kInt4, ScaleType::kF16, {1, 128});
  const NamedScheme g32 = Named("int4-g32", ElementType::kInt4, ScaleType::kBf16, {1, 32});
  const NamedScheme asymmetric =
      WithZeroPoints(Named("int4-g128-asymmetric", ElementType::kInt4, ScaleType::kF16, {1, 128}));
  const NamedScheme channel = Named("int4-channel", ElementType::kInt4, ScaleType::kF16, {1, 0});
  const NamedScheme int8 = Named("int8", ElementType::kInt8, ScaleType::kBf16, {1, 0});
  const NamedScheme mxfp4 = Named("mxfp4", ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32});
  return {g128,
          g32,
          asymmetric,
          channel,
          int8,
          Named("fp8-block128", ElementType::kFp8E4m3, ScaleType::kF32, {128, 128}),
          mxfp4,
          WithGlobalScale(Named("nvfp4", ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16})),
          Named("bf16", ElementType::kBf16, ScaleType::kNone, {}),
          WithInt8Activations(g128),
          WithInt8Activations(g32),
          WithInt8Activations(asymmetric),
          WithInt8Activations(channel),
          WithInt8Activations(int8),
          WithInt8Activations(mxfp4)};
}

MoeDesc DescOf(const Shape& shape, const QuantScheme& scheme) {
  MoeDesc desc;
  desc.num_experts = shape.experts;
  desc.top_k = shape.top_k;
  desc.hidden = shape.hidden;
  desc.intermediate = shape.intermediate;
  desc.activation = shape.activation;
  desc.biases = shape.biases;
  desc.scheme = scheme;
  desc.max_tokens = kMaxTokens;
  return desc;
}

absl::StatusOr<std::vector<Shape>> ChooseShapes(const std::string& names, const std::string& filter) {
  std::vector<Shape> chosen;
  if (names.empty()) {
    const std::string word = filter.substr(0, filter.find('/'));
    for (const Shape& shape : kShapes) {
      if (word.size() >= 3 && std::string_view(shape.name).find(word) != std::string_view::npos) chosen.push_back(shape);
    }
    if (chosen.empty()) chosen.push_back(kShapes[0]);
    return chosen;
  }
  if (names == "all") return std::vector<Shape>(std::begin(kShapes), std::end(kShapes));
  const std::vector<std::string> wanted = absl::StrSplit(names, ',');
  for (const std::string& name : wanted) {
    const Shape* shape = std::find_if(std::begin(kShapes), std::end(kShapes), [&](const Shape& one) { return one.name == name; });
    if (shape == std::end(kShapes)) {
      const auto append_name = [](std::string* out, const Shape& one) { out->append(one.name); };
      return absl::InvalidArgumentError(absl::StrCat("shapes: wanted all or names of ", absl::StrJoin(kShapes, ", ", append_name),
                                                     "; got \"", name, "\""));
    }
    chosen.push_back(*shape);
  }
  return chosen;
}

Ceiling CeilingOf(const QuantScheme& scheme, std::string_view backend, double rows_per_expert) {
  if (rows_per_expert <= 2.0) return Ceiling::kReadStream;
  const ActivationScheme* const inputs[] = {&scheme.gate.input, &scheme.up.input, &scheme.down.input};
  if (std::all_of(std::begin(inputs), std::end(inputs), [](const ActivationScheme* input) { return QuantizesToInt8(*input); })) {
    if (backend == "cpu_amx") return Ceiling::kTileInt8;
    for (const char* name : {"cpu_vnni", "cpu_avxvnni", "cpu_avx512", "cpu_avx2"}) {
      if (backend == name) return Ceiling::kInt8Dot;
    }
  }
  const bool plain = std::all_of(std::begin(inputs), std::end(inputs),
                                 [](const ActivationScheme* input) { return input->mode == ActivationMode::kNone; });
  if (plain && backend == "cpu_avx512bf16") return Ceiling::kBf16Dot;
  if (plain && backend == "cpu_amx") return Ceiling::kTileBf16;
  return Ceiling::kFloatFma;
}

}  // namespace moed::bench
