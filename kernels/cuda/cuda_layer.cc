#include "kernels/cuda/cuda_layer.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_call.h"

namespace moed::cuda {
namespace {

class CudaLayer : public DeviceLayer {
 public:
  CudaLayer(const CudaMoe* routed, const CudaMoe* shared) : routed_(routed), shared_(shared) {}

  absl::Status Upload(const DeviceLayerParts& parts) {
    router_.experts = parts.num_experts;
    router_.top_k = parts.top_k;
    router_.first_expert = parts.first_expert;
    router_.rule = parts.rule;
    absl::Status status = Copy(parts.gate, &gate_, &router_.gate);
    if (status.ok()) status = Copy(parts.gate_bias, &gate_bias_, &router_.gate_bias);
    if (status.ok()) status = Copy(parts.correction_bias, &correction_bias_, &router_.correction_bias);
    if (status.ok()) status = Copy(parts.shared_gate, &shared_gate_, &router_.shared_gate);
    return status;
  }

  absl::Status Forward(const DeviceCall& call, MutableTensorView out, Lane& lane, WorkerPool* pool) const override {
    absl::Status status = Validate(call, out);
    if (!status.ok() || call.x.rows == 0) return status;
    CallInput input;
    input.x = call.x;
    input.incoming = call.incoming;
    input.routing = call.routing;
    input.top_k = call.routing == RoutingKind::kIds ? call.top_k : router_.top_k;
    input.ids = call.ids;
    input.weights = call.weights;
    input.logits = call.logits;
    input.used_ids = call.used_ids;
    input.used_weights = call.used_weights;
    return RunCall({routed_, call.routed_only ? nullptr : shared_, &router_}, input, out, static_cast<CudaLane&>(lane), pool);
  }

  absl::Status WarmUp(Lane& lane) const override { return WarmUpCalls({routed_, shared_, &router_}, static_cast<CudaLane&>(lane)); }

 private:
  static absl::Status Copy(std::span<const float> values, DeviceBuffer* buffer, const float** where) {
    if (values.empty()) return absl::OkStatus();
    absl::Status status = buffer->Allocate(values.size_bytes(), "router of a layer");
    if (status.ok()) status = CopyToDevice(buffer->data(), values.data(), values.size_bytes(), "copy of a router");
    *where = reinterpret_cast<const float*>(buffer->data());
    return status;
  }

  absl::Status Validate(const DeviceCall& call, const MutableTensorView& out) const {
    const int64_t rows = call.x.rows, hidden = routed_->desc().hidden;
    if (call.x.cols != hidden || out.rows != rows || out.cols != hidden) {
      return absl::InvalidArgumentError(absl::StrCat("hidden states are [", rows, ", ", call.x.cols, "] and the output [", out.rows,
                                                     ", ", out.cols, "], want [M, ", hidden, "] of both"));
    }
    int64_t most_rows = routed_->desc().max_tokens;
    if (shared_ != nullptr && !call.routed_only) most_rows = std::min(most_rows, shared_->desc().max_tokens);
    if (rows < 0 || rows > most_rows) {
      return absl::InvalidArgumentError(absl::StrCat("call has ", rows, " rows, want 0 to ", most_rows));
    }
    absl::Status places = CheckPlaces(call.x, out, call.routing == RoutingKind::kIds ? call.top_k : router_.top_k);
    if (!places.ok()) return places;
    if (call.routing == RoutingKind::kGate && router_.gate == nullptr)
      return absl::FailedPreconditionError("the layer has no gate");
    if (call.routing != RoutingKind::kIds && router_.rule.correction_bias && router_.correction_bias == nullptr) {
      return absl::FailedPreconditionError("the layer's rule of routing needs a correction bias, and the layer has none");
    }
    if (call.routing == RoutingKind::kLogits) return CheckCount("logits", call.logits.size(), rows * router_.experts);
    if (call.routing != RoutingKind::kIds) return absl::OkStatus();
    if (call.top_k < 1) return absl::InvalidArgumentError(absl::StrCat("top-k is ", call.top_k, ", want at least 1"));
    absl::Status status = CheckCount("ids", call.ids.size(), rows * call.top_k);
    return status.ok() ? CheckCount("weights", call.weights.size(), rows * call.top_k) : status;
  }

  static absl::Status CheckCount(const char* what, size_t got, int64_t want) {
    if (got == static_cast<size_t>(want)) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(what, ": got ", got, ", want ", want));
  }

  const CudaMoe* const routed_;
  const CudaMoe* const shared_;
  LayerRouter router_;
  DeviceBuffer gate_, gate_bias_, correction_bias_, shared_gate_;
};

// Whether the parts fit each other; kernels index by it.
absl::Status CheckParts(const DeviceLayerParts& parts) {
  const MoeDesc& routed = static_cast<const CudaMoe*>(parts.routed)->desc();
  const auto differs = [](const char* what, int64_t got, int64_t want) {
    return absl::InvalidArgumentError(absl::StrCat("a layer's ", what, ": got ", got, ", want ", want));
  };
  if (parts.hidden != routed.hidden) return differs("hidden size", parts.hidden, routed.hidden);
  if (parts.first_expert < 0 || parts.first_expert > parts.num_experts - routed.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("a layer of ", parts.num_experts, " experts cannot hold ", routed.num_experts,
                                                   " from expert ", parts.first_expert));
  }
  if (parts.top_k < 1 || parts.top_k > parts.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("a layer's top-k is ", parts.top_k, ", want 1 to ", parts.num_experts));
  }
  if (parts.shared != nullptr) {
    const MoeDesc& shared = static_cast<const CudaMoe*>(parts.shared)->desc();
    if (shared.num_experts != 1) return differs("shared experts", shared.num_experts, 1);
    if (shared.hidden != routed.hidden) return differs("shared expert's hidden size", shared.hidden, routed.hidden);
  }
  const std::tuple<const char*, size_t, int64_t> arrays[] = {
      {"gate weights", parts.gate.size(), static_cast<int64_t>(parts.num_experts) * parts.hidden},
      {"gate biases", parts.gate_bias.size(), parts.num_experts},
      {"correction biases", parts.correction_bias.size(), parts.num_experts},
      {"shared gate weights", parts.shared_gate.size(), parts.hidden}};
  for (const auto& [what, got, want] : arrays) {
    if (got != 0 && got != static_cast<size_t>(want)) return differs(what, static_cast<int64_t>(got), want);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceLayer>> MakeCudaLayer(const DeviceLayerParts& parts, CudaDevice* device) {
  for (const PreparedMoe* moe : {parts.routed, parts.shared}) {
    if (moe != nullptr && moe->accelerator() != device)
      return absl::InvalidArgumentError("a layer's experts lie on another device");
  }
  if (parts.routed == nullptr) return absl::InvalidArgumentError("a layer without routed experts");
  absl::Status fits = CheckParts(parts);
  if (!fits.ok()) return fits;
  auto layer = std::make_unique<CudaLayer>(static_cast<const CudaMoe*>(parts.routed), static_cast<const CudaMoe*>(parts.shared));
  absl::Status status = device->Report(layer->Upload(parts));
  if (!status.ok()) return status;
  return std::unique_ptr<DeviceLayer>(std::move(layer));
}

}  // namespace moed::cuda
