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

// What the file declares for the weights of one module.
struct DeclaredScheme {
  enum class Container : uint8_t {
    kPlain,       // unquantized `weight`
    kGptq,        // qweight, qzeros, scales, g_idx
    kPacked,      // compressed-tensors pack-quantized: weight_packed, weight_scale, weight_shape
  };
  Container container = Container::kPlain;
  LinearScheme linear;          // element and group of the weights; scale type comes from the tensors
  bool gptq_v2 = false;         // kGptq: zero points stored as they are, not minus one
};

// The quantization_config, asked by module name ("model.layers.0.mlp.experts.3.gate_proj").
class QuantConfig {
 public:
  virtual ~QuantConfig() = default;
  // "gptq", "compressed-tensors", "none".
  virtual std::string Method() const = 0;
  // What is declared for `module`, whichever of its spellings ("mlp.experts.3.gate_proj", "block_sparse_moe.experts.3.w1",
  // with any usual prefix) the config uses. Routers, shared-expert gates and the head are always plain. This is the
  // declaration, not the truth: what the file holds is told by its tensors. INVALID_ARGUMENT, naming the key, its value and
  // what is served, when the declaration cannot be served; also for names longer than 512 characters.
  virtual absl::StatusOr<DeclaredScheme> For(const std::string& module) const = 0;
};

enum class Family : uint8_t { kMixtral, kQwen3Moe, kDeepseekV3, kGptOss };
const char* FamilyName(Family family);

struct ModelConfig {
  Family family = Family::kMixtral;
  std::string model_type;         // as in the file
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
