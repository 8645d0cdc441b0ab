// config.json as moed understands it: the family of the model, its sizes, its routing rule, and the quantization that the
// file declares, per module.
//
// Parsed once, then a plain value. Unknown families, contradictory sizes and quantization methods that are not supported
// are refused here with the key named; a key that no rule reads is ignored.
#ifndef MOED_ENGINE_MODEL_CONFIG_H_
#define MOED_ENGINE_MODEL_CONFIG_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/routing.h"
#include "kernels/moe_kernel.h"

namespace moed {

// How the weights of one module lie in the file, and what they mean.
//
// The declaration fixes the container and every property that tensors alone cannot tell; a property that tensors do tell
// (the type of a scale, whether a g_idx exists, per-tensor against per-channel where a method leaves it open) is completed
// from them when the module is found.
struct DeclaredScheme {
  enum class Container : uint8_t {
    kPlain,           // `weight`, unquantized
    kGptq,            // qweight [K b/32, N], qzeros, scales [G, N], g_idx
    kAwq,             // qweight [K, N/8], qzeros [G, N/8], scales [G, N]; nibbles in the order 0 2 4 6 1 3 5 7
    kPacked,          // weight_packed I32 along K, weight_scale [N, G], weight_shape, weight_zero_point, weight_g_idx
    kInt8,            // weight I8 [N, K], one value a byte (also int4 values), weight_scale or weight_scale_inv, zero points
    kFp8,             // weight F8_E4M3 [N, K], weight_scale or weight_scale_inv in any of its shapes; U8 scales: MXFP8
    kFp4,             // weight or weight_packed U8 or I8 [N, K/2], weight_scale or scale (E4M3, or E8M0 as U8), global scale
    kTransposedInt4,  // Quark: weight I32 [K, N/8], weight_scale [G, N], weight_zero_point [G, N/8]
    kTwoStageInt4,    // Quark: weight I32 [N, K/8], weight_scale [], weight_scale_2 [N]
    kMxfp4Fused,      // gpt-oss: all experts in gate_up_proj_blocks / _scales and down_proj_blocks / _scales
  };
  Container container = Container::kPlain;
  LinearScheme linear;           // scale types of integer and FP8 containers come from the tensors
  bool gptq_v2 = false;          // kGptq: zero points stored as they are, not minus one
  bool awq_order = true;         // kTransposedInt4, kTwoStageInt4: nibble order of AWQ, else natural
  bool twos_complement = false;  // kTransposedInt4, kTwoStageInt4: nibbles are signed, else unsigned with a zero point
};
// "gptq", "awq", "pack-quantized", ... for messages.
const char* ContainerName(DeclaredScheme::Container container);

// The quantization_config, asked by module name ("model.layers.0.mlp.experts.3.gate_proj").
class QuantConfig {
 public:
  virtual ~QuantConfig() = default;
  // "gptq", "compressed-tensors", "fp8", "none", ...
  virtual std::string Method() const = 0;
  // What is declared for `module`, whichever of its spellings ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1",
  // with any usual prefix) the config uses. Routers, shared-expert gates and the head are always plain. This is the
  // declaration, not the truth: what the file holds is told by its tensors. INVALID_ARGUMENT, naming the key, its value and
  // what is served, when the declaration cannot be served; also for names longer than 512 characters.
  virtual absl::StatusOr<DeclaredScheme> For(const std::string& module) const = 0;
};

// What a config.json is read as. A family is a set of rules for reading; what a loaded layer does follows from the
// properties of ModelConfig alone. docs/families.md has the table.
enum class Family : uint8_t {
  kMixtral, kPhimoe, kOlmoe,
  kQwen2Moe, kQwen3Moe, kQwen3Next, kQwen3VlMoe, kQwen35Moe,
  kDeepseekV2, kDeepseekV3, kGlm4Moe, kGlmMoeDsa, kKimiLinear, kMimoV2, kMinimaxM2,
  kGptOss, kLlama4, kGraniteMoe, kDbrx,
};
// As model_type has it: "mixtral", "qwen3_moe", ...
const char* FamilyName(Family family);

// How all experts of a layer lie in a few tensors, where they do.
enum class FusedLayout : uint8_t {
  kRows,                // gate_up_proj [E, 2I, H], gate rows first; down_proj [E, H, I]
  kColumns,             // gate_up_proj [E, H, 2I], gate columns first; down_proj [E, I, H]
  kInterleavedColumns,  // gate_up_proj [E, H, 2I], gate and up in turn; down_proj [E, I, H]; with or without biases
  kLinear,              // input_linear.weight [E, 2I, H], gate rows first; output_linear.weight [E, H, I]
  kStacked,             // w1 (gate), v1 (up) and w2 (down, transposed), each [E I, H]
};

// The names that a family's own writer uses, below a layer ("model.layers.7."). Other tools write other ones: names are
// found by what exists (weights_names.h), these say what to look for first and what is missing.
struct FamilyNames {
  const char* layers = "model.layers.";      // before a layer's number
  const char* experts = "mlp.experts.";      // before an expert's number, or before the names of the fused tensors
  bool w123 = false;                         // projections are w1 (gate), w3 (up), w2 (down), else gate_proj and so on
  bool fused = false;                        // the family's own files are fused
  FusedLayout layout = FusedLayout::kRows;   // of fused files
  const char* router = "mlp.gate";           // module of the gate
  const char* correction_bias = "mlp.gate.e_score_correction_bias";
  const char* shared = "mlp.shared_experts.";
};

struct ModelConfig {
  Family family = Family::kMixtral;
  FamilyNames names;
  std::string model_type;         // as in the file; of the text model where a multimodal model wraps one
  int num_layers = 0;
  std::vector<int> moe_layers;    // ascending
  int64_t hidden = 0;             // H
  int64_t intermediate = 0;       // I of a routed expert
  int num_experts = 0;            // E
  int top_k = 0;                  // k
  Activation activation;
  RouterRule router;
  bool router_bias = false;       // the gate has a bias (gpt_oss)
  int64_t shared_intermediate = 0;  // width of the shared expert; 0 when there is none
  bool shared_gate = false;       // the shared expert's output is multiplied by sigmoid(x . shared_gate) (qwen)
  bool expert_biases = false;
  std::shared_ptr<const QuantConfig> quant;
};

// Reads `directory`/config.json (and the quantization side files when config.json has no quantization_config).
// NOT_FOUND when there is no config.json; INVALID_ARGUMENT names the key, what was wanted and what was found.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& directory);

// The same from the text of config.json alone; without a quantization_config in it the model is unquantized.
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& text);

}  // namespace moed

#endif  // MOED_ENGINE_MODEL_CONFIG_H_
