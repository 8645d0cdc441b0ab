// Whole layers on the GPU for tests: routed and shared experts with a gate of random numbers, and what a call of them must give.
//
// Hidden states and gates are multiples of 1/64 within [-1, 1), so that every logit is exact in float32 in whatever order it is
// added up: the host's logits, in double, are the device's. Failures fail the running test case.
#ifndef MOED_TESTS_CUDA_WHOLE_LAYERS_H_
#define MOED_TESTS_CUDA_WHOLE_LAYERS_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/accelerator.h"
#include "kernels/moe_kernel.h"
#include "tests/cuda/router_cases.h"
#include "tests/support/random_layer.h"

namespace moed::testing {

struct LayerSpec {
  RouterRule rule;
  int experts = 16;
  int top_k = 4;
  int64_t hidden = 96;
  int64_t intermediate = 80;
  WeightScheme scheme;  // of routed and shared experts; by default int4 in groups of 16
  bool shared = false, shared_gate = false, gate_bias = false;
  // The experts that are held: [first, first + held); held 0: all of them.
  int first = 0;
  int held = 0;

  LayerSpec();
};

// The rules of the model families that moed serves, with top_k of each, for 16 experts.
std::vector<LayerSpec> FamilySpecs();

// Rows of one call, with ids and logits for whichever routing is asked for.
struct LayerInput {
  RandomBatch batch;
  std::vector<float> logits;  // [M, E]

  // Everything that `kind` needs; the places are the host's.
  DeviceCall Call(RoutingKind kind) const;
};

// What a call gave.
struct LayerRun {
  absl::Status status;
  std::vector<uint8_t> bytes;  // of the output
  std::vector<float> out;      // the same as float32
  std::vector<int32_t> ids;    // used
  std::vector<float> weights;
};

// `call` on `lane` with poisoned workspace and output.
LayerRun RunWhole(const DeviceLayer& layer, DeviceCall call, DType out_dtype, Lane& lane);

class WholeLayer {
 public:
  WholeLayer(const LayerSpec& spec, uint64_t seed);

  const DeviceLayer& device() const { return *layer_; }
  const LayerSpec& spec() const { return spec_; }
  DeviceLayerParts parts() const;
  const PreparedMoe& routed() const { return *routed_; }

  // `rows` random rows in `dtype`. `top_k` 0: the model's.
  LayerInput Input(int64_t rows, DType dtype, uint64_t seed, int top_k = 0) const;

  // Logits of the own gate in double, rounded once.
  std::vector<float> GateLogits(const LayerInput& input) const;

  // Checks the routing that `run` used against engine/routing, and its output against the judge's routed and shared parts, which
  // are combined in double. `run` was made by input.Call(kind), with `routed_only`.
  void Check(const LayerInput& input, RoutingKind kind, const LayerRun& run, DType out_dtype, bool routed_only = false) const;

 private:
  void CheckRouting(const LayerInput& input, RoutingKind kind, const LayerRun& run) const;
  std::vector<float> Expected(const LayerInput& input, const LayerRun& run, bool routed_only) const;
  std::vector<double> SharedFactors(const LayerInput& input) const;

  const LayerSpec spec_;
  const RouterCase router_;
  std::vector<float> gate_, gate_bias_, correction_bias_, shared_gate_;
  std::unique_ptr<PreparedMoe> routed_, shared_, routed_judge_, shared_judge_;
  std::unique_ptr<DeviceLayer> layer_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CUDA_WHOLE_LAYERS_H_
