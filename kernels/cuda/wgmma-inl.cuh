// Hopper's barriers, bulk copies and what stands around warpgroup products, as far as the fast kernels use them (sm_90a).
#ifndef MOED_KERNELS_CUDA_WGMMA_INL_CUH_
#define MOED_KERNELS_CUDA_WGMMA_INL_CUH_

#include <cstdint>

namespace moed::cuda {

// Barriers in shared memory.
__device__ inline void InitBarrier(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void FenceBarrierInit() { asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory"); }
__device__ inline void Arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ inline void ArriveExpecting(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void WaitBarrier(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

// `bytes` (a multiple of 16) from global to shared memory by the copy engine; completes on `barrier`.
__device__ inline void CopyBulk(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline float LoadShared4(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(v) : "r"(address) : "memory");
  return v;
}

// Four 8 x 8 matrices of 16-bit elements, of which lane 4 g + t has two neighbours of row g each, transposed: lane 8 m + r gives
// the address of 16 bytes for column r of matrix m.
__device__ inline void StoreTransposed(uint32_t address, const uint32_t (&pair)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(pair[0]),
               "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
               : "memory");
}

// A barrier of so many threads, whole warps; 0 is __syncthreads'.
template <int kThreads>
__device__ inline void SyncThreads(int barrier) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Makes this thread's writes to shared memory visible to wgmma.
__device__ inline void FenceToTensorCores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ inline void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int kPending>
__device__ inline void WaitProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ inline void MoreRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void FewerRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(kRegisters));
}

// Descriptor of operand B, `step` of a tile of rows at `address`: 128-byte swizzle, 1024 bytes from eight rows to the next eight,
// 32 bytes from one step of 16 inputs to the next.
__device__ inline uint64_t OperandB(uint32_t address, int step) {
  constexpr uint32_t kSwizzle128 = 1u << 30, kEightRows = 1024 >> 4, kLeading = 1u << 16;
  const uint32_t low = (((address & 0x3FFFF) >> 4) | kLeading) + step * (32 >> 4);
  return static_cast<uint64_t>(kSwizzle128 | kEightRows) << 32 | low;
}

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_WGMMA_INL_CUH_
