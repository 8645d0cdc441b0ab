// The vendor's GEMM, from a shared library that is looked for at run time: moed itself links none. One thread.
#ifndef MOED_BENCH_GPU_LIBRARY_H_
#define MOED_BENCH_GPU_LIBRARY_H_

#include <cuda_runtime_api.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed::bench {

class GemmLibrary {
 public:
  // Opens cuBLAS from the file `path`, or, when that is empty, where the dynamic linker finds it (LD_LIBRARY_PATH). NOT_FOUND with
  // the linker's reason.
  static absl::StatusOr<std::unique_ptr<GemmLibrary>> Open(const std::string& path, cudaStream_t stream);
  ~GemmLibrary();

  // c [n, n] = a [n, n] times the transposed b [n, n], all bf16 in device memory, float32 sums; asynchronous.
  absl::Status Multiply(int n, const void* a, const void* b, void* c) const;

 private:
  GemmLibrary() = default;

  // cuBLAS's own declarations, whose enumerations are integers here.
  using Create = int(void** handle);
  using Destroy = int(void* handle);
  using SetStream = int(void* handle, cudaStream_t stream);
  using GemmEx = int(void* handle, int trans_a, int trans_b, int m, int n, int k, const void* alpha, const void* a, int a_type,
                     int lda, const void* b, int b_type, int ldb, const void* beta, void* c, int c_type, int ldc, int compute_type,
                     int algorithm);
  void* library_ = nullptr;
  void* handle_ = nullptr;
  Destroy* destroy_ = nullptr;
  GemmEx* gemm_ = nullptr;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_GPU_LIBRARY_H_
