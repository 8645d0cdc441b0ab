// The boundary between portable host code and the instruction-set files: plain structs and function pointers.
//
// Each instruction set is one file that fills one KernelTable from the shared templates of kernels-inl.h. Those files are
// compiled with their own flags and therefore must not contain any function with external linkage but the one that returns
// the table: an inline function of a header compiled there could be picked by the linker for the whole program and
// fault on a lesser machine. (A step of the test command checks the object files.)
#ifndef MOED_KERNELS_CPU_KERNEL_TABLE_H_
#define MOED_KERNELS_CPU_KERNEL_TABLE_H_

#include <cstdint>

#include "kernels/cpu/packed_layout.h"

namespace moed::cpu {

inline constexpr int kRowBlock = 192;         // rows of one multiply call, at most
inline constexpr int kMaxDecodedDepth = 256;  // input features that a kernel may decode at once

// tile[pair][row][32] = sum over k of x[row][k] * w[k][32 columns of the pair], k ascending, float32 fused multiply-adds.
struct MultiplyArgs {
  const PanelFormat* format = nullptr;
  const uint8_t* weights = nullptr;      // first pair; pairs follow each other
  int64_t pairs = 0;
  const uint8_t* const* rows = nullptr;  // [count] rows of x in packed order, format->depth floats each
  int64_t count = 0;                     // 1 .. kRowBlock
  float* tile = nullptr;                 // [pairs][count][32], aligned to 64
  float* decoded = nullptr;              // scratch [kMaxDecodedDepth][32], aligned to 64
};

// h[row][0..16) = act(gate + gate_bias, up + up_bias); the tile row holds 16 gate columns, then 16 up columns.
struct ActivateArgs {
  int kind = 0;            // Activation::Kind
  float alpha = 0.0f;
  bool clamped = false;
  float limit = 0.0f;
  const float* tile = nullptr;       // [count][32]
  const float* gate_bias = nullptr;  // [16], zeros where the layer has none
  const float* up_bias = nullptr;
  int64_t count = 0;
  float* const* rows = nullptr;      // [count] where to write 16 floats
};

// sum[0..n) = sum over j of weights[j] * rows[j][0..n), j ascending, float32 fused multiply-adds; no rows: zeros.
struct CombineArgs {
  const float* const* rows = nullptr;
  const float* weights = nullptr;
  int count = 0;
  int64_t n = 0;
  float* sum = nullptr;
};

struct KernelTable {
  void (*multiply)(const MultiplyArgs& args);
  void (*activate)(const ActivateArgs& args);
  void (*combine)(const CombineArgs& args);
  // n elements of bf16 (bf16 = true) or f16 to float32 and back (round to nearest even).
  void (*widen)(bool bf16, const void* in, int64_t n, float* out);
  void (*narrow)(bool bf16, const float* in, int64_t n, void* out);
};

const KernelTable& PortableKernels();
const KernelTable& Avx2Kernels();    // needs AVX2, FMA, F16C
const KernelTable& Avx512Kernels();  // needs AVX-512 F, BW, VL, DQ

// erf-based GELU of one value, portable code: too rare to be worth a vector version.
float GeluExact(float gate);

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_KERNEL_TABLE_H_
