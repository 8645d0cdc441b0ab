// The vector loops. Their instructions are written out: from intrinsics GCC 12 copies and spills some of these sums in every
// step. Without `#pragma GCC unroll` it would keep the arrays in memory, and a loop would measure store forwarding.
#include <immintrin.h>

#include "bench/loops.h"

namespace moed::bench {
namespace {

// More than latency times issue rate on every processor of the last ten years.
constexpr int kChains = 12;
// Without dot instructions a chain is the addition alone, and the products on the way need registers too.
constexpr int kProductChains = 8;

__attribute__((target("avx512f"))) void FmaAvx512(int64_t steps) {
  __m512 sum[kChains] = {};
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("vfmadd213ps %2, %1, %0" : "+v"(sum[j]) : "v"(a), "v"(b));
  }
}

__attribute__((target("avx2,fma"))) void FmaAvx2(int64_t steps) {
  __m256 sum[kChains] = {};
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("vfmadd213ps %2, %1, %0" : "+x"(sum[j]) : "x"(a), "x"(b));
  }
}

void FmaPortable(int64_t steps) {
  __m128 sum[kChains] = {};
  const __m128 a = _mm_set1_ps(0.999f), b = _mm_set1_ps(0.001f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("mulps %1, %0\n\taddps %2, %0" : "+x"(sum[j]) : "x"(a), "x"(b));
  }
}

// Bytes of both signs and of every size.
constexpr int kBytes1 = 0x7B15C9A6, kBytes2 = 0x2E91D35C;

__attribute__((target("avx512f"))) void Int8Avx512Vnni(int64_t steps) {
  __m512i sum[kChains] = {};
  const __m512i a = _mm512_set1_epi32(kBytes1), b = _mm512_set1_epi32(kBytes2);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("vpdpbusd %2, %1, %0" : "+v"(sum[j]) : "v"(a), "v"(b));
  }
}

__attribute__((target("avx2"))) void Int8AvxVnni(int64_t steps) {
  __m256i sum[kChains] = {};
  const __m256i a = _mm256_set1_epi32(kBytes1), b = _mm256_set1_epi32(kBytes2);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum[j]) : "x"(a), "x"(b));
  }
}

__attribute__((target("avx512f"))) void Int8Avx512(int64_t steps) {
  __m512i sum[kProductChains] = {}, product;
  const __m512i a = _mm512_set1_epi32(kBytes1), b = _mm512_set1_epi32(kBytes2), ones = _mm512_set1_epi32(0x00010001);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kProductChains; ++j) {
      asm volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
                   : "+v"(sum[j]), "=&v"(product)
                   : "v"(a), "v"(b), "v"(ones));
    }
  }
}

__attribute__((target("avx2"))) void Int8Avx2(int64_t steps) {
  __m256i sum[kProductChains] = {}, product;
  const __m256i a = _mm256_set1_epi32(kBytes1), b = _mm256_set1_epi32(kBytes2), ones = _mm256_set1_epi32(0x00010001);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kProductChains; ++j) {
      asm volatile("vpmaddubsw %3, %2, %1\n\tvpmaddwd %4, %1, %1\n\tvpaddd %1, %0, %0"
                   : "+x"(sum[j]), "=&x"(product)
                   : "x"(a), "x"(b), "x"(ones));
    }
  }
}

__attribute__((target("avx512f"))) void Bf16Avx512(int64_t steps) {
  __m512 sum[kChains] = {};
  // Pairs that almost cancel, so that sums stay far from overflow: 1.0078 x 0.7031 - 0.8984 x 0.7891.
  const __m512i a = _mm512_set1_epi32(0x3F813F66), b = _mm512_set1_epi32(0x3F34BF4A);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kChains; ++j) asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sum[j]) : "v"(a), "v"(b));
  }
}

}  // namespace

Loop FloatFmaLoop(const IsaFlags& isa) {
  constexpr int64_t kSteps = 4'000'000;
  if (isa.avx512f) return {FmaAvx512, kSteps, 2.0 * 16 * kChains};
  if (isa.avx2 && isa.fma) return {FmaAvx2, kSteps, 2.0 * 8 * kChains};
  return {FmaPortable, kSteps, 2.0 * 4 * kChains};
}

std::optional<Loop> Int8DotLoop(const IsaFlags& isa) {
  constexpr int64_t kSteps = 4'000'000, kProductSteps = 3'000'000;
  if (isa.avx512f && isa.avx512vnni) return Loop{Int8Avx512Vnni, kSteps, 2.0 * 64 * kChains};
  if (isa.avx2 && isa.avxvnni) return Loop{Int8AvxVnni, kSteps, 2.0 * 32 * kChains};
  if (isa.avx512f && isa.avx512bw) return Loop{Int8Avx512, kProductSteps, 2.0 * 64 * kProductChains};
  if (isa.avx2) return Loop{Int8Avx2, kProductSteps, 2.0 * 32 * kProductChains};
  return std::nullopt;
}

std::optional<Loop> Bf16DotLoop(const IsaFlags& isa) {
  if (!isa.avx512f || !isa.avx512bf16) return std::nullopt;
  return Loop{Bf16Avx512, 3'000'000, 2.0 * 32 * kChains};
}

}  // namespace moed::bench
