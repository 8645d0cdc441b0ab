// compressed-tensors: what a group says of its weights and of their input.
#ifndef MOED_ENGINE_QUANT_COMPRESSED_ARGS_H_
#define MOED_ENGINE_QUANT_COMPRESSED_ARGS_H_

#include <string>

#include "absl/status/status.h"
#include "engine/quant_schemes.h"
#include "nlohmann/json.hpp"

namespace moed {

// Read the objects "weights" and "input_activations", stored in `format` ("pack-quantized", ...), into `out`; `where` goes
// before keys in messages. INVALID_ARGUMENT for values of a wrong type or out of range; what is well-formed but not served
// becomes a refusal of `out`.
absl::Status DeclareCompressedWeights(const nlohmann::json& weights, const std::string& where, const std::string& format,
                                      Declaration* out);
absl::Status DeclareCompressedInput(const nlohmann::json& input, const std::string& where, const std::string& format,
                                    Declaration* out);

}  // namespace moed

#endif  // MOED_ENGINE_QUANT_COMPRESSED_ARGS_H_
