#include "kernels/cpu/cpu_backends.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/activation_quant.h"
#include "kernels/cpu/call_plan.h"
#include "kernels/cpu/canonical_layer.h"
#include "kernels/cpu/cpu_moe.h"
#include "kernels/cpu/operands.h"
#include "kernels/cpu/packed_layer.h"

namespace moed::cpu {
namespace {

// Which schemes a backend of this family takes.
enum class Takes {
  kEverything,  // schemes without a packed layout run on decoded canonical weights
  kPacked,      // every scheme with a packed layout
  kDots,        // those of them that its dot products execute in all three projections
};

// What separates the backends of this family.
struct Variant {
  std::string name;
  std::string description;
  IsaFlags needs;
  CpuKernels kernels;
  Takes takes;
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
    CheckBatchedFormat(desc, &verdict.reasons);
    if (variant_.takes != Takes::kEverything) HasPackedLayout(desc.scheme, &verdict.reasons);
    if (variant_.takes == Takes::kDots) CheckDots(desc.scheme, &verdict.reasons);
    if (verdict.ok()) CheckMemory(desc, device, &verdict);
    return verdict;
  }

  size_t PreparedBytes(const MoeDesc& desc) const override {
    return Packs(desc) ? PackedLayer::BytesOf(desc) : CanonicalLayer::BytesOf(desc);
  }

  size_t WorkspaceBytes(const MoeDesc& desc) const override {
    const LayerShape shape = Packs(desc) ? PackedLayer::ShapeOf(desc) : CanonicalLayer::ShapeOf(desc);
    return CallPlan(desc, shape, variant_.kernels, DType::kBf16, {desc.max_tokens, desc.top_k}).bytes();
  }

  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc& desc, const ExpertReader& reader,
                                                       WorkerPool& pool) const override {
    absl::StatusOr<std::unique_ptr<LayerStore>> store =
        Packs(desc) ? PackedLayer::Make(desc, reader, pool) : CanonicalLayer::Make(desc, reader, pool);
    // What only the bytes of the weights tell: the layer runs all the same, decoded as it goes.
    if (absl::IsUnimplemented(store.status())) store = CanonicalLayer::Make(desc, reader, pool);
    if (!store.ok()) return store.status();
    return MakeCpuMoe(desc, variant_.kernels, *std::move(store));
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

  // A layer without a product for this backend's instructions is another backend's.
  void CheckDots(const QuantScheme& scheme, std::vector<Reason>* reasons) const {
    const auto all = [&](bool (*fits)(const LinearScheme&)) { return fits(scheme.gate) && fits(scheme.up) && fits(scheme.down); };
    if (variant_.kernels.int8 != nullptr && all(FitsInt8Dots)) return;
    if (variant_.kernels.bf16 != nullptr && all(FitsBf16Dots)) return;
    const char* const int8 = "int4, int8 or FP4 weights with int8 activations of one scale a row";
    const char* const bf16 = "bf16, FP8, FP4, int8 or int4 weights with activations that are not quantized";
    reasons->push_back({"scheme_unsupported", absl::StrCat("its products want ", variant_.kernels.int8 != nullptr ? int8 : "",
                                                           variant_.kernels.int8 != nullptr && variant_.kernels.bf16 != nullptr ? ", or " : "",
                                                           variant_.kernels.bf16 != nullptr ? bf16 : "", ", got ", Describe(scheme))});
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

IsaFlags With(IsaFlags flags, std::initializer_list<bool IsaFlags::*> more) {
  for (bool IsaFlags::*flag : more) flags.*flag = true;
  return flags;
}

std::vector<Variant> Variants() {
  using Flags = IsaFlags;
  const IsaFlags avx2 = Avx2Flags(), avx512 = Avx512Flags();
  const IsaFlags amx = With(avx512, {&Flags::avx512vnni, &Flags::avx512bf16, &Flags::amx_tile, &Flags::amx_int8, &Flags::amx_bf16});
  const KernelTable *wide = &Avx512Kernels(), *narrow = &Avx2Kernels();
  const char* const kPackedText = "every scheme but FP6: float32 FMA, and integer multiply-adds for int8 activations, ";
  return {
      {"cpu_amx", "tiles of int8 or bf16 products, 512-bit vectors for a few rows, float32 for f16 and f32 on the wire", amx, {wide, &AmxInt8Dots(), &AmxBf16Dots()},
       Takes::kDots},
      {"cpu_vnni", "int8 activations: VPDPBUSD in 512-bit vectors, exact sums", With(avx512, {&Flags::avx512vnni}),
       {wide, &VnniDots(), nullptr}, Takes::kDots},
      {"cpu_avx512bf16", "16-bit activations: VDPBF16PS in 512-bit vectors; float32 FMA for f16 and f32 on the wire",
       With(avx512, {&Flags::avx512bf16}), {wide, nullptr, &Avx512Bf16Dots()}, Takes::kDots},
      {"cpu_avx512", absl::StrCat(kPackedText, "512-bit vectors"), avx512, {wide, &Avx512Dots(), nullptr}, Takes::kPacked},
      {"cpu_avxvnni", "int8 activations: VPDPBUSD in 256-bit vectors, exact sums", With(avx2, {&Flags::avxvnni}),
       {narrow, &AvxVnniDots(), nullptr}, Takes::kDots},
      {"cpu_avx2", absl::StrCat(kPackedText, "256-bit vectors"), avx2, {narrow, &Avx2Dots(), nullptr}, Takes::kPacked},
      {"cpu_generic", "every scheme, portable code for any processor", IsaFlags(), {&PortableKernels(), nullptr, nullptr},
       Takes::kEverything},
  };
}

}  // namespace

std::vector<const Backend*> CpuBackends() {
  static const std::vector<const Backend*>* const backends = [] {
    auto* all = new std::vector<const Backend*>();
    for (const Variant& variant : Variants()) all->push_back(new CpuBackend(variant));
    return all;
  }();
  return *backends;
}

}  // namespace moed::cpu
