// Which gated activation a layer has.
#ifndef MOED_KERNELS_ACTIVATION_KIND_H_
#define MOED_KERNELS_ACTIVATION_KIND_H_

#include <cstdint>

namespace moed {

// The gated activation h = act(gate, up).
struct Activation {
  enum class Kind : uint8_t {
    kSilu,       // h = g * sigmoid(g) * u
    kGelu,       // h = g * Phi(g) * u, Phi the normal distribution function (exact, erf)
    kGeluTanh,   // h = gelu_tanh(g) * u
    kSwigluOai,  // h = (u + 1) * g * sigmoid(alpha * g): gpt-oss
  };
  Kind kind = Kind::kSilu;
  float alpha = 1.702f;  // kSwigluOai only
  // When set: g = min(g, limit) and u = clamp(u, -limit, limit) before the formula.
  bool clamped = false;
  float limit = 0.0f;
  bool operator==(const Activation&) const = default;
};

}  // namespace moed

#endif  // MOED_KERNELS_ACTIVATION_KIND_H_
