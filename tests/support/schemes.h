// Quantization schemes for tests: one in a line, and lists of all that a suite has to cover.
#ifndef MOED_TESTS_SUPPORT_SCHEMES_H_
#define MOED_TESTS_SUPPORT_SCHEMES_H_

#include <vector>

#include "kernels/quant.h"

namespace moed::testing {

WeightScheme Weights(ElementType element, ScaleType scale, GroupShape group, bool zero_points = false);
ActivationScheme Input(ActivationMode mode, ElementType element, ScaleType scale, GroupShape group,
                       ScaleRule rule = ScaleRule::kAbsMax);
// Int8 with one float32 scale for a row (`rows` = 1) or for all of them (0).
ActivationScheme Int8(ActivationMode mode, int32_t rows);

// Weight schemes of every published format, by properties.
std::vector<WeightScheme> WeightSchemes();

// Every rule of activation quantization.
std::vector<ActivationScheme> InputSchemes();

// The bound of a scheme whose reference quantizes in the same way: float32 against double moves few values over a rounding
// border, more of them the coarser the codes are.
double SameRuleBound(ElementType element);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_SCHEMES_H_
