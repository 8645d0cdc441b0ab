#include "kernels/cuda/pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/number_formats.h"

namespace moed::cuda {
namespace {

// E4M3 codes of the values of a 6-bit format.
std::array<uint8_t, 64> Fp6Table(ElementType element) {
  std::array<uint8_t, 64> table;
  for (int code = 0; code < 64; ++code) {
    const uint8_t six = static_cast<uint8_t>(code);
    table[code] = FloatToE4m3(element == ElementType::kFp6E2m3 ? E2m3ToFloat(six) : E3m2ToFloat(six));
  }
  return table;
}

// One projection's rows as rows of whole codes that the packer indexes by position: 4-bit codes stay two a byte where positions are
// inputs, everything else becomes one code in its own bytes.
class RowSource {
 public:
  RowSource(const PackedShape& shape, const LinearWeights& weights, const int32_t* order)
      : shape_(shape), weights_(weights), order_(order), row_(static_cast<size_t>(shape.depth() * BitsOf(shape.codes) / 8)) {
    const ElementType element = weights.scheme.element;
    if (element == ElementType::kFp6E2m3 || element == ElementType::kFp6E3m2) fp6_ = Fp6Table(element);
  }

  // Row `row` in packed positions, zeros beyond its end and for -1: BitsOf bits a code, the even position low.
  const uint8_t* Row(int64_t row) {
    std::fill(row_.begin(), row_.end(), 0);
    if (row < 0) return row_.data();
    const uint8_t* codes = weights_.codes.data() + row * weights_.row_bytes();
    const int bits = ElementBits(weights_.scheme.element);
    if (order_ == nullptr && bits != 6) {
      std::memcpy(row_.data(), codes, static_cast<size_t>(weights_.row_bytes()));
      // A last odd nibble has a neighbour in its byte that is no code.
      if (bits == 4 && shape_.cols % 2 == 1) row_[static_cast<size_t>(shape_.cols / 2)] &= 0xF;
      return row_.data();
    }
    for (int64_t at = 0; at < shape_.depth(); ++at) {
      const int64_t k = order_ != nullptr ? order_[at] : at < shape_.cols ? at : -1;
      if (k >= 0) Place(codes, bits, k, at);
    }
    return row_.data();
  }

 private:
  void Place(const uint8_t* codes, int bits, int64_t k, int64_t at) {
    if (bits == 4) {
      row_[at / 2] |= static_cast<uint8_t>(((codes[k / 2] >> (4 * (k % 2))) & 0xF) << (4 * (at % 2)));
    } else if (bits == 6) {
      const int64_t bit = k * 6;
      uint32_t word = codes[bit / 8];
      if (bit % 8 > 2) word |= static_cast<uint32_t>(codes[bit / 8 + 1]) << 8;
      row_[at] = fp6_[(word >> (bit % 8)) & 63];
    } else {
      std::memcpy(&row_[at * bits / 8], codes + k * bits / 8, static_cast<size_t>(bits / 8));
    }
  }

  const PackedShape& shape_;
  const LinearWeights& weights_;
  const int32_t* order_;
  std::vector<uint8_t> row_;
  std::array<uint8_t, 64> fp6_ = {};
};

// The two codes of a pair (an even position and the next) of a 4-bit row are a byte, of the others 2, 4 or 8 bytes.
template <int kBits>
void PlacePair(const uint8_t* row, int64_t position, int tile_row, int k, std::byte* block) {
  constexpr Codes kCodes = kBits == 4 ? Codes::kInt4 : kBits == 8 ? Codes::kInt8 : kBits == 16 ? Codes::kBf16 : Codes::kF32;
  const CodePlace first = PlaceOf(kCodes, tile_row, k), second = PlaceOf(kCodes, tile_row, k + 1);
  if constexpr (kBits == 4) {
    const uint8_t pair = row[position / 2];
    block[first.byte] |= static_cast<std::byte>((pair & 0xF) << first.shift);
    block[second.byte] |= static_cast<std::byte>((pair >> 4) << second.shift);
  } else {
    constexpr int kBytes = kBits / 8;
    std::memcpy(block + first.byte, row + position * kBytes, kBytes);
    std::memcpy(block + second.byte, row + (position + 1) * kBytes, kBytes);
  }
}

// Feature `tile_row` of a tile, all of its blocks. `tile` starts as zeros for 4-bit codes, of which two rows share bytes.
template <int kBits>
void PlaceRow(const PackedShape& shape, const uint8_t* row, int tile_row, std::byte* tile) {
  const int block_bytes = BlockBytes(shape.codes);
  for (int64_t block = 0; block < shape.blocks; ++block) {
    for (int k = 0; k < kBlockDepth; k += 2) {
      PlacePair<kBits>(row, block * kBlockDepth + k, tile_row, k, tile + block * block_bytes);
    }
  }
}

void PlaceRow(const PackedShape& shape, const uint8_t* row, int tile_row, std::byte* tile) {
  switch (BitsOf(shape.codes)) {
    case 4: return PlaceRow<4>(shape, row, tile_row, tile);
    case 8: return PlaceRow<8>(shape, row, tile_row, tile);
    case 16: return PlaceRow<16>(shape, row, tile_row, tile);
    default: return PlaceRow<32>(shape, row, tile_row, tile);
  }
}

// What a matrix is made of: one projection, or two of a paired shape, whose rows come in the order of `features` (PackMatrix).
struct Source {
  const PackedShape& shape;
  const LinearWeights& first;
  const LinearWeights* second;
  std::span<const int32_t> features;
};

// A matrix's feature at tile row `r` of row tile `tile`: a row of the first (gate) or second projection, or -1.
struct Feature {
  bool second;
  int64_t row;
};
Feature FeatureAt(const Source& source, int64_t tile, int r) {
  const bool paired = source.shape.paired;
  const int64_t at = paired ? tile * kHalfRows + r / 16 * 8 + r % 8 : tile * kTileRows + r;
  int64_t row = at < source.first.rows ? at : -1;
  const int64_t named = static_cast<int64_t>(source.features.size());
  if (named > 0) row = at < named ? source.features[static_cast<size_t>(at)] : -1;
  return {paired && r % 16 >= 8, row};
}

void PackCodes(const Source& source, const int32_t* order, std::byte* out) {
  const PackedShape& shape = source.shape;
  RowSource first_rows(shape, source.first, order);
  RowSource second_rows(shape, source.second != nullptr ? *source.second : source.first, order);
  const size_t tile_bytes = static_cast<size_t>(shape.blocks) * BlockBytes(shape.codes);
  for (int64_t tile = 0; tile < shape.row_tiles; ++tile, out += tile_bytes) {
    std::memset(out, 0, tile_bytes);
    for (int r = 0; r < kTileRows; ++r) {
      const Feature feature = FeatureAt(source, tile, r);
      PlaceRow(shape, (feature.second ? second_rows : first_rows).Row(feature.row), r, out);
    }
  }
}

// Bytes `unit` of each group's value at every feature: [tile][group][128 in the order of ScalePlace].
void PackGroups(const Source& source, const std::vector<uint8_t> LinearWeights::*values, int unit, std::byte* out) {
  const PackedShape& shape = source.shape;
  for (int64_t tile = 0; tile < shape.row_tiles; ++tile) {
    for (int64_t group = 0; group < shape.groups; ++group) {
      for (int r = 0; r < kTileRows; ++r) {
        std::byte* const place = out + ScalePlace(r) * unit;
        const Feature feature = FeatureAt(source, tile, r);
        const LinearWeights& weights = feature.second ? *source.second : source.first;
        std::memset(place, 0, static_cast<size_t>(unit));
        if (feature.row < 0) continue;
        const int64_t scale_row = weights.scheme.group.rows == 0 ? 0 : feature.row / weights.scheme.group.rows;
        std::memcpy(place, (weights.*values).data() + (scale_row * shape.groups + group) * unit, static_cast<size_t>(unit));
      }
      out += kTileRows * unit;
    }
  }
}

void PackBias(const Source& source, float* out) {
  for (int64_t tile = 0; tile < source.shape.row_tiles; ++tile) {
    for (int r = 0; r < kTileRows; ++r) {
      const Feature feature = FeatureAt(source, tile, r);
      const LinearWeights& weights = feature.second ? *source.second : source.first;
      *out++ = feature.row >= 0 ? weights.bias[static_cast<size_t>(feature.row)] : 0.0f;
    }
  }
}

float GlobalOf(const LinearWeights& weights) {
  switch (weights.scheme.global_scale) {
    case GlobalScale::kNone: return 1.0f;
    case GlobalScale::kMultiplier: return weights.global_scale;
    case GlobalScale::kDivisor: return 1.0f / weights.global_scale;
  }
  return 1.0f;
}

absl::Status RefuseNan(const PackedShape& shape, const LinearWeights& weights) {
  if (weights.scheme.element != ElementType::kFp8E4m3) return absl::OkStatus();
  const auto at = std::find_if(weights.codes.begin(), weights.codes.end(), [](uint8_t code) { return (code & 0x7F) == 0x7F; });
  if (at == weights.codes.end()) return absl::OkStatus();
  const int64_t index = at - weights.codes.begin();
  return absl::InvalidArgumentError(
      absl::StrCat("FP8 weight of row ", index / shape.cols, ", column ", index % shape.cols, " is NaN"));
}

}  // namespace

std::vector<int32_t> CommonOrder(const PackedShape& shape, const WeightScheme& scheme) {
  std::vector<int32_t> order(static_cast<size_t>(shape.depth()), -1);
  const int64_t group = scheme.group.cols, padded = static_cast<int64_t>(shape.group_steps) * kStepDepth;
  for (int64_t k = 0; k < shape.cols; ++k) order[static_cast<size_t>(k / group * padded + k % group)] = static_cast<int32_t>(k);
  return order;
}

absl::Status OrderByGroup(const PackedShape& shape, std::span<const int32_t> group_index, int32_t* order, int32_t* step_groups) {
  std::vector<std::vector<int32_t>> groups(static_cast<size_t>(shape.groups));
  for (int32_t k = 0; k < shape.cols; ++k) groups[static_cast<size_t>(group_index[static_cast<size_t>(k)])].push_back(k);
  std::fill(order, order + shape.depth(), -1);
  std::fill(step_groups, step_groups + shape.blocks * kSteps, 0);
  const int64_t unit = kSteps / shape.slots;  // a group must not end within a slot
  int64_t at = 0;
  for (size_t group = 0; group < groups.size(); ++group) {
    const int64_t steps = (static_cast<int64_t>(groups[group].size()) + kStepDepth - 1) / kStepDepth;
    const bool last = group + 1 == groups.size();
    if ((!last && steps % unit != 0) || at + steps * kStepDepth > shape.depth()) {
      return absl::UnimplementedError(absl::StrCat("act-order: group ", group, " has ", groups[group].size(), " inputs"));
    }
    std::copy(groups[group].begin(), groups[group].end(), order + at);
    std::fill_n(step_groups + at / kStepDepth, steps, static_cast<int32_t>(group));
    at += steps * kStepDepth;
  }
  return absl::OkStatus();
}

float LargestScale(const LinearWeights& weights) {
  const int bytes = ScaleBytes(weights.scheme.scale);
  if (bytes == 0) return 0.0f;
  // Magnitudes of all formats are ordered as their bits are, NaN above all.
  const uint32_t magnitude = weights.scheme.scale == ScaleType::kE8m0 ? 0xFF : 0xFFFFFFFFu >> (33 - 8 * bytes);
  uint32_t most = 0;
  for (size_t at = 0; at < weights.scales.size(); at += static_cast<size_t>(bytes)) {
    uint32_t bits = 0;
    std::memcpy(&bits, &weights.scales[at], static_cast<size_t>(bytes));
    most = std::max(most, bits & magnitude);
  }
  float scale = 0.0f;
  switch (weights.scheme.scale) {
    case ScaleType::kNone: break;
    case ScaleType::kF32: std::memcpy(&scale, &most, sizeof(scale)); break;
    case ScaleType::kBf16: scale = Bf16ToFloat(static_cast<uint16_t>(most)); break;
    case ScaleType::kF16: scale = F16ToFloat(static_cast<uint16_t>(most)); break;
    case ScaleType::kE8m0: scale = E8m0ToFloat(static_cast<uint8_t>(most)); break;
    case ScaleType::kE4m3: scale = E4m3ToFloat(static_cast<uint8_t>(most)); break;
  }
  return scale * std::abs(GlobalOf(weights));
}

double ZeroPointOffset(const LinearWeights& weights) {
  if (weights.zero_points.empty()) return 0.0;
  const int middle = 1 << (ElementBits(weights.scheme.element) - 1);
  int64_t sum = 0;
  for (const uint8_t zero : weights.zero_points) sum += std::abs(zero - middle);
  return static_cast<double>(sum) / static_cast<double>(weights.zero_points.size()) / middle;
}

absl::Status PackMatrix(const PackedShape& shape, const LinearWeights& first, const LinearWeights* second,
                        const PackTarget& target, std::span<const int32_t> features) {
  absl::Status status = RefuseNan(shape, first);
  if (status.ok() && second != nullptr) status = RefuseNan(shape, *second);
  if (status.ok() && second != nullptr && first.group_index != second->group_index)
    status = absl::UnimplementedError("act-order: gate and up have orders of their own");
  if (status.ok() && shape.own_order) status = OrderByGroup(shape, first.group_index, target.order, target.step_groups);
  if (!status.ok()) return status;
  const std::vector<int32_t> common = shape.ordered && !shape.own_order ? CommonOrder(shape, first.scheme) : std::vector<int32_t>();
  const int32_t* order = shape.own_order ? target.order : shape.ordered ? common.data() : nullptr;
  const Source source = {shape, first, second, features};
  PackCodes(source, order, target.codes);
  if (target.scales != nullptr) PackGroups(source, &LinearWeights::scales, ScaleBytes(shape.scale), target.scales);
  if (target.zeros != nullptr) PackGroups(source, &LinearWeights::zero_points, 1, target.zeros);
  if (target.bias != nullptr) PackBias(source, target.bias);
  target.globals[0] = GlobalOf(first);
  target.globals[1] = second != nullptr ? GlobalOf(*second) : target.globals[0];
  return absl::OkStatus();
}

}  // namespace moed::cuda
