#include "bench/gpu_library.h"

#include <dlfcn.h>

#include "absl/strings/str_cat.h"

namespace moed::bench {
namespace {

constexpr const char* kNames[] = {"libcublas.so.13", "libcublas.so.12", "libcublas.so"};

template <typename Function>
Function* Symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

void* OpenLibrary(const std::string& path) {
  if (!path.empty()) return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  for (const char* name : kNames) {
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
  }
  return nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GemmLibrary>> GemmLibrary::Open(const std::string& path, cudaStream_t stream) {
  std::unique_ptr<GemmLibrary> gemm(new GemmLibrary);
  gemm->library_ = OpenLibrary(path);
  if (gemm->library_ == nullptr) {
    const char* const reason = dlerror();
    return absl::NotFoundError(absl::StrCat("cuBLAS: ", reason != nullptr ? reason : "not found"));
  }
  Create* const create = Symbol<Create>(gemm->library_, "cublasCreate_v2");
  SetStream* const set_stream = Symbol<SetStream>(gemm->library_, "cublasSetStream_v2");
  gemm->destroy_ = Symbol<Destroy>(gemm->library_, "cublasDestroy_v2");
  gemm->gemm_ = Symbol<GemmEx>(gemm->library_, "cublasGemmEx");
  if (create == nullptr || set_stream == nullptr || gemm->destroy_ == nullptr || gemm->gemm_ == nullptr) {
    return absl::NotFoundError("cuBLAS: the library has not the functions that are called");
  }
  int error = create(&gemm->handle_);
  if (error == 0) error = set_stream(gemm->handle_, stream);
  if (error != 0) return absl::NotFoundError(absl::StrCat("cuBLAS: error ", error, " at its start"));
  return gemm;
}

// The library stays open: its threads and its exit handlers do not expect to be unmapped.
GemmLibrary::~GemmLibrary() {
  if (handle_ != nullptr) destroy_(handle_);
}

absl::Status GemmLibrary::Multiply(int n, const void* a, const void* b, void* c) const {
  constexpr int kTransposed = 1, kPlain = 0;  // cublasOperation_t
  constexpr int kBf16 = 14;                   // CUDA_R_16BF
  constexpr int kFloatSums = 68;              // CUBLAS_COMPUTE_32F
  constexpr int kDefault = -1;                // CUBLAS_GEMM_DEFAULT
  const float one = 1.0f, zero = 0.0f;
  // Row-major a b^T is, in columns first, the transpose of b times a.
  const int error =
      gemm_(handle_, kTransposed, kPlain, n, n, n, &one, b, kBf16, n, a, kBf16, n, &zero, c, kBf16, n, kFloatSums, kDefault);
  return error == 0 ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cuBLAS: error ", error, " of a GEMM"));
}

}  // namespace moed::bench
