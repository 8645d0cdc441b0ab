// Products by AMX: int8 tiles (TDPBSUD), with VNNI for a few rows, and bf16 tiles (TDPBF16PS).
#include "kernels/cpu/amx_dot-inl.h"
#include "kernels/cpu/bf16_dot-inl.h"
#include "kernels/cpu/int8_dot-inl.h"

namespace moed::cpu {
namespace {

// From here on a tile of 16 rows takes less time than the vector kernel, though most of its rows are not there.
constexpr int64_t kMinRows = 5;
// Groups up to here are too short for tiles of int8.
constexpr int64_t kTileGroup = 32;

struct TileInt8 : IntegerSums<Avx512> {
  static constexpr int kPerWord = 4;
  static MOED_INLINE int64_t Step(int64_t group) { return group <= 16 ? 16 : group <= 32 ? 32 : 64; }
  static MOED_INLINE void Multiply0() { _tile_dpbsud(0, 4, 6); }
  static MOED_INLINE void Multiply1() { _tile_dpbsud(1, 4, 7); }
  static MOED_INLINE void Multiply2() { _tile_dpbsud(2, 5, 6); }
  static MOED_INLINE void Multiply3() { _tile_dpbsud(3, 5, 7); }
};

struct TileBf16 : Bf16Sums {
  static constexpr int64_t kChunkFeatures = kChunk / 2;  // the bytes of a chunk of int8
  static MOED_INLINE int64_t Step(int64_t group) { return group <= 16 ? 16 : 32; }
  static MOED_INLINE void Multiply0() { _tile_dpbf16ps(0, 4, 6); }
  static MOED_INLINE void Multiply1() { _tile_dpbf16ps(1, 4, 7); }
  static MOED_INLINE void Multiply2() { _tile_dpbf16ps(2, 5, 6); }
  static MOED_INLINE void Multiply3() { _tile_dpbf16ps(3, 5, 7); }
};

// Scaling the sums of short groups takes a tile longer than the vector kernel takes for everything. Either gives the same bits.
void MultiplyInt8(const DotArgs& args) {
  if (args.count < kMinRows || args.format->group <= kTileGroup) return VnniDots().multiply(args);
  WithTiles<TileInt8>(args, MultiplyQuads<TileInt8, AmxTiles<TileInt8, TileInt8>, 0>);
}

void MultiplyBf16Tiles(const DotArgs& args) {
  WithTiles<TileBf16>(args, MultiplyBf16<TileBf16, AmxTiles<TileBf16, TileBf16>, 0>);
}

}  // namespace

const DotTable& AmxInt8Dots() {
  static constexpr DotTable table = {{RowCodes::kInt8, RowOrder::kNibbleQuads},
                                     {RowCodes::kInt8, RowOrder::kNatural},
                                     kMinRows,
                                     kTileGroup + 1,
                                     MakeIntegerRow<Avx512>,
                                     MultiplyInt8};
  return table;
}

const DotTable& AmxBf16Dots() {
  static constexpr DotTable table = {{RowCodes::kBf16, RowOrder::kNibblePairs, kMinRows},
                                     {RowCodes::kBf16, RowOrder::kNatural, kMinRows},
                                     1,
                                     0,
                                     MakeBf16Row,
                                     MultiplyBf16Tiles};
  return table;
}

}  // namespace moed::cpu
