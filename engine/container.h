// Containers: the ways in which checkpoints store one quantized matrix, each read exactly into the canonical form.
//
// One Container per DeclaredScheme::Container, a stateless object. Find works on headers alone and is called by one thread;
// Read may be called by any number of threads. What a container must not do is guess: a tensor that is missing, extra or
// unlike the declaration is an error that names it.
#ifndef MOED_ENGINE_CONTAINER_H_
#define MOED_ENGINE_CONTAINER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "engine/model_config.h"
#include "engine/tensor_finder.h"
#include "kernels/expert_weights.h"

namespace moed {

class Container;

// One projection [rows, cols] = [N, K], found and checked, not yet read.
struct LinearSource {
  std::string module;            // name of the module: tensors are "<module>.<suffix>"
  int64_t rows = 0;
  int64_t cols = 0;
  const Container* container = nullptr;
  DeclaredScheme declared;       // the declaration; Find completes declared.linear to what Read delivers

  TensorRef codes;
  TensorRef scales;
  TensorRef zeros;               // zero points; also those of symmetric schemes, which are then checked
  TensorRef g_idx;
  TensorRef shape;               // weight_shape
  TensorRef first_zeros;         // zero points of the second-level scale; must hold zeros
  TensorRef global;              // second-level scale, one number
  TensorRef input;               // static or global scale of the activations, one number
  TensorRef input_zeros;         // must hold zeros
  TensorRef bias;                // [rows]

  bool inverse_input = false;    // the scheme's number is 1 / input
  int64_t scale_slice = -1;      // >= 0: `scales` holds all experts, this is the one
  int64_t scale_first_row = 0;   // and this the row of the fused matrix at which the projection starts
  int64_t scale_block_rows = 0;  // and this the number of matrix rows that a row of `scales` covers

  const LinearScheme& linear() const { return declared.linear; }
};

class Container {
 public:
  virtual ~Container() = default;

  // Finds the tensors of source->module, checks dtypes and shapes against rows, cols and the declaration, and completes
  // source->declared.linear from them: scale types, per tensor against per channel, whether a g_idx exists. Missing tensors
  // are left to `finder`. INVALID_ARGUMENT names file, tensor, wanted and got.
  virtual absl::Status Find(TensorFinder& finder, LinearSource* source) const = 0;

  // Reads the bytes of a source that Find completed, and converts: codes, scales, zero points, group index, global scale.
  // INVALID_ARGUMENT for bytes that contradict the scheme (names file, tensor and index), DATA_LOSS for a short file.
  // Scheme, shape, input scale and bias are set by ReadLinear.
  virtual absl::Status Read(const LinearSource& source, LinearWeights* out) const = 0;
};

// The container for a declaration's storage; never null, except for kMxfp4Fused: that one holds all experts of a layer and
// has a reader of its own.
const Container* ContainerFor(DeclaredScheme::Container container);

// Finds one projection: decides by the tensors that exist whether it is stored as declared or unquantized, then lets the
// container find it, with its activation scale and (when `bias`) its bias. `note` gets a line when the file and the
// declaration disagree in a way that does not matter; may be null. rows and cols are N and K.
absl::StatusOr<LinearSource> FindLinear(TensorFinder& finder, const DeclaredScheme& declared, const std::string& module,
                                        int64_t rows, int64_t cols, bool bias, std::string* note);

// Bytes of the projection's tensors in the file (a slice of a fused scale tensor counts as nothing).
uint64_t StoredBytes(const LinearSource& source);
// Whether a tensor without which the scheme is not known is missing.
bool Incomplete(const LinearSource& source);

// Reads one projection with everything that belongs to it; reuses the buffers of `out`.
absl::Status ReadLinear(const LinearSource& source, LinearWeights* out);

}  // namespace moed

#endif  // MOED_ENGINE_CONTAINER_H_
