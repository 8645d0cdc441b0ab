#include "kernels/cpu/cpu_backends.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_layer.h"
#include "kernels/cpu/packed_moe.h"

namespace moed::cpu {
namespace {

// What separates the backends of this family.
struct Variant {
  const char* name;
  const char* description;
  IsaFlags needs;
  const KernelTable& (*kernels)();
};

// Everything a projection's weights can get wrong for the packed layout, in words with the projection named.
void CheckWeights(const char* projection, const LinearScheme& linear, std::vector<Reason>* reasons) {
  const WeightScheme& weights = linear.weights;
  const auto no = [&](const std::string& text) {
    reasons->push_back({"scheme_unsupported", absl::StrCat(projection, ": ", text)});
  };
  if (linear.input.mode != ActivationMode::kNone) {
    no(absl::StrCat("quantized activations (", ElementName(linear.input.element), ") are not executed by this backend"));
  }
  if (IsUnquantized(weights.element)) return;
  if (weights.element != ElementType::kInt4) {
    no(absl::StrCat("weights are ", ElementName(weights.element), ", this backend has int4, bf16, f16 and f32"));
    return;
  }
  if (weights.zero_points) no("int4 with zero points; this backend has symmetric int4 only");
  if (weights.act_order) no("act-order (scattered groups) is not executed by this backend");
  if (weights.global_scale != GlobalScale::kNone) no("a second, global scale is not executed by this backend");
  if (weights.scale != ScaleType::kF16 && weights.scale != ScaleType::kBf16 && weights.scale != ScaleType::kF32) {
    no(absl::StrCat("scales are ", ScaleName(weights.scale), ", this backend has f16, bf16 and f32"));
  }
}

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const Variant& variant) : variant_(variant) {}

  std::string Name() const override { return variant_.name; }
  std::string Description() const override { return variant_.description; }

  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override {
    Verdict verdict;
    std::vector<std::string> missing;
    for (const IsaFlagName& flag : IsaFlagNames()) {
      if (variant_.needs.*flag.flag && !(device.isa.*flag.flag)) missing.push_back(flag.name);
    }
    if (!missing.empty()) {
      verdict.reasons.push_back({"isa_missing", absl::StrCat("the processor lacks ", absl::StrJoin(missing, ", "))});
    }
    CheckWeights("gate", desc.scheme.gate, &verdict.reasons);
    CheckWeights("up", desc.scheme.up, &verdict.reasons);
    CheckWeights("down", desc.scheme.down, &verdict.reasons);
    if (!(desc.scheme.gate == desc.scheme.up)) {
      verdict.reasons.push_back({"scheme_unsupported", absl::StrCat("gate (", Describe(desc.scheme.gate.weights), ") and up (",
                                                                    Describe(desc.scheme.up.weights), ") differ")});
    }
    if (verdict.ok()) CheckMemory(desc, device, &verdict);
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    return static_cast<size_t>(MakeShape(desc).expert_bytes) * desc.num_experts;
  }

  size_t WorkspaceBytes(const MoeDesc& desc) const override {
    return PackedWorkspaceBytes(desc, desc.max_tokens, desc.top_k);
  }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    absl::StatusOr<std::unique_ptr<PackedLayer>> layer = PackedLayer::Make(desc, reader, pool);
    if (!layer.ok()) return layer.status();
    return MakePackedMoe(desc, variant_.kernels(), std::move(*layer));
  }

 private:
  // The sizes are only computed for schemes that the layout knows.
  void CheckMemory(const MoeDesc& desc, const DeviceInfo& device, Verdict* verdict) const {
    const size_t bytes = PreparedBytes(desc);
    if (device.memory_bytes == 0 || bytes <= device.memory_bytes) return;
    verdict->reasons.push_back(
        {"memory", absl::StrCat("the layer needs ", bytes, " bytes, the machine has ", device.memory_bytes)});
  }

  const Variant variant_;
};

IsaFlags Avx2Flags() {
  IsaFlags flags;
  flags.avx2 = flags.fma = flags.f16c = true;
  return flags;
}

IsaFlags Avx512Flags() {
  IsaFlags flags = Avx2Flags();
  flags.avx512f = flags.avx512bw = flags.avx512vl = flags.avx512dq = true;
  return flags;
}

}  // namespace

std::vector<const Backend*> CpuBackends() {
  static const CpuBackend* const avx512 = new CpuBackend(
      {"cpu_avx512", "int4 and 16-bit weights, float32 FMA, 512-bit vectors", Avx512Flags(), Avx512Kernels});
  static const CpuBackend* const avx2 =
      new CpuBackend({"cpu_avx2", "int4 and 16-bit weights, float32 FMA, 256-bit vectors", Avx2Flags(), Avx2Kernels});
  static const CpuBackend* const generic =
      new CpuBackend({"cpu_generic", "int4 and 16-bit weights, portable code for any processor", IsaFlags(), PortableKernels});
  return {avx512, avx2, generic};
}

}  // namespace moed::cpu
