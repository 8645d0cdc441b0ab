// Quark: what a layer's configuration says of its weights and of their input.
#ifndef MOED_ENGINE_QUANT_QUARK_SPECS_H_
#define MOED_ENGINE_QUANT_QUARK_SPECS_H_

#include <string>

#include "absl/status/statusor.h"
#include "engine/quant_schemes.h"
#include "nlohmann/json.hpp"

namespace moed {

// Reads one object of weight, input_tensors, output_tensors and bias; without a weight it declares a plain module. `where`
// goes before keys in messages; `pack_method` is "reorder" or "order", the nibble order of int4. INVALID_ARGUMENT for values
// of a wrong type; what is well-formed but not served becomes a refusal.
absl::StatusOr<Declaration> DeclareQuarkLayer(const nlohmann::json& layer, const std::string& where,
                                              const std::string& pack_method);

}  // namespace moed

#endif  // MOED_ENGINE_QUANT_QUARK_SPECS_H_
