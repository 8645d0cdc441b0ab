// Building blocks of declared schemes, shared by the parsers of quantization methods. Plain values and pure functions.
#ifndef MOED_ENGINE_QUANT_SCHEMES_H_
#define MOED_ENGINE_QUANT_SCHEMES_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/model_config.h"

namespace moed {

// A scheme, or why it is not served. A refusal is kept until a module is asked for that it applies to.
struct Declaration {
  DeclaredScheme scheme;
  std::string refusal;  // empty when it is served

  // "KEY: VALUE is not supported (served: SERVED)", unless there is an earlier refusal. `key` includes where it was found.
  void Refuse(const std::string& key, const std::string& value, const std::string& served);
  // The scheme for `module`, or INVALID_ARGUMENT with the refusal and the module.
  absl::StatusOr<DeclaredScheme> For(const std::string& module) const;
};

// `text` in quotes, for values in messages.
std::string Quoted(const std::string& text);

// One scale for each `group_size` inputs of an output; -1 or 0: for all of them.
GroupShape InputGroup(int64_t group_size);

// Activations whose scale follows from their largest magnitude, for each `group` of tokens x inputs: {1, 0} per token,
// {1, 128} per 128 inputs, {0, 0} over the whole request.
ActivationScheme DynamicInput(ElementType element, GroupShape group, ScaleRule rule = ScaleRule::kAbsMax);
// Activations with one stored scale for each projection.
ActivationScheme StaticInput(ElementType element);
// Activations in blocks of 32 with a power of two each.
ActivationScheme MxInput(ElementType element, ScaleRule rule);
// FP4 activations in blocks of 16 with E4M3 scales under a stored scale.
ActivationScheme NvFp4Input();

// Weights [N, K] in one of the byte containers: int8, int4 a byte, or FP8, whose scale type the tensors tell.
DeclaredScheme ByteWeights(ElementType element, GroupShape group);
// FP4 or FP8 weights in blocks of 32 inputs with E8M0 scales.
DeclaredScheme MxWeights(ElementType element);
// FP4 weights in blocks of 16 inputs with E4M3 scales under a stored scale.
DeclaredScheme NvFp4Weights(GlobalScale global);

}  // namespace moed

#endif  // MOED_ENGINE_QUANT_SCHEMES_H_
