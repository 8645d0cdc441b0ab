// Products by AMX: int8 tiles (TDPBSUD; for short groups TDPBSSD), with VNNI for a few rows, and bf16 tiles (TDPBF16PS).
#include "kernels/cpu/amx_dot-inl.h"
#include "kernels/cpu/amx_group-inl.h"
#include "kernels/cpu/bf16_dot-inl.h"
#include "kernels/cpu/int8_dot-inl.h"

namespace moed::cpu {
namespace {

// From here on a tile of 16 rows takes less time than the vector kernel, though most of its rows are not there.
constexpr int64_t kMinRows = 5;
// The same in short groups: decoding one takes as long as its product with 16 rows, and VPDPBUSD takes packed codes where they lie.
constexpr int64_t kMinGroupRows = 20;

struct TileInt8 : IntegerSums<Avx512> {
  static constexpr int kPerWord = 4;
  static MOED_INLINE int64_t Step(int64_t /*group*/) { return kShortGroupFeatures; }
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

void MultiplyShortGroups(const DotArgs& args) {
  switch (args.format->element) {
    case ElementType::kInt4: return WithTiles<GroupSums>(args, MultiplyGroups<SignedQuads<NibbleQuads<Avx512>>>);
    case ElementType::kFp4E2m1: return WithTiles<GroupSums>(args, MultiplyGroups<SignedFp4>);
    default: return WithTiles<GroupSums>(args, MultiplyGroups<SignedQuads<ByteQuads<Avx512>>>);
  }
}

// Each way gives the same bits. 8-bit codes less zero points of their own are no bytes.
void MultiplyInt8(const DotArgs& args) {
  const PanelFormat& format = *args.format;
  if (format.group > kShortGroupFeatures && args.count >= kMinRows) {
    WithTiles<TileInt8>(args, MultiplyQuads<TileInt8, AmxTiles<TileInt8, TileInt8>, 0>);
  } else if (format.group > kShortGroupFeatures || args.count < kMinGroupRows ||
             (format.element == ElementType::kInt8 && format.zero_bytes > 0)) {
    VnniDots().multiply(args);
  } else {
    MultiplyShortGroups(args);
  }
}

void MultiplyBf16Tiles(const DotArgs& args) {
  WithTiles<TileBf16>(args, MultiplyBf16<TileBf16, AmxTiles<TileBf16, TileBf16>, 0>);
}

}  // namespace

const DotTable& AmxInt8Dots() {
  static constexpr DotTable table = {{RowCodes::kInt8, RowOrder::kNibbleQuads},
                                     {RowCodes::kInt8, RowOrder::kNatural},
                                     kMinRows,
                                     kMinGroupRows,
                                     MakeIntegerRow<Avx512>,
                                     MultiplyInt8};
  return table;
}

const DotTable& AmxBf16Dots() {
  static constexpr DotTable table = {{RowCodes::kBf16, RowOrder::kNibblePairs, kMinRows},
                                     {RowCodes::kBf16, RowOrder::kNatural, kMinRows},
                                     1,
                                     1,
                                     MakeBf16Row,
                                     MultiplyBf16Tiles};
  return table;
}

}  // namespace moed::cpu
