#include "kernels/cuda/launch_plan.h"

#include "kernels/cuda/gemm_kinds.h"
#include "kernels/cuda/router.h"

namespace moed::cuda {
namespace {

// Launches in turn until one fails.
class Sequence {
 public:
  explicit Sequence(cudaStream_t stream) : stream_(stream) {}
  template <typename Launcher, typename... Arguments>
  void Add(bool wanted, const Launcher& launch, const Arguments&... arguments) {
    if (wanted && error_ == cudaSuccess) error_ = launch(arguments..., stream_);
  }
  cudaError_t error() const { return error_; }

 private:
  const cudaStream_t stream_;
  cudaError_t error_ = cudaSuccess;
};

void AddPart(const PartLaunch& plan, PartArgs* args, Sequence* sequence) {
  if (plan.sort.experts == 0) return;
  const SortArgs* sort = &args->sort;
  sequence->Add(true, LaunchSort, plan.sort, sort);
  sequence->Add(plan.x_absmax > 0, LaunchAbsMax, &args->x_absmax, sort, plan.x_absmax);
  sequence->Add(plan.stage_gate.rows > 0, LaunchStage, plan.stage_gate, &args->stage_gate, sort);
  sequence->Add(true, LaunchGemm, plan.gate, &args->gate, sort);
  sequence->Add(plan.gate_rests.tiles > 0, LaunchGemm, plan.gate_rests, &args->gate, sort);
  sequence->Add(plan.stage_up.rows > 0, LaunchStage, plan.stage_up, &args->stage_up, sort);
  sequence->Add(plan.split, LaunchGemm, plan.up, &args->up, sort);
  sequence->Add(plan.activate > 0, LaunchActivate, &args->activate, sort, plan.activate);
  sequence->Add(plan.h_absmax > 0, LaunchAbsMax, &args->h_absmax, sort, plan.h_absmax);
  sequence->Add(plan.stage_down.rows > 0, LaunchStage, plan.stage_down, &args->stage_down, sort);
  sequence->Add(true, LaunchGemm, plan.down, &args->down, sort);
  sequence->Add(plan.down_rests.tiles > 0, LaunchGemm, plan.down_rests, &args->down, sort);
}

}  // namespace

namespace {

cudaError_t LaunchHopper(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.codes) {
    case Codes::kInt4: return (launch.zeros ? LaunchHopperInt4Zeros : LaunchHopperInt4)(launch, args, sort, stream);
    case Codes::kFp4: return LaunchHopperFp4(launch, args, sort, stream);
    case Codes::kInt8: return (launch.zeros ? LaunchHopperInt8Zeros : LaunchHopperInt8)(launch, args, sort, stream);
    case Codes::kFp8: return LaunchHopperFp8(launch, args, sort, stream);
    case Codes::kBf16: return LaunchHopperBf16(launch, args, sort, stream);
    case Codes::kF16:
    case Codes::kF32: break;
  }
  return cudaErrorInvalidValue;
}

cudaError_t LaunchFewRows(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  switch (launch.codes) {
    case Codes::kInt4: return (launch.zeros ? LaunchFewRowsInt4Zeros : LaunchFewRowsInt4)(launch, args, sort, stream);
    case Codes::kFp4: return LaunchFewRowsFp4(launch, args, sort, stream);
    case Codes::kInt8: return (launch.zeros ? LaunchFewRowsInt8Zeros : LaunchFewRowsInt8)(launch, args, sort, stream);
    case Codes::kFp8: return LaunchFewRowsFp8(launch, args, sort, stream);
    case Codes::kBf16: return LaunchFewRowsBf16(launch, args, sort, stream);
    case Codes::kF16:
    case Codes::kF32: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchGemm(const GemmLaunch& launch, const GemmArgs* args, const SortArgs* sort, cudaStream_t stream) {
  if (launch.product == Product::kHopper) return LaunchHopper(launch, args, sort, stream);
  if (launch.product == Product::kFewRows) return LaunchFewRows(launch, args, sort, stream);
  if (launch.bytes && launch.codes == Codes::kInt8) return LaunchBytesInt8(launch, args, sort, stream);
  if (launch.bytes && launch.codes == Codes::kFp8) return LaunchBytesFp8(launch, args, sort, stream);
  switch (launch.codes) {
    case Codes::kInt4: return LaunchGemmInt4(launch, args, sort, stream);
    case Codes::kFp4: return LaunchGemmFp4(launch, args, sort, stream);
    case Codes::kInt8: return LaunchGemmInt8(launch, args, sort, stream);
    case Codes::kFp8: return LaunchGemmFp8(launch, args, sort, stream);
    case Codes::kBf16: return LaunchGemmBf16(launch, args, sort, stream);
    case Codes::kF16: return LaunchGemmF16(launch, args, sort, stream);
    case Codes::kF32: return LaunchGemmF32(launch, args, sort, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t Enqueue(const LaunchPlan& plan, CallBlock* block, cudaStream_t stream) {
  Sequence sequence(stream);
  const RouterArgs* router = &block->router;
  sequence.Add(plan.gate, LaunchGate, router, plan.rows, plan.router_experts);
  sequence.Add(plan.router_experts > 0, LaunchRouter, router, plan.rows, plan.router_experts);
  AddPart(plan.part[0], &block->part[0], &sequence);
  AddPart(plan.part[1], &block->part[1], &sequence);
  sequence.Add(plan.combine > 0, LaunchCombine, &block->combine, plan.combine, plan.hidden);
  return sequence.error();
}

}  // namespace moed::cuda
