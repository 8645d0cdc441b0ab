// The acceptance cases as calls: every scheme as a model in one line, every backend that takes it here, calls through the
// engine's public API, and the answer in double from the exactly dequantized weights.
//
//   for (const CaseScheme& scheme : CaseSchemes()) {
//     const CaseModel model(SpecOf(scheme, 8, 2, 256, 128), scheme);
//     for (const std::string& backend : model.Backends()) {
//       CaseEngine engine(model, backend);
//       const std::vector<float> y = engine.Rows(CaseInput(...));
// Set-up errors fail the test. Not thread-safe.
#ifndef MOED_TESTS_SUPPORT_CASE_CALLS_H_
#define MOED_TESTS_SUPPORT_CASE_CALLS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

// A way to store experts and to quantize activations, as a checkpoint of the family qwen3_moe says it.
struct CaseScheme {
  std::string name;
  ExpertSpec experts;
  std::string quantization;  // quantization_config as JSON text; empty: what `experts` asks for
  // Relative error of a row against unquantized activations (the bounds of the cases).
  double bound = 0.01;
  // Static or global scales of activations, tensors ".input_scale": their range over this number. 0: there are none.
  float input_levels = 0.0f;

  bool weight_only() const { return bound <= 0.01; }
};

// Unquantized weights of 16 and 32 bits, int4 and int8 in three containers with and without zero points and act-order,
// int8, FP8, MXFP8, MXFP4 and NVFP4 with quantized activations, and NVFP4 without.
const std::vector<CaseScheme>& CaseSchemes();
const CaseScheme& CaseSchemeNamed(const std::string& name);

// RC(experts, hidden, intermediate), qwen3_moe, one layer.
ModelSpec SpecOf(const CaseScheme& scheme, int experts, int top_k, int64_t hidden, int64_t intermediate);

// A checkpoint on disk.
class CaseModel {
 public:
  using Change = std::function<void(CheckpointBuilder&)>;
  // `change` is called before the files are written. Scales of activations are added where `scheme` has them, wide enough
  // for RC and the case input: the same for every expert.
  explicit CaseModel(const ModelSpec& spec, const CaseScheme& scheme = {}, const Change& change = {});

  const std::string& path() const { return dir_.path(); }
  const LayerReference& layer(size_t index = 0) const { return layers_.at(index); }
  int top_k() const { return top_k_; }

  // Every backend that can run all layers on this machine, "reference" among them.
  std::vector<std::string> Backends(ActivationChoice activations = ActivationChoice::kFile) const;

 private:
  TempDir dir_;
  std::vector<LayerReference> layers_;
  int top_k_;
};

// Adds ".input_scale" to every module of routed experts (or replaces it), with the number that `value` gives for expert and
// projection.
void SetInputScales(CheckpointBuilder* builder, const std::function<float(int expert, int projection)>& value);

// What goes in, owned. Values are rounded to `dtype` when the call is made, `x` itself stays as given.
struct CaseInput {
  int64_t rows = 0;
  std::vector<float> x;        // [rows, H]
  std::vector<int32_t> ids;    // [rows, k]; empty: by logits, or by the checkpoint's gate
  std::vector<float> weights;  // [rows, k]
  std::vector<float> logits;   // [rows, E]; empty: see ids
  DType dtype = DType::kBf16;  // of input and output

  // Rows [first, first + count) of this input.
  CaseInput Part(int64_t first, int64_t count) const;
  // The rows in the given order.
  CaseInput Pick(const std::vector<int64_t>& order) const;
};
// Case hidden states; ids and weights from the case logits: the k largest of a row, softmax over all, normalised.
CaseInput RoutedInput(int64_t rows, int64_t hidden, int experts, int top_k);
// Rows of (1, 0, 0, ...), f32.
CaseInput UnitInput(int64_t rows, int64_t hidden);

// A loaded engine.
class CaseEngine {
 public:
  // `options` sets whatever a test wants besides the backend, which is required by name ("auto": the oracle's choice).
  explicit CaseEngine(const CaseModel& model, const std::string& backend = "auto", EngineOptions options = {});

  // The output of a call, widened to float32. Rows() fails the test when the call is refused.
  absl::StatusOr<std::vector<float>> Call(const CaseInput& input, bool routed_only = false);
  std::vector<float> Rows(const CaseInput& input, bool routed_only = false);

  // Of the last call: the routing that was used [rows, k] and what ran.
  const ForwardInfo& info() const { return info_; }
  Engine& engine() { return engine_; }

 private:
  Engine engine_;
  int layer_ = 0;
  int64_t hidden_ = 0;
  ForwardInfo info_;
};

// y in double, unquantized activations, from input rounded to its dtype; ids of -1 contribute nothing. silu only.
std::vector<float> ExactRows(const LayerReference& layer, const CaseInput& input);

// A number to `dtype` and back.
float RoundTo(float value, DType dtype);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_CASE_CALLS_H_
