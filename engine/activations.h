// The operator's choice about activations, applied to planned layers.
//
// Pure functions of plain values. Serving and explaining both go through ApplyActivations, so they cannot differ.
#ifndef MOED_ENGINE_ACTIVATIONS_H_
#define MOED_ENGINE_ACTIVATIONS_H_

#include <cstdint>
#include <span>
#include <string>

#include "engine/weights.h"
#include "kernels/quant.h"

namespace moed {

// What is done to activations before the products. All but kFile are the operator's choice, told by the executed scheme.
enum class ActivationChoice : uint8_t {
  kFile,  // what the file says
  kNone,  // weights only
  kInt8,  // dynamic int8 with one scale a token where TakesInt8Activations, elsewhere what the file says
};

// Whether kInt8 applies: gate, up and down all have int4, int8 or FP4 weights, in whatever groups and order.
bool TakesInt8Activations(const QuantScheme& scheme);

// `scheme` as `choice` lets it run.
QuantScheme WithActivations(QuantScheme scheme, ActivationChoice choice);

// Sets the schemes of the routed and the shared experts of all plans.
void ApplyActivations(ActivationChoice choice, std::span<LayerPlan> plans);

// With kInt8: how many layers and shared experts keep what the file says, in words. Empty when none does, and for other choices.
std::string KeptActivationsNote(ActivationChoice choice, std::span<const LayerPlan> plans);

}  // namespace moed

#endif  // MOED_ENGINE_ACTIVATIONS_H_
