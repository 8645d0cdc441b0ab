// The CPU kernels, written once over a SIMD type S; included by each instruction-set file.
//
// S provides: F (floats), I (32-bit words), kLanes, kDirectRows, kTileRows, kDepth, and the operations used below. All code
// here is in an anonymous namespace and uses no library function, see kernel_table.h.
//
// Two regimes with the same bits. A weight is decoded to its exact float and multiplied into a chain of fused
// multiply-adds over ascending k; Direct does that straight from the packed codes for few rows (bound by memory), Blocked
// decodes kDepth input features once into the L1 cache and runs a register tile over many rows (bound by FMAs).
#ifndef MOED_KERNELS_CPU_KERNELS_INL_H_
#define MOED_KERNELS_CPU_KERNELS_INL_H_

#include <cstdint>

#include "kernels/cpu/inline-inl.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/scale-inl.h"

namespace moed::cpu {
namespace {

// ---- Decoders: one vector of output features of one block of 8 input features. Weight(i, scale) is the exact weight, where
// `scale` is what MakeScale made of the block's group. ----

template <class S>
struct Int4Decoder {
  static constexpr bool kScaled = true;
  using Scale = typename S::NibbleScale;
  typename S::I words;
  static MOED_INLINE Scale MakeScale(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
    return S::MakeNibbleScale(LoadScale<S>(format, panel, group, lane), LoadZero<S>(format, group, lane));
  }
  MOED_INLINE void Load(const uint8_t* block, int lane) { words = S::LoadWords(block + 4 * lane); }
  MOED_INLINE typename S::F Weight(int i, const Scale& scale) const { return S::NibbleWeight(words, i, scale); }
};

template <class S>
struct Fp4Decoder {
  static constexpr bool kScaled = true;
  using Scale = typename S::F;
  typename S::I words;
  static MOED_INLINE Scale MakeScale(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
    return LoadScale<S>(format, panel, group, lane);
  }
  MOED_INLINE void Load(const uint8_t* block, int lane) { words = S::LoadWords(block + 4 * lane); }
  MOED_INLINE typename S::F Weight(int i, Scale scale) const { return S::Mul(S::NibbleE2m1(words, i), scale); }
};

template <class S>
struct Int8Decoder {
  static constexpr bool kScaled = true;
  using Scale = typename S::CodeScale;
  typename S::I words[2];
  static MOED_INLINE Scale MakeScale(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
    return S::MakeCodeScale(LoadScale<S>(format, panel, group, lane), LoadZero<S>(format, group, lane));
  }
  MOED_INLINE void Load(const uint8_t* block, int lane) {
    for (int q = 0; q < 2; ++q) words[q] = S::LoadWords(block + 4 * (kPanelWidth * q + lane));
  }
  MOED_INLINE typename S::F Weight(int i, const Scale& scale) const {
    return S::CodeWeight(S::ByteCode(words[i / 4], i % 4), scale);
  }
};

// The factor between a code's value and what LoadSmallE4m3 gives is folded into the scale: a power of two, so nothing rounds.
template <class S>
struct Fp8Decoder {
  static constexpr bool kScaled = true;
  using Scale = typename S::F;
  const uint8_t* at;
  static MOED_INLINE Scale MakeScale(const PanelFormat& format, const uint8_t* panel, const uint8_t* group, int lane) {
    return S::Mul(LoadScale<S>(format, panel, group, lane), S::Set(kSmallE4m3));
  }
  MOED_INLINE void Load(const uint8_t* block, int lane) { at = block + lane; }
  MOED_INLINE typename S::F Weight(int i, Scale scale) const { return S::Mul(S::LoadSmallE4m3(at + kPanelWidth * i), scale); }
};

struct NoScale {};

// Elements that are stored as they are. bf16 comes in words of two, f16 and f32 in rows of sixteen.
template <class S>
struct Bf16Decoder {
  static constexpr bool kScaled = false;
  using Scale = NoScale;
  typename S::I words[4];
  MOED_INLINE void Load(const uint8_t* block, int lane) {
    for (int p = 0; p < 4; ++p) words[p] = S::LoadWords(block + 4 * (kPanelWidth * p + lane));
  }
  MOED_INLINE typename S::F Weight(int i, NoScale) const {
    return i % 2 == 0 ? S::LowBf16(words[i / 2]) : S::HighBf16(words[i / 2]);
  }
};

template <class S, ElementType kElement>
struct PlainDecoder {
  static constexpr bool kScaled = false;
  static constexpr int kBytes = kElement == ElementType::kF32 ? 4 : 2;
  using Scale = NoScale;
  const uint8_t* at;
  MOED_INLINE void Load(const uint8_t* block, int lane) { at = block + kBytes * lane; }
  MOED_INLINE typename S::F Weight(int i, NoScale) const {
    const uint8_t* row = at + kBytes * kPanelWidth * i;
    if constexpr (kElement == ElementType::kF16) return S::LoadF16(row);
    return S::LoadBytes(row);
  }
};

// ---- Direct: kRows rows times kPanels adjacent panels, straight from the codes. ----

template <class S, class D, int kRows, int kPanels>
void Direct(const PanelFormat& format, const uint8_t* weights, const uint8_t* const* x, float* const* out) {
  constexpr int kVectors = kPanelWidth / S::kLanes;
  constexpr int kColumns = kPanels * kVectors;
  typename S::F sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) sum[r][c] = S::Zero();
  }
  const uint8_t* at = weights + format.header_bytes;
  for (int64_t k = 0; k < format.depth;) {
    const int64_t end = format.depth - k < format.group ? format.depth : k + format.group;
    typename D::Scale scale[kColumns];
    if constexpr (D::kScaled) {
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        const int64_t panel = (c / kVectors) * format.panel_bytes;
        scale[c] = D::MakeScale(format, weights + panel, at + panel, (c % kVectors) * S::kLanes);
      }
      at += format.scale_bytes + format.zero_bytes;
    }
    for (; k < end; k += kBlockDepth, at += format.block_bytes) {
      for (int p = 0; p < kPanels; ++p) FetchAhead(at + p * format.panel_bytes, format.block_bytes);
      D codes[kColumns];
#pragma GCC unroll 8
      for (int c = 0; c < kColumns; ++c) {
        codes[c].Load(at + (c / kVectors) * format.panel_bytes, (c % kVectors) * S::kLanes);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kBlockDepth; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
          const typename S::F w = codes[c].Weight(i, scale[c]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][c] = S::Fma(S::Broadcast(reinterpret_cast<const float*>(x[r]) + k + i), w, sum[r][c]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) S::Store(out[r] + c * S::kLanes, sum[r][c]);
  }
}

// All pairs for at most kDirectRows rows. With one row, two pairs go together where the vectors are so wide that one pair
// has too few independent chains to hide the latency of a fused multiply-add.
template <class S, class D>
void DirectPairs(const MultiplyArgs& args) {
  const PanelFormat& format = *args.format;
  const int64_t pair_bytes = 2 * format.panel_bytes;
  int64_t pair = 0;
  if constexpr (S::kLanes == kPanelWidth && S::kPairsAtOnce == 2) {
    float both[2 * kPairWidth] __attribute__((aligned(64)));
    for (; args.count == 1 && pair + 2 <= args.pairs; pair += 2) {
      float* out[1] = {both};
      Direct<S, D, 1, 4>(format, args.weights + pair * pair_bytes, args.rows, out);
      for (int c = 0; c < 2 * kPairWidth; c += S::kLanes) {
        S::Store(args.tile + pair * kPairWidth + c, S::Load(both + c));
      }
    }
  }
  for (; pair < args.pairs; ++pair) {
    const uint8_t* weights = args.weights + pair * pair_bytes;
    float* out[S::kDirectRows];
    for (int64_t r = 0; r < args.count; ++r) out[r] = args.tile + (pair * args.count + r) * kPairWidth;
    switch (args.count) {
      case 1: Direct<S, D, 1, 2>(format, weights, args.rows, out); break;
      case 2: Direct<S, D, 2, 2>(format, weights, args.rows, out); break;
      case 3: if constexpr (S::kDirectRows >= 3) Direct<S, D, 3, 2>(format, weights, args.rows, out); break;
      case 4: if constexpr (S::kDirectRows >= 4) Direct<S, D, 4, 2>(format, weights, args.rows, out); break;
      default: break;
    }
  }
}

// ---- Blocked: decode once, then a register tile over many rows. ----

// decoded[k][32] for the packed features [first, first + depth) of one pair.
template <class S, class D>
void Decode(const PanelFormat& format, const uint8_t* pair, int64_t first, int64_t depth, float* decoded) {
  for (int panel = 0; panel < 2; ++panel) {
    const uint8_t* base = pair + panel * format.panel_bytes;
    for (int64_t k = first; k < first + depth; k += kBlockDepth) {
      const int64_t group = k / format.group;
      const uint8_t* scales = base + format.group_offset(group);
      const uint8_t* block =
          scales + format.scale_bytes + format.zero_bytes + (k - group * format.group) / kBlockDepth * format.block_bytes;
      float* out = decoded + (k - first) * kPairWidth + panel * kPanelWidth;
      for (int lane = 0; lane < kPanelWidth; lane += S::kLanes) {
        D codes;
        codes.Load(block, lane);
        typename D::Scale scale;
        if constexpr (D::kScaled) scale = D::MakeScale(format, base, scales, lane);
#pragma GCC unroll 8
        for (int i = 0; i < kBlockDepth; ++i) S::Store(out + i * kPairWidth + lane, codes.Weight(i, scale));
      }
    }
  }
}

// tile[r][32] += x[r][first ..] * decoded for kRows rows; starts from zero when `first` is 0.
template <class S, int kRows>
void Tile(const uint8_t* const* x, int64_t first, int64_t depth, const float* decoded, float* tile) {
  constexpr int kColumns = kPairWidth / S::kLanes;
  typename S::F sum[kRows][kColumns];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      sum[r][c] = first == 0 ? S::Zero() : S::Load(tile + r * kPairWidth + c * S::kLanes);
    }
  }
  const float* row[kRows];
  for (int r = 0; r < kRows; ++r) row[r] = reinterpret_cast<const float*>(x[r]) + first;
  for (int64_t k = 0; k < depth; ++k) {
    typename S::F w[kColumns];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) w[c] = S::Load(decoded + k * kPairWidth + c * S::kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const typename S::F value = S::Broadcast(row[r] + k);
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) sum[r][c] = S::Fma(value, w[c], sum[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) S::Store(tile + r * kPairWidth + c * S::kLanes, sum[r][c]);
  }
}

// The last rows of a block: kRows of them or fewer, by halving the tile.
template <class S, int kRows>
void TileRest(int64_t count, const uint8_t* const* x, int64_t first, int64_t depth, const float* decoded, float* tile) {
  if constexpr (kRows == 1) {
    if (count == 1) Tile<S, 1>(x, first, depth, decoded, tile);
  } else {
    constexpr int kHalf = kRows / 2;
    if (count == kRows) return Tile<S, kRows>(x, first, depth, decoded, tile);
    if (count <= kHalf) return TileRest<S, kHalf>(count, x, first, depth, decoded, tile);
    Tile<S, kHalf>(x, first, depth, decoded, tile);
    TileRest<S, kRows - kHalf>(count - kHalf, x + kHalf, first, depth, decoded, tile + kHalf * kPairWidth);
  }
}

template <class S, class D>
void BlockedPairs(const MultiplyArgs& args) {
  const PanelFormat& format = *args.format;
  for (int64_t pair = 0; pair < args.pairs; ++pair) {
    const uint8_t* weights = args.weights + pair * 2 * format.panel_bytes;
    float* tile = args.tile + pair * args.count * kPairWidth;
    for (int64_t k = 0; k < format.depth; k += S::kDepth) {
      const int64_t depth = format.depth - k < S::kDepth ? format.depth - k : S::kDepth;
      Decode<S, D>(format, weights, k, depth, args.decoded);
      int64_t r = 0;
      for (; r + S::kTileRows <= args.count; r += S::kTileRows) {
        Tile<S, S::kTileRows>(args.rows + r, k, depth, args.decoded, tile + r * kPairWidth);
      }
      if (r < args.count) {
        TileRest<S, S::kTileRows>(args.count - r, args.rows + r, k, depth, args.decoded, tile + r * kPairWidth);
      }
    }
  }
}

template <class S, class D>
void MultiplyWith(const MultiplyArgs& args) {
  if (args.count <= S::kDirectRows) {
    DirectPairs<S, D>(args);
  } else {
    BlockedPairs<S, D>(args);
  }
}

template <class S>
void Multiply(const MultiplyArgs& args) {
  switch (args.format->element) {
    case ElementType::kInt4: return MultiplyWith<S, Int4Decoder<S>>(args);
    case ElementType::kFp4E2m1: return MultiplyWith<S, Fp4Decoder<S>>(args);
    case ElementType::kInt8: return MultiplyWith<S, Int8Decoder<S>>(args);
    case ElementType::kFp8E4m3: return MultiplyWith<S, Fp8Decoder<S>>(args);
    case ElementType::kBf16: return MultiplyWith<S, Bf16Decoder<S>>(args);
    case ElementType::kF16: return MultiplyWith<S, PlainDecoder<S, ElementType::kF16>>(args);
    default: return MultiplyWith<S, PlainDecoder<S, ElementType::kF32>>(args);
  }
}

// ---- Activation. ----

// exp(x) for float32 within about 2 units in the last place: 2^n * p(r), n = round(x / ln 2), r = x - n ln 2 in two parts;
// p is the degree-6 Taylor polynomial, enough on |r| <= ln(2)/2. Above about 88.4 the result is infinity (2^128), below -87 it is
// held at exp(-87); NaN stays.
template <class S>
MOED_INLINE typename S::F Exp(typename S::F x) {
  x = S::MaxKeepNan(S::Set(-87.0f), S::MinKeepNan(S::Set(89.0f), x));
  const typename S::F n = S::Round(S::Mul(x, S::Set(1.44269504088896341f)));
  typename S::F r = S::Fma(n, S::Set(-0.693359375f), x);
  r = S::Fma(n, S::Set(2.12194440e-4f), r);
  typename S::F p = S::Set(1.0f / 720.0f);
  p = S::Fma(p, r, S::Set(1.0f / 120.0f));
  p = S::Fma(p, r, S::Set(1.0f / 24.0f));
  p = S::Fma(p, r, S::Set(1.0f / 6.0f));
  p = S::Fma(p, r, S::Set(0.5f));
  p = S::Fma(p, r, S::Set(1.0f));
  p = S::Fma(p, r, S::Set(1.0f));
  return S::Mul(p, S::PowerOfTwo(n));
}

// 1 / (1 + exp(-x)); for x below -88 held at the value there, about 6e-39.
template <class S>
MOED_INLINE typename S::F Sigmoid(typename S::F x) {
  const typename S::F power = Exp<S>(S::MinKeepNan(S::Set(88.0f), S::Sub(S::Zero(), x)));
  return S::Reciprocal(S::Add(S::Set(1.0f), power));
}

template <class S>
MOED_INLINE typename S::F Gelu(typename S::F g) {
  float values[S::kLanes];
  S::Store(values, g);
  for (int i = 0; i < S::kLanes; ++i) values[i] = GeluExact(values[i]);
  return S::Load(values);
}

// gelu_tanh(g) = g * sigmoid(2 z), z = sqrt(2/pi) (g + 0.044715 g^3), since (1 + tanh z) / 2 = sigmoid(2 z).
template <class S>
MOED_INLINE typename S::F GeluTanh(typename S::F g) {
  const typename S::F cube = S::Mul(S::Mul(g, g), g);
  const typename S::F z = S::Mul(S::Set(1.59576912160573071f), S::Fma(S::Set(0.044715f), cube, g));
  return S::Mul(g, Sigmoid<S>(z));
}

// Kinds in the order of Activation::Kind.
template <class S>
MOED_INLINE typename S::F Gated(const ActivateArgs& args, typename S::F g, typename S::F u) {
  if (args.clamped) {
    g = S::MinKeepNan(S::Set(args.limit), g);
    u = S::MaxKeepNan(S::Set(-args.limit), S::MinKeepNan(S::Set(args.limit), u));
  }
  switch (args.kind) {
    case 0: return S::Mul(S::Mul(g, Sigmoid<S>(g)), u);
    case 1: return S::Mul(Gelu<S>(g), u);
    case 2: return S::Mul(GeluTanh<S>(g), u);
    default: return S::Mul(S::Mul(S::Add(u, S::Set(1.0f)), g), Sigmoid<S>(S::Mul(S::Set(args.alpha), g)));
  }
}

template <class S>
void Activate(const ActivateArgs& args) {
  for (int64_t r = 0; r < args.count; ++r) {
    const float* tile = args.tile + r * kPairWidth;
    for (int lane = 0; lane < kPanelWidth; lane += S::kLanes) {
      const typename S::F g = S::Add(S::Load(tile + lane), S::Load(args.gate_bias + lane));
      const typename S::F u = S::Add(S::Load(tile + kPanelWidth + lane), S::Load(args.up_bias + lane));
      S::Store(args.rows[r] + lane, Gated<S>(args, g, u));
    }
  }
}

// ---- Combine and conversions; n is a multiple of kPairWidth for Combine, anything for the others. ----

template <class S>
void Combine(const CombineArgs& args) {
  for (int64_t c = 0; c < args.n; c += S::kLanes) {
    typename S::F sum = S::Zero();
    for (int j = 0; j < args.count; ++j) sum = S::Fma(S::Broadcast(args.weights + j), S::Load(args.rows[j] + c), sum);
    S::Store(args.sum + c, sum);
  }
}

template <class S>
void Widen(bool bf16, const void* in, int64_t n, float* out) {
  const uint8_t* source = static_cast<const uint8_t*>(in);
  int64_t c = 0;
  for (; c + S::kLanes <= n; c += S::kLanes) {
    S::Store(out + c, bf16 ? S::LoadBf16(source + 2 * c) : S::LoadF16(source + 2 * c));
  }
  if (c == n) return;
  uint8_t rest[2 * S::kLanes] = {};
  float wide[S::kLanes];
  for (int64_t i = 0; i < 2 * (n - c); ++i) rest[i] = source[2 * c + i];
  S::Store(wide, bf16 ? S::LoadBf16(rest) : S::LoadF16(rest));
  for (int64_t i = 0; i < n - c; ++i) out[c + i] = wide[i];
}

template <class S>
void Narrow(bool bf16, const float* in, int64_t n, void* out) {
  uint8_t* target = static_cast<uint8_t*>(out);
  int64_t c = 0;
  for (; c + S::kLanes <= n; c += S::kLanes) {
    const typename S::F value = S::Load(in + c);
    if (bf16) S::StoreBf16(target + 2 * c, value); else S::StoreF16(target + 2 * c, value);
  }
  if (c == n) return;
  float rest[S::kLanes] = {};
  uint8_t narrow[2 * S::kLanes];
  for (int64_t i = 0; i < n - c; ++i) rest[i] = in[c + i];
  if (bf16) S::StoreBf16(narrow, S::Load(rest)); else S::StoreF16(narrow, S::Load(rest));
  for (int64_t i = 0; i < 2 * (n - c); ++i) target[2 * c + i] = narrow[i];
}

template <class S>
constexpr KernelTable MakeTable() {
  return {Multiply<S>, Activate<S>, Combine<S>, Widen<S>, Narrow<S>};
}

}  // namespace
}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_KERNELS_INL_H_
