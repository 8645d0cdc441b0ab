#include "kernels/cuda/reference.h"

#include "absl/strings/str_cat.h"
#include "kernels/activation_quant.h"
#include "kernels/cuda/reference_layer.h"

namespace moed::cuda {
namespace {

// Compute capability of the kernels' machine code, which other devices cannot run.
constexpr int kMajor = 9, kMinor = 0;

// Bytes of a projection [rows, cols] of one expert: float32 weights, bias and input scale.
size_t ProjectionBytes(int64_t rows, int64_t cols, bool bias) {
  return static_cast<size_t>(rows * cols + (bias ? rows : 0) + 1) * sizeof(float);
}

class Reference : public Backend {
 public:
  bool OnGpu() const override { return true; }
  std::string Name() const override { return "cuda_reference"; }
  std::string Description() const override { return "exact weights as f32, double accumulation: the judge of GPU backends"; }
  bool Automatic() const override { return false; }

  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override {
    Verdict verdict;
    if (!ReferenceIsBuilt()) verdict.reasons.push_back({"not_built", "this build has no CUDA"});
    if (!device.has_gpu) {
      verdict.reasons.push_back(
          {"gpu_missing", absl::StrCat("the machine has no GPU", device.gpu_absence.empty() ? "" : ": ", device.gpu_absence)});
    } else if (device.cuda_major != kMajor || device.cuda_minor != kMinor) {
      verdict.reasons.push_back({"capability_unsupported", absl::StrCat("the GPU has compute capability ", device.cuda_major, ".",
                                                                        device.cuda_minor, ", want ", kMajor, ".", kMinor)});
    }
    for (const LinearScheme* linear : {&desc.scheme.gate, &desc.scheme.up, &desc.scheme.down}) {
      if (CanQuantize(linear->input)) continue;
      const ActivationScheme& input = linear->input;
      verdict.reasons.push_back({"scheme_unsupported", absl::StrCat("activations quantized as ", ElementName(input.element), ", ",
                                                                    ScaleName(input.scale), " scales: no such rule")});
      break;
    }
    CheckBatchedFormat(desc, &verdict.reasons);
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    return static_cast<size_t>(desc.num_experts) * (2 * ProjectionBytes(desc.intermediate, desc.hidden, desc.biases) +
                                                    ProjectionBytes(desc.hidden, desc.intermediate, desc.biases));
  }

  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    return PrepareReference(desc, reader, pool);
  }
};

}  // namespace

const Backend& ReferenceBackend() {
  static const Reference* const backend = new Reference;
  return *backend;
}

}  // namespace moed::cuda
