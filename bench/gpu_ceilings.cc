#include "bench/gpu_ceilings.h"

#include <algorithm>

#include "bench/ceilings.h"
#include "bench/gpu_kernels.h"

namespace moed::bench {
namespace {

using cuda::ToStatus;

constexpr int64_t kStreamBytes = int64_t{4} << 30;
constexpr int kGemmSize = 8192;
constexpr int64_t kFactorBytes = int64_t{kGemmSize} * kGemmSize * 2;
constexpr int kBlocksPerMultiprocessor[] = {1, 2, 4, 8, 16};

}  // namespace

absl::StatusOr<std::unique_ptr<GpuCeilings>> GpuCeilings::Make(const std::string& gemm_library, cudaStream_t stream) {
  std::unique_ptr<GpuCeilings> ceilings(new GpuCeilings(stream));
  absl::Status status = ceilings->Allocate();
  if (!status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GemmLibrary>> gemm = GemmLibrary::Open(gemm_library, stream);
  if (gemm.ok()) {
    ceilings->gemm_ = *std::move(gemm);
  } else if (gemm_library.empty()) {
    ceilings->no_gemm_ = std::string(gemm.status().message());
  } else {
    return gemm.status();
  }
  return ceilings;
}

GpuCeilings::~GpuCeilings() {
  if (begin_ != nullptr) cudaEventDestroy(begin_);
  if (end_ != nullptr) cudaEventDestroy(end_);
}

absl::Status GpuCeilings::Allocate() {
  int device = 0;
  absl::Status status = ToStatus(cudaGetDevice(&device), "device");
  if (status.ok()) status = ToStatus(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), "device");
  if (status.ok()) status = ToStatus(cudaEventCreate(&begin_), "event");
  if (status.ok()) status = ToStatus(cudaEventCreate(&end_), "event");
  if (status.ok()) status = stream_bytes_.Allocate(kStreamBytes, "memory for the read stream");
  if (status.ok()) status = factors_.Allocate(3 * kFactorBytes, "matrices of the GEMM");
  if (status.ok()) status = sink_.Allocate(sizeof(uint32_t), "sink of the read stream");
  if (!status.ok()) return status;
  // Zeros would take less power, and so less time.
  status = ToStatus(LaunchFillCodes(cuda::Codes::kInt8, 1.0f, 1, stream_bytes_.data(), kStreamBytes, stream_), "random bytes");
  if (!status.ok()) return status;
  return ToStatus(LaunchFillCodes(cuda::Codes::kBf16, 1.0f, 2, factors_.data(), 3 * kFactorBytes, stream_), "random matrices");
}

template <typename Launch>
absl::StatusOr<double> GpuCeilings::Time(int repeats, const Launch& launch) const {
  absl::Status status = launch();
  if (status.ok()) status = ToStatus(cudaEventRecord(begin_, stream_), "ceiling");
  for (int repeat = 0; repeat < repeats && status.ok(); ++repeat) status = launch();
  if (status.ok()) status = ToStatus(cudaEventRecord(end_, stream_), "ceiling");
  if (status.ok()) status = ToStatus(cudaEventSynchronize(end_), "ceiling");
  float ms = 0.0f;
  if (status.ok()) status = ToStatus(cudaEventElapsedTime(&ms, begin_, end_), "ceiling");
  if (!status.ok()) return status;
  return static_cast<double>(ms) / repeats;
}

// `launch` gets a number of thread blocks. Milliseconds.
template <typename Launch>
absl::StatusOr<double> GpuCeilings::BestGrid(const Launch& launch) const {
  constexpr int kRepeats = 5;
  double best = 0.0;
  for (const int blocks : kBlocksPerMultiprocessor) {
    const absl::StatusOr<double> ms = Time(kRepeats, [&] { return ToStatus(launch(blocks * multiprocessors_), "ceiling"); });
    if (!ms.ok()) return ms.status();
    if (best == 0.0 || *ms < best) best = *ms;
  }
  return best;
}

absl::Status GpuCeilings::Measure() {
  std::byte* const data = stream_bytes_.data();
  uint32_t* const sink = reinterpret_cast<uint32_t*>(sink_.data());
  const absl::StatusOr<double> read =
      BestGrid([&](int blocks) { return LaunchReadStream(data, kStreamBytes, blocks, sink, stream_); });
  if (!read.ok()) return read.status();
  read_.push_back(kStreamBytes / (*read * 1e6));
  const absl::StatusOr<double> copy =
      BestGrid([&](int blocks) { return LaunchCopyStream(data, data + kStreamBytes / 2, kStreamBytes / 2, blocks, stream_); });
  if (!copy.ok()) return copy.status();
  copy_.push_back(kStreamBytes / (*copy * 1e6));
  if (gemm_ == nullptr) return absl::OkStatus();
  constexpr int kRepeats = 10;
  std::byte* const a = factors_.data();
  const absl::StatusOr<double> gemm =
      Time(kRepeats, [&] { return gemm_->Multiply(kGemmSize, a, a + kFactorBytes, a + 2 * kFactorBytes); });
  if (!gemm.ok()) return gemm.status();
  gemm_rates_.push_back(2.0 * kGemmSize * kGemmSize * kGemmSize / (*gemm * 1e9));
  return absl::OkStatus();
}

MeasuredGpu GpuCeilings::Median() const {
  MeasuredGpu measured = {bench::Median(read_), bench::Median(copy_), std::nullopt};
  if (!gemm_rates_.empty()) measured.gemm_tflops = bench::Median(gemm_rates_);
  return measured;
}

}  // namespace moed::bench
