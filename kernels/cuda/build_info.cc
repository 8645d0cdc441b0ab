#include "kernels/cuda/build_info.h"

namespace moed::cuda {

const char* BuildInfo() { return MOED_CUDA_BUILD; }

}  // namespace moed::cuda
