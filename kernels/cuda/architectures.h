// Which GPUs a build's kernels run on, from what the build says of itself.
#ifndef MOED_KERNELS_CUDA_ARCHITECTURES_H_
#define MOED_KERNELS_CUDA_ARCHITECTURES_H_

#include <string_view>

namespace moed::cuda {

// Whether `build` (BuildInfo's text, "CUDA 13.0, sm_80, sm_90a") has machine code for a GPU of compute capability major.minor: code
// for sm_XY runs on X.Y and on later minors of X, code for sm_XYa on X.Y alone.
bool RunsOn(std::string_view build, int major, int minor);

}  // namespace moed::cuda

#endif  // MOED_KERNELS_CUDA_ARCHITECTURES_H_
