// Several calls of one layer as one: their rows gathered, computed together, and the results brought back to each.
//
// Rows are copied, not converted. Outputs of one dtype are computed in it; else in float32, which is the sum before its one
// rounding, and each call's rows are rounded to its own dtype: so a result is what the call would get alone. Threads: one at a
// time; the parts outlive the object.
#ifndef MOED_ENGINE_MERGED_CALL_H_
#define MOED_ENGINE_MERGED_CALL_H_

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "engine/call_memory.h"
#include "engine/engine.h"
#include "engine/model.h"

namespace moed {

class MergedCall {
 public:
  // Validated calls on the host of which every two MayShareRun. On the host's processors, callers' logits are routed here: a part
  // whose logits cannot be gets its status and takes no part any more. On an accelerator the run looks at them.
  MergedCall(const ModelConfig& config, const LoadedLayer& layer, std::span<ForwardPart* const> parts);

  // No part takes part.
  bool empty() const { return parts_.empty(); }
  int64_t rows() const { return rows_; }
  DType output_dtype() const { return output_; }

  // Of a call that is not empty. Gathers all rows, waiting for those that still come, to `hidden`, of rows() rows of their bytes.
  // The call views it and this object.
  ForwardCall Gather(void* hidden, WorkerPool& pool);
  // Whether a part wants its routing back.
  bool WantsRouting() const;
  // Ends every part that took part, with `info` of a run that wrote `out` [rows(), H] in output_dtype().
  void Scatter(const MutableTensorView& out, const ForwardInfo& info, WorkerPool& pool) const;
  // Ends them with the failure of the run.
  void Fail(const absl::Status& why) const;

 private:
  void RouteLogits(const ModelConfig& config, const LoadedLayer& layer);
  void GatherRouting();

  std::vector<ForwardPart*> parts_;  // that take part
  int64_t rows_ = 0;                 // of theirs
  DType output_ = DType::kF32;
  bool routed_ = false;              // logits became ids and weights
  int top_k_ = 0;                    // of ids_ and weights_
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  std::vector<float> logits_;
};

}  // namespace moed

#endif  // MOED_ENGINE_MERGED_CALL_H_
