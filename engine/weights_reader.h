// Readers: from located and checked tensors to canonical experts.
//
// Each projection is read by its container (container.h) through pread into reused buffers. Immutable; any number of threads
// may read at once.
#ifndef MOED_ENGINE_WEIGHTS_READER_H_
#define MOED_ENGINE_WEIGHTS_READER_H_

#include <memory>
#include <vector>

#include "engine/container.h"
#include "kernels/expert_weights.h"

namespace moed {

// The three projections of one expert; or, with a joint tensor, gate and up in one [2I, H] whose rows 2i are gate's and rows
// 2i + 1 are up's, found as `gate` (gpt-oss, per expert).
struct ExpertSource {
  LinearSource gate;
  LinearSource up;
  LinearSource down;
};

// Experts in tensors of their own.
std::shared_ptr<const ExpertReader> MakeSeparateReader(std::vector<ExpertSource> experts);
// The same where `gate` of each is the interleaved pair and `up` is unused.
std::shared_ptr<const ExpertReader> MakeInterleavedReader(std::vector<ExpertSource> experts);

// Rows 2i of `both` to gate, rows 2i + 1 to up, with their scales, zero points and biases. Scales must be per row
// (group.rows 1) or one for the matrix.
void SplitInterleaved(const LinearWeights& both, LinearWeights* gate, LinearWeights* up);

}  // namespace moed

#endif  // MOED_ENGINE_WEIGHTS_READER_H_
