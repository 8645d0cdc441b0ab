// The tile loops (AMX). Tiles 0 to 3 hold sums, 4 and 5 the rows, 6 and 7 the columns of a 2 x 2 product; all are 16 rows of
// 64 bytes.
#include <immintrin.h>

#include "bench/loops.h"

namespace moed::bench {
namespace {

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);

// Operands are `word` in each 32-bit element, sums start at zero.
__attribute__((target("amx-tile"))) void OpenTiles(uint32_t word) {
  const TileConfig config;
  alignas(64) uint32_t data[16 * 16];
  for (uint32_t& element : data) element = word;
  asm volatile("" : : "r"(&config), "r"(data) : "memory");  // GCC 12 does not know that tile instructions read them
  _tile_loadconfig(&config);
  _tile_loadd(4, data, 64);
  _tile_loadd(5, data, 64);
  _tile_loadd(6, data, 64);
  _tile_loadd(7, data, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

__attribute__((target("amx-tile,amx-int8"))) void TileInt8(int64_t steps) {
  OpenTiles(0x2E91D35C);
  for (int64_t i = 0; i < steps; ++i) {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
  _tile_release();
}

__attribute__((target("amx-tile,amx-bf16"))) void TileBf16(int64_t steps) {
  OpenTiles(0x3F81BF66);  // 1.0078, -0.8984
  for (int64_t i = 0; i < steps; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

constexpr int64_t kSteps = 400'000;

}  // namespace

std::optional<Loop> TileInt8Loop(const IsaFlags& isa) {
  if (!isa.amx_tile || !isa.amx_int8) return std::nullopt;
  return Loop{TileInt8, kSteps, 2.0 * 4 * 16 * 16 * 64};
}

std::optional<Loop> TileBf16Loop(const IsaFlags& isa) {
  if (!isa.amx_tile || !isa.amx_bf16) return std::nullopt;
  return Loop{TileBf16, kSteps, 2.0 * 4 * 16 * 16 * 32};
}

}  // namespace moed::bench
