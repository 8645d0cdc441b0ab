#include "bench/ceilings.h"

#include <immintrin.h>

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

// 12 chains: more than latency times issue rate on every processor of the last ten years.
constexpr int kChains = 12;

__attribute__((target("avx512f"))) void FmaAvx512(int64_t steps) {
  __m512 sum[kChains];
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) sum[j] = _mm512_set1_ps(1.0f + static_cast<float>(j));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) sum[j] = _mm512_fmadd_ps(sum[j], a, b);
  }
#pragma GCC unroll 16
  for (int j = 1; j < kChains; ++j) sum[0] = _mm512_add_ps(sum[0], sum[j]);
  Keep(_mm512_cvtss_f32(sum[0]));
}

__attribute__((target("avx2,fma"))) void FmaAvx2(int64_t steps) {
  __m256 sum[kChains];
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) sum[j] = _mm256_set1_ps(1.0f + static_cast<float>(j));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) sum[j] = _mm256_fmadd_ps(sum[j], a, b);
  }
#pragma GCC unroll 16
  for (int j = 1; j < kChains; ++j) sum[0] = _mm256_add_ps(sum[0], sum[j]);
  Keep(_mm256_cvtss_f32(sum[0]));
}

void FmaPortable(int64_t steps) {
  __m128 sum[kChains];
#pragma GCC unroll 16
  for (int j = 0; j < kChains; ++j) sum[j] = _mm_set1_ps(1.0f + static_cast<float>(j));
  const __m128 a = _mm_set1_ps(0.999f), b = _mm_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) sum[j] = _mm_add_ps(_mm_mul_ps(sum[j], a), b);
  }
#pragma GCC unroll 16
  for (int j = 1; j < kChains; ++j) sum[0] = _mm_add_ps(sum[0], sum[j]);
  Keep(_mm_cvtss_f32(sum[0]));
}

}  // namespace

ReadStream::ReadStream(size_t bytes) : data_(bytes / sizeof(float), 1.0f) {}

double ReadStream::Measure(WorkerPool& pool, const IsaFlags& isa) const {
  const auto read = isa.avx512f ? ReadAvx512 : isa.avx2 ? ReadAvx2 : ReadPortable;
  const int64_t share = static_cast<int64_t>(data_.size()) / pool.threads();
  const auto start = std::chrono::steady_clock::now();
  pool.ParallelFor(pool.threads(), [&](int64_t part, int) { read(data_.data() + part * share, share); });
  return static_cast<double>(share) * pool.threads() * sizeof(float) / Seconds(start);
}

double MeasureFma(WorkerPool& pool, const IsaFlags& isa) {
  constexpr int64_t kSteps = 2'000'000;
  const auto run = isa.avx512f ? FmaAvx512 : (isa.avx2 && isa.fma) ? FmaAvx2 : FmaPortable;
  const int lanes = isa.avx512f ? 16 : (isa.avx2 && isa.fma) ? 8 : 4;
  const auto start = std::chrono::steady_clock::now();
  pool.ParallelFor(pool.threads(), [&](int64_t, int) { run(kSteps); });
  return 2.0 * kSteps * kChains * lanes * pool.threads() / Seconds(start);
}

}  // namespace moed::bench
