// Records of rows (make_row of every table of dot products) against the scalar rules of kernels/activation_quant.h, bit by bit:
// codes, their order, the scale, sums over groups, and nothing written beyond.
#include <catch2/catch.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/activation_quant.h"
#include "kernels/aligned_buffer.h"
#include "kernels/cpu/operands.h"
#include "kernels/cpu/packed_layout.h"
#include "kernels/number_formats.h"
#include "tests/kernels/dot_tables.h"
#include "tests/support/random_layer.h"

namespace moed::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int64_t kGuard = 256;  // bytes after a record that must stay as they were

// Where feature `at` of a row lies among its codes.
int64_t PlaceOf(RowOrder order, int64_t at) {
  static constexpr int kOrders[4][8] = {{0, 1, 2, 3, 4, 5, 6, 7}, {0, 2, 4, 6, 1, 3, 5, 7}, {0, 4, 1, 5, 2, 6, 3, 7}, {0, 2, 1, 3, 4, 6, 5, 7}};
  const int* const block = kOrders[static_cast<int>(order)];
  return at / 8 * 8 + (std::find(block, block + 8, static_cast<int>(at % 8)) - block);
}

struct Record {
  RowFormat format;
  std::vector<uint8_t> bytes;  // of the record, then the guard

  template <typename Word>
  Word At(int64_t offset) const {
    Word word;
    std::memcpy(&word, &bytes[static_cast<size_t>(offset)], sizeof(word));
    return word;
  }
  float scale() const { return At<float>(format.scale_offset); }
  int64_t groups() const { return (format.depth + format.group - 1) / format.group; }
  int Code(int64_t k) const {
    const int64_t place = PlaceOf(format.order, k);
    return format.codes == RowCodes::kInt8 ? At<int8_t>(place) : At<int16_t>(2 * place);
  }
  float Bf16(int64_t k) const { return Bf16ToFloat(At<uint16_t>(2 * PlaceOf(format.order, k))); }

  // Zeros between codes and scale and after the sums, the guard as it was.
  bool PaddingIntact() const {
    const auto all = [&](int64_t begin, int64_t end, uint8_t value) {
      return std::all_of(bytes.begin() + begin, bytes.begin() + end, [&](uint8_t byte) { return byte == value; });
    };
    return all(format.depth * format.code_bytes(), format.scale_offset, 0) && all(format.sums_offset + 4 * groups(), format.bytes, 0) &&
           all(format.bytes, format.bytes + kGuard, 0xCD);
  }
};

Record Make(const DotTable& table, const RowFormat& format, const std::vector<float>& x, RowScale rule, float value) {
  AlignedBuffer buffer;
  REQUIRE(buffer.Allocate(static_cast<size_t>(format.bytes + kGuard)));
  std::memset(buffer.data(), 0xCD, static_cast<size_t>(format.bytes + kGuard));
  RowArgs args;
  args.format = &format;
  args.x = x.data();
  args.rule = rule;
  args.value = value;
  args.out = buffer.data();
  table.make_row(args);
  return {format, std::vector<uint8_t>(args.out, args.out + format.bytes + kGuard)};
}

// Rows that every rule must get right: random ones of several sizes, ties, ends of the range of float32, and what is not finite.
std::vector<std::vector<float>> Rows(int64_t depth) {
  testing::Random random(static_cast<uint64_t>(depth));
  std::vector<std::vector<float>> rows(1, std::vector<float>(static_cast<size_t>(depth)));
  const auto add = [&](auto&& value) {
    rows.emplace_back(static_cast<size_t>(depth));
    for (int64_t k = 0; k < depth; ++k) rows.back()[static_cast<size_t>(k)] = value(k);
  };
  for (float size : {1.0f, 1e-3f, 3e38f, 1e-36f, 1e-38f, 1e-41f, 1e-44f}) add([&](int64_t) { return size * random.Uniform(); });
  add([](int64_t k) { return k == 0 ? 127.0f : static_cast<float>(k % 255 - 127) + 0.5f; });  // ties, scale 1
  add([](int64_t k) { return (k == 0 ? 127.0f : static_cast<float>(k % 255 - 127) + 0.5f) / 3.0f; });
  for (float value : {1.0f, -1.0f, -0.0f, std::numeric_limits<float>::max(), std::numeric_limits<float>::denorm_min(),
                      190 * std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min()}) {
    add([&](int64_t) { return value; });
    add([&](int64_t k) { return k % 2 ? value : -value; });
    add([&](int64_t k) { return k + 1 == depth ? value : 0.0f; });
  }
  for (float bad : {kNan, kInf, -kInf}) {
    for (int64_t at : {int64_t{0}, depth / 2, depth - 1}) {
      add([&](int64_t k) { return k == at ? bad : random.Uniform(); });
      add([&](int64_t k) { return k == at ? bad : k == 0 ? kInf : 1.0f; });
    }
  }
  return rows;
}

struct Weights {
  ElementType element;
  bool zero_points;
};

RowFormat FormatOf(const DotTable& table, const Weights& weights, int64_t depth, int64_t group) {
  WeightScheme scheme;
  scheme.element = weights.element;
  scheme.scale = weights.element == ElementType::kBf16 ? ScaleType::kNone : ScaleType::kF32;
  scheme.zero_points = weights.zero_points;
  scheme.group = {1, static_cast<int32_t>(group)};
  return MakeRowFormat(table, MakeLayout(scheme, depth).format);
}

struct Size {
  int64_t depth, group;
};
constexpr Size kSizes[] = {{8, 0},   {16, 8},   {24, 8},    {40, 16},   {56, 24},    {64, 32},   {72, 24},
                           {72, 64}, {136, 32}, {264, 128}, {704, 640}, {1352, 640}, {2880, 32}, {2056, 0}};

// What the scalar rules make of x, and whether the record says the same.
bool SameAsRules(const Record& record, std::vector<float> x, RowScale rule, float value) {
  ActivationScheme scheme;
  scheme.mode = rule == RowScale::kStatic ? ActivationMode::kStatic : ActivationMode::kDynamic;
  scheme.group = {rule == RowScale::kAbsMax ? 0 : 1, 0};
  QuantizeRow(scheme, value, value, x.data(), record.format.depth);
  const bool nan = std::any_of(x.begin(), x.end(), [](float v) { return std::isnan(v); });
  if (nan) return std::isnan(record.scale());
  for (int64_t k = 0; k < record.format.depth; ++k) {
    if (static_cast<float>(record.Code(k)) * record.scale() != x[static_cast<size_t>(k)]) return false;
  }
  return true;
}

bool SumsAreOfCodes(const Record& record) {
  const RowFormat& format = record.format;
  for (int64_t g = 0; g < record.groups(); ++g) {
    int32_t halves[2] = {0, 0};
    for (int64_t k = g * format.group; k < std::min((g + 1) * format.group, format.depth); ++k) {
      halves[PlaceOf(format.order, k) / 2 % 2] += record.Code(k);
    }
    const int64_t at = format.sums_offset + 4 * g;
    if (format.half_sums) {
      for (int h = 0; h < 2; ++h) {
        if (record.At<int16_t>(at + 2 * h) != format.sum_factor * halves[h]) return false;
      }
    } else if (record.At<int32_t>(at) != format.sum_factor * (halves[0] + halves[1])) {
      return false;
    }
  }
  return true;
}

// The rules with the values that they go with, for a row.
std::vector<std::pair<RowScale, float>> Rules(const std::vector<float>& x) {
  const float absmax = AbsMax(x.data(), static_cast<int64_t>(x.size()));
  return {{RowScale::kOwn, 0.0f},       {RowScale::kAbsMax, absmax},     {RowScale::kAbsMax, MergeAbsMax(absmax, 500.0f)},
          {RowScale::kStatic, 1.0f},    {RowScale::kStatic, 1.0f / 300}, {RowScale::kStatic, 0.37f},
          {RowScale::kStatic, 1e-40f}, {RowScale::kStatic, 3e38f}};
}

}  // namespace

TEST_CASE("int8 records hold the codes, scale and sums of the scalar rules, bit by bit, on every table") {
  for (const testing::NamedDots& dots : testing::UsableDots(/*bf16=*/false)) {
    for (const Weights& weights : {Weights{ElementType::kInt4, false}, Weights{ElementType::kInt4, true}, Weights{ElementType::kInt8, false},
                                   Weights{ElementType::kInt8, true}, Weights{ElementType::kFp4E2m1, false}}) {
      for (const Size& size : kSizes) {
        const RowFormat format = FormatOf(dots.table(), weights, size.depth, size.group);
        REQUIRE(format.depth == size.depth);
        int number = 0;
        for (const std::vector<float>& x : Rows(size.depth)) {
          for (const auto& [rule, value] : Rules(x)) {
            const Record record = Make(dots.table(), format, x, rule, value);
            INFO(dots.name << ", weights " << ElementName(weights.element) << ", K " << size.depth << ", group " << size.group << ", row "
                           << number << ", rule " << static_cast<int>(rule) << ", value " << value << ", scale " << record.scale());
            REQUIRE(SameAsRules(record, x, rule, value));
            REQUIRE(SumsAreOfCodes(record));
            REQUIRE(record.PaddingIntact());
          }
          ++number;
        }
      }
    }
  }
}

TEST_CASE("bf16 records hold rounded values, subnormals as zero, and sums of the rounded values") {
  for (const testing::NamedDots& dots : testing::UsableDots(/*bf16=*/true)) {
    for (const Weights& weights : {Weights{ElementType::kInt4, true}, Weights{ElementType::kBf16, false}, Weights{ElementType::kFp8E4m3, false}}) {
      for (const Size& size : kSizes) {
        const RowFormat format = FormatOf(dots.table(), weights, size.depth, size.group);
        for (const std::vector<float>& x : Rows(size.depth)) {
          const Record record = Make(dots.table(), format, x, RowScale::kOwn, 0.0f);
          INFO(dots.name << ", weights " << ElementName(weights.element) << ", K " << size.depth << ", group " << size.group);
          REQUIRE(record.PaddingIntact());
          for (int64_t g = 0; g < record.groups(); ++g) {
            double sum = 0.0, magnitude = 0.0;
            for (int64_t k = g * format.group; k < std::min((g + 1) * format.group, format.depth); ++k) {
              const float value = x[static_cast<size_t>(k)], want = std::fabs(value) < std::numeric_limits<float>::min() ? 0.0f : Bf16ToFloat(FloatToBf16(value));
              REQUIRE((record.Bf16(k) == want || (std::isnan(want) && std::isnan(record.Bf16(k)))));
              sum += want;
              magnitude += std::fabs(want);
            }
            const float got = record.At<float>(format.sums_offset + 4 * g);
            if (std::isfinite(magnitude) && magnitude < 3e38) {
              REQUIRE(std::fabs(got - sum) <= 1e-6 * magnitude * std::sqrt(static_cast<double>(format.group)));
            } else if (!std::isfinite(sum)) {
              REQUIRE_FALSE(std::isfinite(got));
            }
          }
        }
      }
    }
  }
}

}  // namespace moed::cpu
