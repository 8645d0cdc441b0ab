// Activation quantization: what a scheme does to a projection's input, as scalar code.
//
// Single source of truth, like number_formats.h: the reference uses these functions, vector code is checked against them.
// A row is replaced by the values that its codes stand for ("fake quantization"), so that a product in wider arithmetic gives
// what exact integer or FP8 products would. All in float32; round to nearest, ties to even; saturating.
// Rules:
//   int8   scale = absmax / 127, code = clamp(round(x / scale), -127 .. 127 dynamic, -128 .. 127 static)
//   fp8    scale = absmax / 448, code = E4M3(clamp(x / scale)); with kAbsMaxPow2Up the scale is rounded up to a power of two
//   mx     scale = 2^e by the scheme's rule, code = round(x / scale) to E2M1 or E4M3, saturating
//   nvfp4  block scale = E4M3(stored * absmax16 / 6), code = E2M1(x * stored / block scale), value = code * block scale / stored
#ifndef MOED_KERNELS_ACTIVATION_QUANT_H_
#define MOED_KERNELS_ACTIVATION_QUANT_H_

#include <cstdint>

#include "kernels/quant.h"

namespace moed {

// Whether QuantizeRow executes `scheme`: int8 and FP8 E4M3 per token, per group and static; FP4 and FP8 with E8M0 scales; FP4
// with E4M3 scales and a stored global scale. No asymmetric activations.
bool CanQuantize(const ActivationScheme& scheme);

// True when one scale spans all rows of a request (dynamic, per tensor): then QuantizeRow needs the absmax of all of them.
bool SpansRows(const ActivationScheme& scheme);

// True when some projection of the scheme does: such a layer's call is never cut into chunks or merged with another's.
bool SpansRows(const QuantScheme& scheme);

// Replaces x[n], one row, by its quantized values. `stored` is the projection's own scale from the file: the static scale, or
// the global scale of NVFP4; unused otherwise. `absmax` is used only when SpansRows. A group without a non-zero value stays
// zero; NaN in a group makes the group NaN where the scale depends on it.
void QuantizeRow(const ActivationScheme& scheme, float stored, float absmax, float* x, int64_t n);

// The largest magnitude of x[n]; NaN when there is one.
float AbsMax(const float* x, int64_t n);

// The larger of two such magnitudes; NaN wins and stays.
inline float MergeAbsMax(float a, float b) { return a != a || b <= a ? a : b; }

}  // namespace moed

#endif  // MOED_KERNELS_ACTIVATION_QUANT_H_
