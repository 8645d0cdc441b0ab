#include "bench/ceilings.h"

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace moed::bench {
namespace {

double Seconds(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Keeps a value alive without storing it anywhere.
void Keep(float value) { asm volatile("" : : "x"(value)); }

__attribute__((target("avx512f"))) void ReadAvx512(const float* data, int64_t n) {
  __m512i sum[4] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64) {
#pragma GCC unroll 16
    for (int j = 0; j < 4; ++j) sum[j] = _mm512_or_si512(sum[j], _mm512_loadu_si512(data + i + 16 * j));
  }
  const __m512i all = _mm512_or_si512(_mm512_or_si512(sum[0], sum[1]), _mm512_or_si512(sum[2], sum[3]));
  Keep(_mm_cvtss_f32(_mm_castsi128_ps(_mm512_castsi512_si128(all))));
}

__attribute__((target("avx2"))) void ReadAvx2(const float* data, int64_t n) {
  __m256i sum[8] = {};
  for (int64_t i = 0; i + 64 <= n; i += 64) {
#pragma GCC unroll 16
    for (int j = 0; j < 8; ++j) {
      sum[j] = _mm256_or_si256(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + i + 8 * j)));
    }
  }
#pragma GCC unroll 16
  for (int j = 1; j < 8; ++j) sum[0] = _mm256_or_si256(sum[0], sum[j]);
  Keep(_mm_cvtss_f32(_mm_castsi128_ps(_mm256_castsi256_si128(sum[0]))));
}

void ReadPortable(const float* data, int64_t n) {
  __m128i sum = _mm_setzero_si128();
  for (int64_t i = 0; i + 4 <= n; i += 4) {
    sum = _mm_or_si128(sum, _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + i)));
  }
  Keep(_mm_cvtss_f32(_mm_castsi128_ps(sum)));
}

struct CeilingText {
  const char* name;
  const char* unit;
};
constexpr CeilingText kTexts[kCeilingCount] = {{"read stream", "GB/s"}, {"float FMA", "GFLOPS"},  {"int8 dot", "Gop/s"},
                                               {"bf16 dot", "GFLOPS"},  {"tile int8", "Gop/s"}, {"tile bf16", "GFLOPS"}};

}  // namespace

const char* CeilingName(Ceiling ceiling) { return kTexts[static_cast<int>(ceiling)].name; }
const char* CeilingUnit(Ceiling ceiling) { return kTexts[static_cast<int>(ceiling)].unit; }

double Median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

Ceilings::Ceilings(WorkerPool& pool, const IsaFlags& isa, size_t stream_bytes)
    : pool_(pool), isa_(isa), stream_(stream_bytes / sizeof(float), 1.0f),
      loops_{std::nullopt, FloatFmaLoop(isa), Int8DotLoop(isa), Bf16DotLoop(isa), TileInt8Loop(isa), TileBf16Loop(isa)} {}

void Ceilings::Measure() {
  measured_[static_cast<int>(Ceiling::kReadStream)].push_back(MeasureRead());
  for (int at = 0; at < kCeilingCount; ++at) {
    if (loops_[at]) measured_[at].push_back(MeasureLoop(*loops_[at]));
  }
}

std::optional<double> Ceilings::Of(Ceiling ceiling) const {
  const std::vector<double>& measured = measured_[static_cast<int>(ceiling)];
  if (measured.empty()) return std::nullopt;
  return Median(measured);
}

double Ceilings::MeasureRead() const {
  const auto read = isa_.avx512f ? ReadAvx512 : isa_.avx2 ? ReadAvx2 : ReadPortable;
  const int64_t share = static_cast<int64_t>(stream_.size()) / pool_.threads();
  const auto start = std::chrono::steady_clock::now();
  pool_.ParallelFor(pool_.threads(), [&](int64_t part, int) { read(stream_.data() + part * share, share); });
  return static_cast<double>(share) * pool_.threads() * sizeof(float) / Seconds(start);
}

double Ceilings::MeasureLoop(const Loop& loop) const {
  const auto start = std::chrono::steady_clock::now();
  pool_.ParallelFor(pool_.threads(), [&](int64_t, int) { loop.run(loop.steps); });
  return loop.operations * static_cast<double>(loop.steps) * pool_.threads() / Seconds(start);
}

}  // namespace moed::bench
