// The gated activation as scalar code: the definition that the reference uses and vector code is tested against.
#ifndef MOED_KERNELS_ACTIVATION_H_
#define MOED_KERNELS_ACTIVATION_H_

#include <cmath>

#include "kernels/activation_kind.h"
#include "kernels/host_device.h"

namespace moed {

// h = act(gate, up) in the precision of T (float or double), clamped first where the activation says so. NaN in gate or
// up gives NaN: the comparisons are written so that NaN falls through to itself.
template <typename T>
MOED_HD T Activate(const Activation& activation, T gate, T up) {
  if (activation.clamped) {
    const T limit = activation.limit;
    if (gate > limit) gate = limit;
    if (up > limit) up = limit;
    if (up < -limit) up = -limit;
  }
  switch (activation.kind) {
    case Activation::Kind::kSilu:
      return gate / (1 + std::exp(-gate)) * up;
    case Activation::Kind::kGelu:
      return gate * T(0.5) * (1 + std::erf(gate * T(0.70710678118654752440))) * up;
    case Activation::Kind::kGeluTanh: {
      const T inner = T(0.79788456080286535588) * (gate + T(0.044715) * gate * gate * gate);  // sqrt(2/pi)
      return gate * T(0.5) * (1 + std::tanh(inner)) * up;
    }
    case Activation::Kind::kSwigluOai:
      return (up + 1) * gate / (1 + std::exp(-T(activation.alpha) * gate));
  }
  return T(0);
}

}  // namespace moed

#endif  // MOED_KERNELS_ACTIVATION_H_
