#include "kernels/cpu/cpu_backends.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/activation_quant.h"
#include "kernels/cpu/call_plan.h"
#include "kernels/cpu/canonical_layer.h"
#include "kernels/cpu/cpu_moe.h"
#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/packed_layer.h"

namespace moed::cpu {
namespace {

// What separates the backends of this family.
struct Variant {
  const char* name;
  const char* description;
  IsaFlags needs;
  const KernelTable& (*kernels)();
  bool every_scheme;  // schemes without a packed layout run on decoded canonical weights
};

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
    CheckActivations(desc.scheme, &verdict.reasons);
    if (!variant_.every_scheme) HasPackedLayout(desc.scheme, &verdict.reasons);
    if (verdict.ok()) CheckMemory(desc, device, &verdict);
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    return Packs(desc) ? PackedLayer::BytesOf(desc) : CanonicalLayer::BytesOf(desc);
  }

  size_t WorkspaceBytes(const MoeDesc& desc) const override {
    const LayerShape shape = Packs(desc) ? PackedLayer::ShapeOf(desc) : CanonicalLayer::ShapeOf(desc);
    return CallPlan(desc, shape, desc.max_tokens, desc.top_k).bytes();
  }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    absl::StatusOr<std::unique_ptr<LayerStore>> store =
        Packs(desc) ? PackedLayer::Make(desc, reader, pool) : CanonicalLayer::Make(desc, reader, pool);
    if (!store.ok()) return store.status();
    return MakeCpuMoe(desc, variant_.kernels(), *std::move(store));
  }

 private:
  static bool Packs(const MoeDesc& desc) { return HasPackedLayout(desc.scheme, nullptr); }

  static void CheckActivations(const QuantScheme& scheme, std::vector<Reason>* reasons) {
    const std::pair<const char*, const ActivationScheme*> inputs[] = {
        {"gate", &scheme.gate.input}, {"up", &scheme.up.input}, {"down", &scheme.down.input}};
    for (const auto& [projection, input] : inputs) {
      if (CanQuantize(*input)) continue;
      reasons->push_back({"scheme_unsupported", absl::StrCat(projection, ": activations quantized as ", ElementName(input->element),
                                                             " with ", ScaleName(input->scale), " scales: no such rule")});
    }
  }

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
      {"cpu_avx512", "every scheme but act-order and FP6, float32 FMA, 512-bit vectors", Avx512Flags(), Avx512Kernels, false});
  static const CpuBackend* const avx2 = new CpuBackend(
      {"cpu_avx2", "every scheme but act-order and FP6, float32 FMA, 256-bit vectors", Avx2Flags(), Avx2Kernels, false});
  static const CpuBackend* const generic =
      new CpuBackend({"cpu_generic", "every scheme, portable code for any processor", IsaFlags(), PortableKernels, true});
  return {avx512, avx2, generic};
}

}  // namespace moed::cpu
