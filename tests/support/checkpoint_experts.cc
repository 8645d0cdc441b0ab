// Expert layers of the checkpoint builder: quantizing by rounding to nearest, and packing as the real tools do.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/number_formats.h"
#include "tests/support/checkpoint_builder.h"

namespace moed::testing {
namespace {

// A matrix as unsigned codes [rows, cols] with zero point 2^(bits-1), and scales [rows, groups] as their type stores them.
struct QuantizedMatrix {
  int64_t groups = 0;
  std::vector<int32_t> group_of;  // [cols]
  std::vector<uint32_t> codes;
  std::vector<float> scales;
  std::vector<float> values;      // dequantized
};

std::vector<int32_t> GroupOfColumns(int64_t cols, const ExpertSpec& spec) {
  const int64_t group = spec.group > 0 ? spec.group : std::max<int64_t>(cols, 1);
  const bool shuffled = spec.format == ExpertFormat::kGptq && spec.group_index == GroupIndex::kShuffled;
  std::vector<int32_t> groups(static_cast<size_t>(cols));
  for (int64_t k = 0; k < cols; ++k) groups[k] = static_cast<int32_t>((shuffled ? (spec.shuffle * k) % cols : k) / group);
  return groups;
}

float RoundScale(float scale, const ExpertSpec& spec) {
  return spec.format == ExpertFormat::kGptq && !spec.bf16_scales ? F16ToFloat(FloatToF16(scale)) : Bf16ToFloat(FloatToBf16(scale));
}

QuantizedMatrix Quantize(int64_t rows, int64_t cols, const ExpertSpec& spec, const std::function<float(int64_t)>& weight) {
  const int zero = 1 << (spec.bits - 1);
  const float divisor = static_cast<float>(spec.scale_divisor > 0 ? spec.scale_divisor : zero - 1);
  QuantizedMatrix out;
  out.group_of = GroupOfColumns(cols, spec);
  out.groups = spec.group > 0 ? (cols + spec.group - 1) / spec.group : 1;
  out.codes.resize(static_cast<size_t>(rows * cols));
  out.values.resize(out.codes.size());
  out.scales.resize(static_cast<size_t>(rows * out.groups));
  for (int64_t n = 0; n < rows; ++n) {
    float* values = out.values.data() + n * cols;
    float* scales = out.scales.data() + n * out.groups;
    for (int64_t k = 0; k < cols; ++k) {
      values[k] = weight(n * cols + k);
      scales[out.group_of[k]] = std::max(scales[out.group_of[k]], std::abs(values[k]));
    }
    for (int64_t g = 0; g < out.groups; ++g) {
      scales[g] = RoundScale(scales[g] / divisor, spec);
      if (scales[g] == 0.0f) scales[g] = 1.0f;  // zeros, or too small for the type: every code is the zero point
    }
    for (int64_t k = 0; k < cols; ++k) {
      const int code = static_cast<int>(std::nearbyint(values[k] / scales[out.group_of[k]]));
      out.codes[n * cols + k] = static_cast<uint32_t>(std::clamp(code, -zero, zero - 1) + zero);
    }
    for (int64_t g = 0; spec.vary_groups && g < out.groups; ++g) {
      scales[g] = RoundScale(std::ldexp(scales[g], -static_cast<int>(g % 4)), spec);
    }
    for (int64_t k = 0; k < cols; ++k) {
      values[k] = static_cast<float>(static_cast<int>(out.codes[n * cols + k]) - zero) * scales[out.group_of[k]];
    }
  }
  return out;
}

void CheckPackable(const std::string& what, int64_t size, int bits) {
  if ((bits == 4 || bits == 8) && size * bits % 32 == 0) return;
  std::fprintf(stderr, "test set-up: %s: %ld elements of %d bits do not fill 32-bit words\n", what.c_str(),
               static_cast<long>(size), bits);
  std::abort();
}

// Tensors of GPTQ: everything runs along K first, zero points along N.
void AddGptq(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols, const ExpertSpec& spec,
             const QuantizedMatrix& matrix) {
  CheckPackable(prefix, cols, spec.bits);
  CheckPackable(prefix, rows, spec.bits);
  const int64_t per_word = 32 / spec.bits;
  std::vector<uint32_t> words(static_cast<size_t>(cols / per_word * rows));
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t k = 0; k < cols; ++k) {
      words[k / per_word * rows + n] |= matrix.codes[n * cols + k] << (spec.bits * (k % per_word));
    }
  }
  const uint32_t zero = (1u << (spec.bits - 1)) - (spec.gptq_v2 ? 0 : 1);
  const uint32_t zero_word = zero * (spec.bits == 4 ? 0x11111111u : 0x01010101u);
  std::vector<int32_t> zeros(static_cast<size_t>(matrix.groups * rows / per_word), static_cast<int32_t>(zero_word));
  std::vector<float> scales(matrix.scales.size());
  for (int64_t n = 0; n < rows; ++n) {
    for (int64_t g = 0; g < matrix.groups; ++g) scales[g * rows + n] = matrix.scales[n * matrix.groups + g];
  }
  const std::vector<int32_t> signed_words(words.begin(), words.end());
  builder->AddInt32(absl::StrCat(prefix, ".qweight"), {cols / per_word, rows}, signed_words);
  builder->AddInt32(absl::StrCat(prefix, ".qzeros"), {matrix.groups, rows / per_word}, zeros);
  builder->AddFloats(absl::StrCat(prefix, ".scales"), spec.bf16_scales ? StDtype::kBf16 : StDtype::kF16, {matrix.groups, rows},
                     scales);
  if (spec.group_index != GroupIndex::kNone) builder->AddInt32(absl::StrCat(prefix, ".g_idx"), {cols}, matrix.group_of);
}

// Tensors of compressed-tensors: the plain orientation, packed along K.
void AddPacked(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols, const ExpertSpec& spec,
               const QuantizedMatrix& matrix) {
  CheckPackable(prefix, cols, spec.bits);
  const int64_t per_word = 32 / spec.bits;
  std::vector<uint32_t> words(static_cast<size_t>(rows * (cols / per_word)));
  for (int64_t at = 0; at < rows * cols; ++at) {
    words[at / per_word] |= matrix.codes[at] << (spec.bits * (at % per_word));
  }
  const std::vector<int32_t> signed_words(words.begin(), words.end());
  const std::vector<int64_t> shape = {rows, cols};
  builder->AddInt32(absl::StrCat(prefix, ".weight_packed"), {rows, cols / per_word}, signed_words);
  builder->AddFloats(absl::StrCat(prefix, ".weight_scale"), StDtype::kBf16, {rows, matrix.groups}, matrix.scales);
  builder->AddInt64(absl::StrCat(prefix, ".weight_shape"), {2}, shape);
}

StDtype PlainDtype(ExpertFormat format) {
  if (format == ExpertFormat::kF32) return StDtype::kF32;
  return format == ExpertFormat::kF16 ? StDtype::kF16 : StDtype::kBf16;
}

float RoundPlain(float value, StDtype dtype) {
  if (dtype == StDtype::kBf16) return Bf16ToFloat(FloatToBf16(value));
  return dtype == StDtype::kF16 ? F16ToFloat(FloatToF16(value)) : value;
}

std::vector<float> PlainValues(int64_t count, StDtype dtype, const std::function<float(int64_t)>& weight) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[i] = RoundPlain(weight(i), dtype);
  return values;
}

std::vector<float> BiasValues(int64_t count, StDtype dtype, int expert, int projection, const WeightFn& biases) {
  return PlainValues(count, dtype, [&](int64_t i) { return biases ? biases(expert, projection, i) : 0.0f; });
}

std::vector<ExpertReference> AddFused(CheckpointBuilder* builder, const std::string& prefix, int num_experts, int64_t hidden,
                                      int64_t intermediate, StDtype dtype, const WeightFn& weights, const WeightFn& biases) {
  std::vector<ExpertReference> experts(static_cast<size_t>(num_experts));
  std::vector<float> gate_up(static_cast<size_t>(num_experts * hidden * 2 * intermediate));
  std::vector<float> down(static_cast<size_t>(num_experts * intermediate * hidden));
  std::vector<float> gate_up_bias(static_cast<size_t>(num_experts * 2 * intermediate));
  std::vector<float> down_bias;
  for (int e = 0; e < num_experts; ++e) {
    ExpertReference& expert = experts[e];
    const auto of = [&weights, e](int projection) {
      return [&weights, e, projection](int64_t i) { return weights(e, projection, i); };
    };
    expert.gate = PlainValues(intermediate * hidden, dtype, of(kGate));
    expert.up = PlainValues(intermediate * hidden, dtype, of(kUp));
    expert.down = PlainValues(hidden * intermediate, dtype, of(kDown));
    expert.gate_bias = BiasValues(intermediate, dtype, e, kGate, biases);
    expert.up_bias = BiasValues(intermediate, dtype, e, kUp, biases);
    expert.down_bias = BiasValues(hidden, dtype, e, kDown, biases);
    for (int64_t i = 0; i < intermediate; ++i) {
      for (int64_t h = 0; h < hidden; ++h) {
        const int64_t at = ((e * hidden + h) * intermediate + i) * 2;
        gate_up[at] = expert.gate[i * hidden + h];
        gate_up[at + 1] = expert.up[i * hidden + h];
        down[(e * intermediate + i) * hidden + h] = expert.down[h * intermediate + i];
      }
      gate_up_bias[(e * intermediate + i) * 2] = expert.gate_bias[i];
      gate_up_bias[(e * intermediate + i) * 2 + 1] = expert.up_bias[i];
    }
    down_bias.insert(down_bias.end(), expert.down_bias.begin(), expert.down_bias.end());
  }
  const int64_t count = num_experts;
  builder->AddFloats(absl::StrCat(prefix, "gate_up_proj"), dtype, {count, hidden, 2 * intermediate}, gate_up);
  builder->AddFloats(absl::StrCat(prefix, "gate_up_proj_bias"), dtype, {count, 2 * intermediate}, gate_up_bias);
  builder->AddFloats(absl::StrCat(prefix, "down_proj"), dtype, {count, intermediate, hidden}, down);
  builder->AddFloats(absl::StrCat(prefix, "down_proj_bias"), dtype, {count, hidden}, down_bias);
  return experts;
}

}  // namespace

std::vector<float> AddProjection(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols,
                                 const ExpertSpec& spec, const std::function<float(int64_t)>& weight) {
  if (spec.format >= ExpertFormat::kAwq || spec.asymmetric || spec.per_tensor) {
    return AddOtherFormat(builder, prefix, rows, cols, spec, weight);
  }
  if (spec.format != ExpertFormat::kGptq && spec.format != ExpertFormat::kPacked) {
    const StDtype dtype = PlainDtype(spec.format);
    std::vector<float> values = PlainValues(rows * cols, dtype, weight);
    builder->AddFloats(absl::StrCat(prefix, ".weight"), dtype, {rows, cols}, values);
    return values;
  }
  QuantizedMatrix matrix = Quantize(rows, cols, spec, weight);
  if (spec.format == ExpertFormat::kGptq) AddGptq(builder, prefix, rows, cols, spec, matrix);
  if (spec.format == ExpertFormat::kPacked) AddPacked(builder, prefix, rows, cols, spec, matrix);
  return std::move(matrix.values);
}

std::vector<ExpertReference> AddExperts(CheckpointBuilder* builder, const std::string& layer_prefix, ExpertNames names,
                                        int num_experts, int64_t hidden, int64_t intermediate, const ExpertSpec& spec,
                                        const WeightFn& weights, const WeightFn& biases) {
  if (names == ExpertNames::kGptOssFused) {
    return AddFused(builder, absl::StrCat(layer_prefix, "mlp.experts."), num_experts, hidden, intermediate,
                    PlainDtype(spec.format), weights, biases);
  }
  const bool w123 = names == ExpertNames::kW123;
  std::vector<ExpertReference> experts(static_cast<size_t>(num_experts));
  for (int e = 0; e < num_experts; ++e) {
    const std::string prefix = absl::StrCat(layer_prefix, w123 ? "block_sparse_moe.experts." : "mlp.experts.", e, ".");
    const auto add = [&](const char* name, int64_t rows, int64_t cols, int projection) {
      return AddProjection(builder, absl::StrCat(prefix, name), rows, cols, spec,
                           [&weights, e, projection](int64_t i) { return weights(e, projection, i); });
    };
    experts[e].gate = add(w123 ? "w1" : "gate_proj", intermediate, hidden, kGate);
    experts[e].up = add(w123 ? "w3" : "up_proj", intermediate, hidden, kUp);
    experts[e].down = add(w123 ? "w2" : "down_proj", hidden, intermediate, kDown);
  }
  return experts;
}

}  // namespace moed::testing
