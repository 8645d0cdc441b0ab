#include "kernels/cuda/cuda_backends.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/activation_quant.h"
#include "kernels/cuda/architectures.h"
#include "kernels/cuda/build_info.h"
#include "kernels/cuda/call_sizes.h"
#include "kernels/cuda/layer_plan.h"
#include "kernels/cuda/prepare.h"

namespace moed::cuda {
namespace {

// Of a sum whose weights are rounded: at 33 inputs a row was 1.2 % off, at 97 and all larger sizes tried none beyond 1 %.
constexpr int64_t kFewestRoundedInputs = 64;

// What a call has beside its part's arrays: x and the output as f32, ids, weights, logits and the router's scratch.
size_t CallBytes(const MoeDesc& desc, int64_t slots) {
  const int64_t row = 2 * desc.hidden + 3 * desc.num_experts + 1;
  return static_cast<size_t>(desc.max_tokens * row + 3 * slots) * sizeof(float);
}

void CheckGpu(const DeviceInfo& device, std::vector<Reason>* reasons) {
  const std::string_view build = BuildInfo();
  if (build.find("sm_") == std::string_view::npos) reasons->push_back({"not_built", "moed was built without CUDA"});
  if (!device.has_gpu) {
    reasons->push_back(
        {"gpu_missing", absl::StrCat("the machine has no GPU", device.gpu_absence.empty() ? "" : ": ", device.gpu_absence)});
  } else if (reasons->empty() && !RunsOn(build, device.cuda_major, device.cuda_minor)) {
    reasons->push_back({"gpu_unsupported", absl::StrCat("the GPU has compute capability ", device.cuda_major, ".",
                                                        device.cuda_minor, ", moed was built with ", BuildInfo())});
  }
}

// What separates the backends of this family.
struct Variant {
  std::string name;
  std::string description;
  // Hopper's own products: null where every scheme runs on those of cuda_generic, else which schemes they take, in code and in
  // words.
  bool (*fits)(const QuantScheme& scheme);
  const char* wants;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(Variant variant) : variant_(std::move(variant)) {}

  std::string Name() const override { return variant_.name; }
  std::string Description() const override { return variant_.description; }
  bool OnGpu() const override { return true; }

  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override {
    Verdict verdict;
    CheckGpu(device, &verdict.reasons);
    if (variant_.fits != nullptr) CheckHopper(desc, device, &verdict.reasons);
    const std::pair<const char*, const ActivationScheme*> inputs[] = {
        {"gate", &desc.scheme.gate.input}, {"up", &desc.scheme.up.input}, {"down", &desc.scheme.down.input}};
    for (const auto& [projection, input] : inputs) {
      if (CanQuantize(*input)) continue;
      verdict.reasons.push_back(
          {"scheme_unsupported", absl::StrCat(projection, ": activations quantized as ", ElementName(input->element), " with ",
                                              ScaleName(input->scale), " scales: no such rule")});
    }
    CheckBatchedFormat(desc, &verdict.reasons);
    if (desc.max_tokens * desc.top_k > kMostSlots) {
      verdict.reasons.push_back({"shape_unsupported", absl::StrCat(desc.max_tokens, " rows of ", desc.top_k,
                                                                   " slots in a call, want at most ", kMostSlots, " slots")});
    }
    if (desc.max_tokens_per_expert > kMostSlots / std::max(desc.num_experts, 1)) {
      verdict.reasons.push_back(
          {"shape_unsupported", absl::StrCat("batched experts: ", desc.num_experts, " experts of ", desc.max_tokens_per_expert,
                                             " rows, want at most ", kMostSlots, " rows")});
    }
    if (verdict.ok()) CheckMemory(desc, device, &verdict);
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override { return OffsetsOf(PlanOf(desc), desc.num_experts).bytes; }

  size_t WorkspaceBytes(const MoeDesc& desc) const override {
    const int64_t slots = desc.max_tokens * desc.top_k;
    size_t most = 0;
    for (const LayerPlan& plan : PlansOf(desc))
      most = std::max(most, LargestWorkspace(desc, plan, variant_.fits != nullptr, desc.max_tokens, slots));
    return most + CallBytes(desc, slots);
  }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    return PrepareOnGpu(desc, reader, pool, variant_.fits != nullptr);
  }

 private:
  void CheckMemory(const MoeDesc& desc, const DeviceInfo& device, Verdict* verdict) const {
    const size_t bytes = PreparedBytes(desc);
    if (bytes <= device.gpu_free_bytes) return;
    verdict->reasons.push_back(
        {"memory", absl::StrCat("the layer needs ", bytes, " bytes of GPU memory, ", device.gpu_free_bytes, " are free")});
  }

  void CheckHopper(const MoeDesc& desc, const DeviceInfo& device, std::vector<Reason>* reasons) const {
    if (device.has_gpu && (device.cuda_major != 9 || device.cuda_minor != 0)) {
      reasons->push_back({"gpu_unsupported", absl::StrCat("its instructions want compute capability 9.0, the GPU has ",
                                                          device.cuda_major, ".", device.cuda_minor)});
    }
    if (!variant_.fits(desc.scheme)) {
      reasons->push_back(
          {"scheme_unsupported", absl::StrCat("its products want ", variant_.wants, ", got ", Describe(desc.scheme))});
    }
    const int64_t inputs = std::min(desc.hidden, desc.intermediate);
    if (HopperRounds(desc.scheme) && inputs < kFewestRoundedInputs) {
      reasons->push_back({"shape_unsupported", absl::StrCat("it rounds weights to bf16, which does not average out in sums of ",
                                                            inputs, " inputs, want at least ", kFewestRoundedInputs)});
    }
  }

  const Variant variant_;
};

}  // namespace

std::vector<const Backend*> CudaBackends() {
  static const std::vector<const Backend*>* const backends = new std::vector<const Backend*>{
      new CudaBackend({"cuda_wna16",
                       "16-bit activations on Hopper: weights decoded into wgmma's registers where experts have many rows or bits "
                       "must not depend on the call, streamed into mma's where few, else as cuda_generic",
                       FitsHopper,
                       "int4, int8, FP8, FP6, FP4 or bf16 weights and activations that are not quantized"}),
      new CudaBackend({"cuda_generic", "every scheme on a GPU's tensor cores: exact bf16 operands, float32 sums", nullptr, ""}),
  };
  return *backends;
}

}  // namespace moed::cuda
