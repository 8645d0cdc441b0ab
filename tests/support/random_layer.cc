#include "tests/support/random_layer.h"

#include <cmath>
#include <cstring>

#include "kernels/convert.h"
#include "kernels/number_formats.h"

namespace moed::testing {
namespace {

void AppendScale(ScaleType type, float value, std::vector<uint8_t>* out) {
  if (type == ScaleType::kF32) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(&value);
    out->insert(out->end(), bytes, bytes + 4);
    return;
  }
  const uint16_t bits = type == ScaleType::kF16 ? FloatToF16(value) : FloatToBf16(value);
  out->push_back(static_cast<uint8_t>(bits & 0xFF));
  out->push_back(static_cast<uint8_t>(bits >> 8));
}

void FillPlain(LinearWeights* w, Random& random) {
  const float scale = 1.7f / std::sqrt(static_cast<float>(w->cols));
  for (int64_t i = 0; i < w->rows * w->cols; ++i) {
    const float value = random.Uniform() * scale;
    if (w->scheme.element == ElementType::kF32) AppendScale(ScaleType::kF32, value, &w->codes);
    if (w->scheme.element == ElementType::kBf16) AppendScale(ScaleType::kBf16, value, &w->codes);
    if (w->scheme.element == ElementType::kF16) AppendScale(ScaleType::kF16, value, &w->codes);
  }
}

// The typical magnitude of a random code of `element`, zero point subtracted.
float TypicalCode(ElementType element) {
  switch (element) {
    case ElementType::kInt4: return 4.6f;
    case ElementType::kInt8: return 74.0f;
    case ElementType::kFp8E4m3: return 120.0f;
    case ElementType::kFp4E2m1: return 2.9f;
    case ElementType::kFp6E2m3: return 3.5f;
    default: return 10.0f;
  }
}

// One stored scale of about `value`, rounded to what the type holds.
void AppendAnyScale(ScaleType type, float value, std::vector<uint8_t>* out) {
  if (type == ScaleType::kE8m0) {
    out->push_back(static_cast<uint8_t>(127 + std::lround(std::log2(value))));
  } else if (type == ScaleType::kE4m3) {
    out->push_back(FloatToE4m3(value));
  } else {
    AppendScale(type, value, out);
  }
}

void FillCodes(LinearWeights* w, Random& random) {
  w->codes.resize(w->rows * w->row_bytes());
  for (uint8_t& byte : w->codes) {
    byte = static_cast<uint8_t>(random.Next() >> 24);
    if (w->scheme.element == ElementType::kFp8E4m3 && (byte & 0x7F) == 0x7F) byte ^= 1;  // no NaN
  }
}

// Of `codes` codes: about the middle, as quantizers leave them, and one of sixteen anywhere.
uint8_t RandomZero(int codes, Random& random) {
  const int anywhere = static_cast<int>(random.Below(static_cast<uint64_t>(codes)));
  return static_cast<uint8_t>(random.Below(16) == 0 ? anywhere : codes / 4 + anywhere / 2);
}

void FillQuantized(LinearWeights* w, Random& random) {
  FillCodes(w, random);
  const WeightScheme& scheme = w->scheme;
  float base = 1.0f / (TypicalCode(scheme.element) * std::sqrt(static_cast<float>(w->cols)));
  if (scheme.global_scale != GlobalScale::kNone) {
    // The block scales stay near 1 and the global scale carries the magnitude; it differs from matrix to matrix.
    const float global = base * (1.0f + 0.5f * random.Uniform());
    w->global_scale = scheme.global_scale == GlobalScale::kMultiplier ? global : 1.0f / global;
    base = 1.0f;
  }
  const int64_t groups = GroupCount(w->cols, scheme.group.cols);
  const int64_t count = GroupCount(w->rows, scheme.group.rows) * groups;
  for (int64_t at = 0; at < count; ++at) {
    // Neighbouring groups never agree: a factor of two for each residue of four, times a random part.
    const float step = std::ldexp(1.0f, 1 - static_cast<int>(at % groups % 4));
    AppendAnyScale(scheme.scale, base * step * (1.5f + 0.5f * random.Uniform()), &w->scales);
    if (scheme.zero_points) w->zero_points.push_back(RandomZero(1 << ElementBits(scheme.element), random));
  }
  for (int64_t k = 0; scheme.act_order && k < w->cols; ++k) {
    w->group_index.push_back(static_cast<int32_t>(37 * k % w->cols / scheme.group.cols));
  }
}

LinearWeights MakeLinear(const WeightScheme& scheme, int64_t rows, int64_t cols, bool bias, Random& random) {
  LinearWeights w;
  w.scheme = scheme;
  w.rows = rows;
  w.cols = cols;
  if (IsUnquantized(scheme.element)) FillPlain(&w, random); else FillQuantized(&w, random);
  w.input_scale = 0.02f * (1.5f + 0.5f * random.Uniform());
  for (int64_t n = 0; bias && n < rows; ++n) w.bias.push_back(random.Uniform());
  return w;
}

}  // namespace

uint64_t Random::Next() {
  state_ += 0x9E3779B97F4A7C15ull;
  uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

float Random::Uniform() { return static_cast<float>(static_cast<double>(Next() >> 11) * 0x1p-52 - 1.0); }

QuantScheme Int4Scheme(int32_t group, ScaleType scale) {
  LinearScheme linear;
  linear.weights.element = ElementType::kInt4;
  linear.weights.scale = scale;
  linear.weights.group = {1, group};
  return UniformScheme(linear);
}

QuantScheme PlainScheme(ElementType element) {
  LinearScheme linear;
  linear.weights.element = element;
  return UniformScheme(linear);
}

MoeDesc MakeDesc(int experts, int top_k, int64_t hidden, int64_t intermediate, const QuantScheme& scheme) {
  MoeDesc desc;
  desc.num_experts = experts;
  desc.top_k = top_k;
  desc.hidden = hidden;
  desc.intermediate = intermediate;
  desc.scheme = scheme;
  desc.max_tokens = 1 << 20;
  return desc;
}

RandomExperts::RandomExperts(const MoeDesc& desc, uint64_t seed) {
  Random random(seed);
  for (int e = 0; e < desc.num_experts; ++e) {
    ExpertWeights expert;
    expert.gate = MakeLinear(desc.scheme.gate.weights, desc.intermediate, desc.hidden, desc.biases, random);
    expert.up = MakeLinear(desc.scheme.up.weights, desc.intermediate, desc.hidden, desc.biases, random);
    expert.down = MakeLinear(desc.scheme.down.weights, desc.hidden, desc.intermediate, desc.biases, random);
    experts_.push_back(std::move(expert));
  }
}

absl::Status RandomExperts::Read(int expert, ExpertWeights* out) const {
  *out = experts_[expert];
  return absl::OkStatus();
}

RandomBatch::RandomBatch(const MoeDesc& desc, int64_t rows, int top_k, DType dtype, uint64_t seed)
    : rows(rows), hidden(desc.hidden), top_k(top_k), dtype(dtype) {
  Random random(seed);
  x.resize(rows * hidden * DTypeBytes(dtype));
  std::vector<float> row(hidden);
  for (int64_t t = 0; t < rows; ++t) {
    for (float& value : row) value = 2.0f * random.Uniform();
    RowFromFloat(row.data(), t, {x.data(), dtype, rows, hidden});
    std::vector<int32_t> chosen;
    while (static_cast<int>(chosen.size()) < top_k) {
      const int32_t id = static_cast<int32_t>(random.Below(desc.num_experts));
      bool seen = false;
      for (int32_t other : chosen) seen |= other == id;
      if (!seen || top_k > desc.num_experts) chosen.push_back(id);
    }
    ids.insert(ids.end(), chosen.begin(), chosen.end());
    for (int j = 0; j < top_k; ++j) weights.push_back(0.6f + 0.5f * random.Uniform());
  }
}

MoeBatch RandomBatch::view() const {
  MoeBatch batch;
  batch.x = {x.data(), dtype, rows, hidden};
  batch.ids = ids;
  batch.weights = weights;
  batch.top_k = top_k;
  return batch;
}

absl::StatusOr<std::vector<float>> RunLayer(const PreparedMoe& moe, const MoeBatch& batch, DType dtype, WorkerPool& pool) {
  const size_t bytes = moe.WorkspaceBytes(batch.x.rows, batch.top_k);
  std::vector<std::byte> storage(bytes + 64, std::byte{0xFF});
  const size_t offset = (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
  ExecContext context;
  context.pool = &pool;
  context.workspace = std::span<std::byte>(storage).subspan(offset, bytes);
  std::vector<uint8_t> out(batch.x.rows * batch.x.cols * DTypeBytes(dtype), 0xFF);
  absl::Status status = moe.Run(batch, {out.data(), dtype, batch.x.rows, batch.x.cols}, context);
  if (!status.ok()) return status;
  std::vector<float> result(batch.x.rows * batch.x.cols);
  for (int64_t row = 0; row < batch.x.rows; ++row) {
    RowToFloat({out.data(), dtype, batch.x.rows, batch.x.cols}, row, result.data() + row * batch.x.cols);
  }
  return result;
}

}  // namespace moed::testing
