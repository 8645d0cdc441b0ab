// Readers: from located and checked tensors to canonical expert weights.
//
// A LinearSource names the tensors of one projection of one expert; a reader reads them by pread into reused buffers. Facts
// that only bytes can show (zero points against sym, scattered groups, weight_shape, scales that are not finite) are checked
// while reading, and errors name file and tensor. Immutable; any number of threads may read at once.
#ifndef MOED_ENGINE_WEIGHTS_READER_H_
#define MOED_ENGINE_WEIGHTS_READER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "engine/checkpoint.h"
#include "engine/model_config.h"
#include "kernels/expert_weights.h"

namespace moed {

// One projection [rows, cols] in separate tensors of its own.
struct LinearSource {
  std::string module;
  DeclaredScheme::Container container = DeclaredScheme::Container::kPlain;
  WeightScheme scheme;
  bool gptq_v2 = false;
  int64_t rows = 0;
  int64_t cols = 0;
  TensorRef codes;
  TensorRef scales;   // empty for plain weights
  TensorRef zeros;    // GPTQ only
  TensorRef g_idx;    // GPTQ only, may be absent
  TensorRef shape;    // pack-quantized only
};

struct ExpertSource {
  LinearSource gate;
  LinearSource up;
  LinearSource down;
};

// Experts in tensors of their own.
std::shared_ptr<const ExpertReader> MakeSeparateReader(std::vector<ExpertSource> experts);

// gpt-oss in 16-bit form: all experts of a layer in one tensor, transposed, gate and up interleaved.
struct FusedSource {
  int64_t experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  WeightScheme scheme;
  TensorRef gate_up;       // [E, H, 2I]: column 2i is gate i, column 2i + 1 is up i
  TensorRef gate_up_bias;  // [E, 2I], interleaved likewise
  TensorRef down;          // [E, I, H]
  TensorRef down_bias;     // [E, H]
};
std::shared_ptr<const ExpertReader> MakeFusedReader(const FusedSource& source);

// Reads a whole floating-point tensor (F32, BF16 or F16) as float32. INVALID_ARGUMENT for other dtypes.
absl::Status ReadFloats(const TensorRef& tensor, const std::string& name, std::vector<float>* out);

}  // namespace moed

#endif  // MOED_ENGINE_WEIGHTS_READER_H_
