// The many containers of quantized matrices, written element by element as their specification says: slow, and sharing no
// code with the readers that it tests.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "kernels/number_formats.h"
#include "tests/support/checkpoint_builder.h"

namespace moed::testing {
namespace {

using Format = ExpertFormat;

// A quantized matrix: raw scales as numbers, unsigned integer codes or float codes, and what they stand for.
struct Matrix {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t group_cols = 0;      // groups along K
  std::vector<float> scales;   // [group rows, group_cols]
  std::vector<uint8_t> bytes;  // the same as E8M0 or E4M3 bytes
  std::vector<uint32_t> zeros;
  std::vector<uint32_t> codes;
  std::vector<float> values;
  float global = 1.0f;
};

bool IsMx(Format f) {
  return f == Format::kMxfp8 || f == Format::kMxfp4 || f == Format::kMxfp4Packed || f == Format::kMxfp4Short;
}
bool IsNvfp4(Format f) { return f == Format::kNvfp4 || f == Format::kNvfp4Packed; }
bool IsFloatCode(Format f) { return f == Format::kFp8 || IsMx(f) || IsNvfp4(f); }
bool IsFp8(Format f) { return f == Format::kFp8 || f == Format::kMxfp8; }

[[noreturn]] void SetUpError(const std::string& text) {
  std::fprintf(stderr, "test set-up: %s\n", text.c_str());
  std::abort();
}

int64_t GroupSize(int64_t cols, const ExpertSpec& spec) {
  if (IsMx(spec.format)) return 32;
  if (IsNvfp4(spec.format)) return 16;
  return spec.group > 0 && !spec.per_tensor && spec.format != Format::kQuarkTwoStage ? spec.group : cols;
}

float RoundTo(float value, StDtype dtype) {
  if (dtype == StDtype::kBf16) return Bf16ToFloat(FloatToBf16(value));
  return dtype == StDtype::kF16 ? F16ToFloat(FloatToF16(value)) : value;
}

StDtype ScaleDtype(const ExpertSpec& spec) {
  switch (spec.format) {
    case Format::kGptq:
    case Format::kAwq: return StDtype::kF16;
    case Format::kInt8:
    case Format::kFp8: return spec.scale_dtype;
    case Format::kQuarkTwoStage: return StDtype::kF32;
    default: return StDtype::kBf16;
  }
}

int ZeroOf(const ExpertSpec& spec, size_t group) {
  const int codes = 1 << spec.bits;
  return spec.asymmetric || spec.format == Format::kAwq ? static_cast<int>((group * 7) % codes) : codes / 2;
}

// The scale of a group with the largest magnitude `absmax`, as its type stores it.
float TakeScale(const ExpertSpec& spec, float absmax, Matrix* m, size_t group) {
  if (IsMx(spec.format)) {
    const int exponent =
        absmax > 0 ? static_cast<int>(std::ceil(std::log2(absmax / (IsFp8(spec.format) ? 448.0f : 6.0f)))) : 0;
    m->bytes[group] = static_cast<uint8_t>(std::clamp(exponent + 127, 0, 254));
    return E8m0ToFloat(m->bytes[group]);
  }
  if (IsNvfp4(spec.format)) {
    const float stored = spec.format == Format::kNvfp4 ? absmax / 6.0f / m->global : absmax / 6.0f * m->global;
    m->bytes[group] = FloatToE4m3(std::max(stored, 0x1p-9f));
    return E4m3ToFloat(m->bytes[group]);
  }
  const float largest = IsFp8(spec.format) ? 448.0f : static_cast<float>((1 << (spec.bits - 1)) - 1);
  const float scale = RoundTo(absmax / largest, ScaleDtype(spec));
  return scale == 0.0f ? 1.0f : scale;
}

// The factor of a code, in the order of operations that the formats define.
float Factor(const ExpertSpec& spec, const Matrix& m, size_t group) {
  if (spec.format == Format::kNvfp4Packed) return m.scales[group] / m.global;
  if (spec.format == Format::kNvfp4 || spec.format == Format::kQuarkTwoStage) return m.scales[group] * m.global;
  return m.scales[group];
}

Matrix QuantizeAny(int64_t rows, int64_t cols, const ExpertSpec& spec, const std::function<float(int64_t)>& weight) {
  Matrix m;
  m.rows = rows;
  m.cols = cols;
  const int64_t size = GroupSize(cols, spec), row_size = spec.per_tensor ? rows : std::max(spec.block_rows, 1);
  m.group_cols = (cols + size - 1) / size;
  const size_t groups = static_cast<size_t>((rows + row_size - 1) / row_size * m.group_cols);
  const auto group_of = [&](int64_t n, int64_t k) { return static_cast<size_t>(n / row_size * m.group_cols + k / size); };
  std::vector<float> absmax(groups, 0.0f);
  float largest = 0.0f;
  m.values.resize(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows * cols; ++i) {
    m.values[i] = weight(i);
    float& of_group = absmax[group_of(i / cols, i % cols)];
    of_group = std::max(of_group, std::abs(m.values[i]));
    largest = std::max(largest, of_group);
  }
  if (spec.format == Format::kNvfp4) m.global = largest / (6.0f * 448.0f);
  if (spec.format == Format::kNvfp4Packed) m.global = 6.0f * 448.0f / largest;
  if (spec.format == Format::kQuarkTwoStage) m.global = largest / 448.0f;
  m.bytes.resize(groups);
  for (size_t g = 0; g < groups; ++g) {
    m.scales.push_back(TakeScale(spec, spec.format == Format::kQuarkTwoStage ? absmax[g] / m.global : absmax[g], &m, g));
    m.zeros.push_back(static_cast<uint32_t>(ZeroOf(spec, g)));
  }
  m.codes.resize(m.values.size());
  for (int64_t i = 0; i < rows * cols; ++i) {
    const size_t g = group_of(i / cols, i % cols);
    const float factor = Factor(spec, m, g);
    if (IsFloatCode(spec.format)) {
      m.codes[i] = IsFp8(spec.format) ? FloatToE4m3(m.values[i] / factor) : FloatToE2m1(m.values[i] / factor);
      const uint8_t code = static_cast<uint8_t>(m.codes[i]);
      m.values[i] = (IsFp8(spec.format) ? E4m3ToFloat(code) : E2m1ToFloat(code)) * factor;
    } else {
      const int zero = static_cast<int>(m.zeros[g]);
      const int code = std::clamp(static_cast<int>(std::nearbyint(m.values[i] / factor)) + zero, 0, (1 << spec.bits) - 1);
      m.codes[i] = static_cast<uint32_t>(code);
      m.values[i] = static_cast<float>(code - zero) * factor;
    }
  }
  return m;
}

// Puts a field of `bits` bits into words [.., words_per_row]: element `at` of row `row`.
struct WordGrid {
  int64_t per_row;
  std::vector<int32_t> words;

  WordGrid(int64_t rows, int64_t words_per_row) : per_row(words_per_row), words(static_cast<size_t>(rows * words_per_row)) {}
  void Put(int64_t row, int64_t word, int shift, uint32_t code) {
    int32_t& target = words[row * per_row + word];
    target = static_cast<int32_t>(static_cast<uint32_t>(target) | code << shift);
  }
};

// Nibble of column 8 c + j within its word.
int NibbleOf(int64_t j, bool awq) {
  constexpr int kAwq[8] = {0, 4, 1, 5, 2, 6, 3, 7};
  return awq ? kAwq[j % 8] : static_cast<int>(j % 8);
}

std::vector<float> Transposed(const std::vector<float>& in, int64_t rows, int64_t cols) {
  std::vector<float> out(in.size());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) out[c * rows + r] = in[r * cols + c];
  }
  return out;
}

void AddGptqAsymmetric(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  const int64_t per_word = 32 / spec.bits;
  WordGrid codes((m.cols + per_word - 1) / per_word, m.rows), zeros(m.group_cols, (m.rows + per_word - 1) / per_word);
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t k = 0; k < m.cols; ++k) {
      codes.Put(k / per_word, n, spec.bits * static_cast<int>(k % per_word), m.codes[n * m.cols + k]);
    }
    for (int64_t g = 0; g < m.group_cols; ++g) {
      zeros.Put(g, n / per_word, spec.bits * static_cast<int>(n % per_word), m.zeros[n * m.group_cols + g]);
    }
  }
  // The writer of version 1 subtracts from whole words.
  const uint32_t ones = spec.bits == 4 ? 0x11111111u : 0x01010101u;
  for (int32_t& word : zeros.words) word = static_cast<int32_t>(static_cast<uint32_t>(word) - (spec.gptq_v2 ? 0 : ones));
  b->AddInt32(prefix + ".qweight", {static_cast<int64_t>(codes.words.size()) / m.rows, m.rows}, codes.words);
  b->AddInt32(prefix + ".qzeros", {m.group_cols, zeros.per_row}, zeros.words);
  b->AddFloats(prefix + ".scales", StDtype::kF16, {m.group_cols, m.rows}, Transposed(m.scales, m.rows, m.group_cols));
}

void AddPackedAny(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  const int64_t per_word = 32 / spec.bits, scale_rows = spec.per_tensor ? 1 : m.rows;
  WordGrid codes(m.rows, (m.cols + per_word - 1) / per_word), zeros((scale_rows + per_word - 1) / per_word, m.group_cols);
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t k = 0; k < m.cols; ++k) {
      codes.Put(n, k / per_word, spec.bits * static_cast<int>(k % per_word), m.codes[n * m.cols + k]);
    }
  }
  for (int64_t n = 0; n < scale_rows; ++n) {
    for (int64_t g = 0; g < m.group_cols; ++g) {
      zeros.Put(n / per_word, g, spec.bits * static_cast<int>(n % per_word), m.zeros[n * m.group_cols + g]);
    }
  }
  const int64_t shape[2] = {m.rows, m.cols};
  b->AddInt32(prefix + ".weight_packed", {m.rows, codes.per_row}, codes.words);
  b->AddInt64(prefix + ".weight_shape", {2}, shape);
  const std::vector<int64_t> scale_shape =
      spec.per_tensor ? std::vector<int64_t>{1} : std::vector<int64_t>{m.rows, m.group_cols};
  b->AddFloats(prefix + ".weight_scale", StDtype::kBf16, scale_shape, m.scales);
  if (spec.asymmetric) {
    b->AddInt32(prefix + ".weight_zero_point", {static_cast<int64_t>(zeros.words.size()) / m.group_cols, m.group_cols},
                zeros.words);
  }
}

// AWQ and Quark's transposed form.
void AddAlongN(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  if (m.rows % 8 != 0) SetUpError(absl::StrCat(prefix, ": ", m.rows, " rows do not fill words"));
  const bool awq = spec.format == Format::kAwq;
  const bool order = awq || spec.awq_order;
  const uint32_t flip = !awq && spec.twos_complement ? 8 : 0;
  WordGrid codes(m.cols, m.rows / 8), zeros(m.group_cols, m.rows / 8);
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t k = 0; k < m.cols; ++k) codes.Put(k, n / 8, 4 * NibbleOf(n, order), m.codes[n * m.cols + k] ^ flip);
    for (int64_t g = 0; g < m.group_cols; ++g)
      zeros.Put(g, n / 8, 4 * NibbleOf(n, order), m.zeros[n * m.group_cols + g] ^ flip);
  }
  b->AddInt32(prefix + (awq ? ".qweight" : ".weight"), {m.cols, m.rows / 8}, codes.words);
  b->AddInt32(prefix + (awq ? ".qzeros" : ".weight_zero_point"), {m.group_cols, m.rows / 8}, zeros.words);
  b->AddFloats(prefix + (awq ? ".scales" : ".weight_scale"), ScaleDtype(spec), {m.group_cols, m.rows},
               Transposed(m.scales, m.rows, m.group_cols));
}

void AddTwoStage(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  if (m.cols % 8 != 0) SetUpError(absl::StrCat(prefix, ": ", m.cols, " columns do not fill words"));
  WordGrid codes(m.rows, m.cols / 8);
  for (int64_t n = 0; n < m.rows; ++n) {
    for (int64_t k = 0; k < m.cols; ++k) codes.Put(n, k / 8, 4 * NibbleOf(k, spec.awq_order), m.codes[n * m.cols + k] ^ 8);
  }
  const std::vector<int32_t> zeros(static_cast<size_t>((m.rows + 7) / 8), 0);
  b->AddInt32(prefix + ".weight", {m.rows, m.cols / 8}, codes.words);
  b->AddFloats(prefix + ".weight_scale", StDtype::kF32, {}, std::span(&m.global, 1));
  b->AddFloats(prefix + ".weight_scale_2", StDtype::kF32, {m.rows}, m.scales);
  b->AddInt32(prefix + ".weight_zero_point_2", {static_cast<int64_t>(zeros.size())}, zeros);
}

// int8 and FP8 with floating-point scales: one code a byte.
void AddBytes(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  const bool integer = spec.format == Format::kInt8;
  const auto offset = static_cast<uint32_t>(integer ? 1 << (spec.bits - 1) : 0);
  std::vector<uint8_t> codes, zeros;
  for (uint32_t code : m.codes) codes.push_back(static_cast<uint8_t>(code - offset));
  for (uint32_t zero : m.zeros) zeros.push_back(static_cast<uint8_t>(zero - offset));
  std::vector<int64_t> shape = {static_cast<int64_t>(m.scales.size()) / m.group_cols, m.group_cols};
  if (spec.per_tensor) shape = {1};
  if (spec.flat_scales) shape.pop_back();
  b->Add(prefix + ".weight", integer ? StDtype::kI8 : StDtype::kF8E4m3, {m.rows, m.cols}, codes);
  b->AddFloats(prefix + (spec.block_rows > 0 ? ".weight_scale_inv" : ".weight_scale"), spec.scale_dtype, shape, m.scales);
  if (integer && spec.asymmetric) b->Add(prefix + ".weight_zero_point", StDtype::kI8, shape, zeros);
}

// The MX formats and NVFP4.
void AddMicroscaled(CheckpointBuilder* b, const std::string& prefix, const ExpertSpec& spec, const Matrix& m) {
  std::vector<uint8_t> codes(m.codes.begin(), m.codes.end());
  int64_t width = m.cols;
  if (!IsFp8(spec.format)) {
    width = m.cols / 2;
    codes.assign(static_cast<size_t>(m.rows * width), 0);
    for (int64_t i = 0; i < m.rows * m.cols; ++i)
      codes[i / 2] = static_cast<uint8_t>(codes[i / 2] | m.codes[i] << (4 * (i % 2)));
  }
  const bool packed = spec.format == Format::kMxfp4Packed || spec.format == Format::kNvfp4Packed;
  const bool short_name = spec.format == Format::kMxfp4Short;
  const StDtype code_type = IsFp8(spec.format) ? StDtype::kF8E4m3 : short_name ? StDtype::kI8 : StDtype::kU8;
  const StDtype scale_type = IsNvfp4(spec.format) ? StDtype::kF8E4m3 : short_name ? StDtype::kF8E8m0 : StDtype::kU8;
  b->Add(prefix + (packed ? ".weight_packed" : ".weight"), code_type, {m.rows, width}, codes);
  b->Add(prefix + (short_name ? ".scale" : ".weight_scale"), scale_type, {m.rows, m.group_cols}, m.bytes);
  if (spec.format == Format::kNvfp4) b->AddFloats(prefix + ".weight_scale_2", StDtype::kF32, {}, std::span(&m.global, 1));
  if (spec.format == Format::kNvfp4Packed)
    b->AddFloats(prefix + ".weight_global_scale", StDtype::kF32, {1}, std::span(&m.global, 1));
}

}  // namespace

std::vector<float> AddOtherFormat(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols,
                                  const ExpertSpec& spec, const std::function<float(int64_t)>& weight) {
  const Matrix m = QuantizeAny(rows, cols, spec, weight);
  switch (spec.format) {
    case Format::kGptq: AddGptqAsymmetric(builder, prefix, spec, m); break;
    case Format::kPacked: AddPackedAny(builder, prefix, spec, m); break;
    case Format::kAwq:
    case Format::kQuarkInt4: AddAlongN(builder, prefix, spec, m); break;
    case Format::kQuarkTwoStage: AddTwoStage(builder, prefix, spec, m); break;
    case Format::kInt8:
    case Format::kFp8: AddBytes(builder, prefix, spec, m); break;
    case Format::kMxfp8:
    case Format::kMxfp4:
    case Format::kMxfp4Packed:
    case Format::kMxfp4Short:
    case Format::kNvfp4:
    case Format::kNvfp4Packed: AddMicroscaled(builder, prefix, spec, m); break;
    default: SetUpError(absl::StrCat(prefix, ": plain formats have no zero points and no scales"));
  }
  return m.values;
}

}  // namespace moed::testing
