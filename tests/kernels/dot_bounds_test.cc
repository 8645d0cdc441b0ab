// Products of every table at the edge of memory: weights and rows end where the next page cannot be read, so that a load beyond
// them faults; what the record of a row does not own is NaN; a row alone, in company, and with several pairs in a call.
#include <catch2/catch.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/cpu/operands.h"
#include "kernels/cpu/packed_layout.h"
#include "kernels/number_formats.h"
#include "tests/kernels/dot_tables.h"
#include "tests/support/random_layer.h"

namespace moed::cpu {
namespace {

constexpr int64_t kSlack = 16;  // records that must be readable after the last, for tables that want rows in a line
constexpr int64_t kPairs = 3;

// Memory that ends at a page that cannot be accessed; `bytes` before it, filled with 0xFF (NaN in every type).
class EdgeMemory {
 public:
  explicit EdgeMemory(int64_t bytes) : page_(sysconf(_SC_PAGESIZE)) {
    whole_ = (bytes + page_ - 1) / page_ * page_ + page_;
    base_ = static_cast<uint8_t*>(mmap(nullptr, whole_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(base_ != MAP_FAILED);
    REQUIRE(mprotect(base_ + whole_ - page_, page_, PROT_NONE) == 0);
    data_ = base_ + whole_ - page_ - bytes;
    std::memset(data_, 0xFF, bytes);
  }
  ~EdgeMemory() { munmap(base_, whole_); }
  EdgeMemory(const EdgeMemory&) = delete;
  EdgeMemory& operator=(const EdgeMemory&) = delete;
  uint8_t* data() const { return data_; }

 private:
  const int64_t page_;
  int64_t whole_ = 0;
  uint8_t *base_ = nullptr, *data_ = nullptr;
};

// Random panels: any codes but NaN of FP8, scales near 1, zero points that a file can hold (of int4 up to 16: GPTQ stores one
// less).
void FillPanels(const PanelFormat& format, int64_t panels, uint64_t seed, uint8_t* out) {
  testing::Random random(seed);
  for (int64_t at = 0; at < panels * format.panel_bytes; ++at) out[at] = static_cast<uint8_t>(random.Next() >> 24);
  const int64_t groups = (format.depth + format.group - 1) / format.group;
  for (int64_t panel = 0; panel < panels; ++panel) {
    for (int64_t group = 0; group < groups; ++group) {
      uint8_t* const at = out + panel * format.panel_bytes + format.group_offset(group);
      for (int lane = 0; format.scale_bytes > 0 && lane < kPanelWidth; ++lane) {
        const float scale = 0.01f + 0.005f * random.Uniform();
        std::memcpy(at + 4 * lane, &scale, 4);
      }
      uint8_t* const zeros = at + format.scale_bytes;
      for (int64_t lane = 0; format.element == ElementType::kInt4 && lane < format.zero_bytes; ++lane) zeros[lane] %= 17;
    }
  }
  if (format.element == ElementType::kFp8E4m3) {
    for (int64_t at = 0; at < panels * format.panel_bytes; ++at) out[at] = (out[at] & 0x7F) == 0x7F ? out[at] - 1 : out[at];
  }
  if (format.element == ElementType::kBf16) {
    for (int64_t at = 0; at < panels * format.panel_bytes; at += 2) {
      const uint16_t value = FloatToBf16(random.Uniform());
      std::memcpy(out + at, &value, 2);
    }
  }
}

// One product of every kind for a table and a layout.
struct Stage {
  const DotTable& table;
  const PanelFormat format;
  const RowFormat row;
  const int64_t most;
  EdgeMemory weights, rows;

  Stage(const DotTable& dots, const PanelFormat& panel, int64_t count)
      : table(dots), format(panel), row(MakeRowFormat(dots, panel)), most(count), weights(2 * kPairs * panel.panel_bytes),
        rows((count + (dots.contiguous_from > 0 ? kSlack : 0)) * row.bytes) {
    FillPanels(format, 2 * kPairs, 1, weights.data());
    testing::Random random(2);
    std::vector<float> x(static_cast<size_t>(format.depth));
    for (int64_t r = 0; r < count; ++r) {
      for (float& value : x) value = random.Uniform();
      RowArgs args;
      args.format = &row;
      args.x = x.data();
      args.out = rows.data() + r * row.bytes;
      table.make_row(args);
    }
  }

  // [pairs][count][32] of rows [first, first + count); the last rows in memory when first + count is all of them.
  std::vector<float> Multiply(int64_t first, int64_t count, int64_t first_pair, int64_t pairs) const {
    std::vector<const uint8_t*> records;
    for (int64_t r = first; r < first + count; ++r) records.push_back(rows.data() + r * row.bytes);
    alignas(64) static uint8_t scratch[kDotScratchBytes];
    alignas(64) static float tile[kRowBlock * kPairWidth];
    std::memset(scratch, 0xFF, sizeof(scratch));
    std::memset(tile, 0xFF, sizeof(tile));
    const DotArgs args = {&format, weights.data() + first_pair * 2 * format.panel_bytes, pairs, &row, records.data(), count, tile, scratch};
    table.multiply(args);
    return {tile, tile + pairs * count * kPairWidth};
  }
};

struct Layout {
  ElementType element;
  bool zero_points;
  int64_t depth, group;
};

PanelFormat FormatOf(const Layout& layout) {
  WeightScheme scheme;
  scheme.element = layout.element;
  scheme.scale = layout.element == ElementType::kBf16 ? ScaleType::kNone : ScaleType::kF32;
  scheme.zero_points = layout.zero_points;
  scheme.group = {1, static_cast<int32_t>(layout.group)};
  return MakeLayout(scheme, layout.depth).format;
}

std::vector<Layout> Layouts(bool bf16) {
  std::vector<Layout> all;
  for (const auto& [depth, group] : std::vector<std::pair<int64_t, int64_t>>{
           {8, 0}, {16, 8}, {24, 16}, {40, 0}, {56, 24}, {72, 32}, {104, 64}, {136, 40}, {264, 128}, {328, 64}, {520, 0},
           {552, 32}, {600, 16}, {776, 256}, {1352, 640}}) {
    for (ElementType element : {ElementType::kInt4, ElementType::kInt8}) {
      for (bool zero_points : {false, true}) all.push_back({element, zero_points, depth, group});
    }
    all.push_back({ElementType::kFp4E2m1, false, depth, group});
    if (bf16) all.push_back({ElementType::kFp8E4m3, false, depth, group});
    if (bf16) all.push_back({ElementType::kBf16, false, depth, 0});
  }
  return all;
}

// How far results may differ from company to company: not at all, but for bf16 tiles beside bf16 vectors.
bool Same(const float* a, const float* b, bool exact) {
  for (int c = 0; c < kPairWidth; ++c) {
    if (std::isnan(a[c]) || std::isnan(b[c])) return false;
    if (exact ? std::memcmp(a + c, b + c, 4) != 0 : std::fabs(a[c] - b[c]) > 1e-3f * (1.0f + std::fabs(b[c]))) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("Products read no byte beyond weights and records, and give the same in any company, on every table") {
  for (bool bf16 : {false, true}) {
    for (const testing::NamedDots& dots : testing::UsableDots(bf16)) {
      const bool exact = dots.name != "amx bf16";
      for (const Layout& layout : Layouts(bf16)) {
        constexpr int64_t kMost = 37;
        const Stage stage(dots.table(), FormatOf(layout), kMost);
        const std::vector<float> whole = stage.Multiply(0, kMost, 0, kPairs);
        for (int64_t count : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33}) {
          const int64_t first = kMost - count, pairs = count % 3 == 0 ? 1 : kPairs, first_pair = kPairs - pairs;
          const std::vector<float> some = stage.Multiply(first, count, first_pair, pairs);
          INFO(dots.name << ": " << ElementName(layout.element) << (layout.zero_points ? " with zero points" : "") << ", K " << layout.depth
                         << ", group " << layout.group << ", " << count << " rows, " << pairs << " pairs");
          bool same = true;
          for (int64_t p = 0; p < pairs; ++p) {
            for (int64_t r = 0; r < count; ++r) {
              same = same && Same(&some[static_cast<size_t>((p * count + r) * kPairWidth)],
                                  &whole[static_cast<size_t>(((first_pair + p) * kMost + first + r) * kPairWidth)], exact);
            }
          }
          REQUIRE(same);
        }
      }
    }
  }
}

}  // namespace moed::cpu
