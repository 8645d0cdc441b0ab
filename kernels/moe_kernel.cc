#include "kernels/moe_kernel.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"

namespace moed {

std::string Describe(const Activation& activation) {
  std::string text;
  switch (activation.kind) {
    case Activation::Kind::kSilu: text = "silu"; break;
    case Activation::Kind::kGelu: text = "gelu"; break;
    case Activation::Kind::kGeluTanh: text = "gelu_tanh"; break;
    case Activation::Kind::kSwigluOai: text = "swiglu_oai"; break;
  }
  if (activation.clamped) absl::StrAppend(&text, ", limit ", activation.limit);
  return text;
}

namespace {

absl::Status ValidateIds(const MoeDesc& desc, const MoeBatch& batch) {
  for (int64_t at = 0; at < static_cast<int64_t>(batch.ids.size()); ++at) {
    const int32_t id = batch.ids[at];
    if (id >= -1 && id < desc.num_experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("expert id of row ", at / batch.top_k, ", slot ", at % batch.top_k, ": got ",
                                                   id, ", want -1 to ", desc.num_experts - 1, " (E = ", desc.num_experts, ")"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateBatch(const MoeDesc& desc, const MoeBatch& batch, const MutableTensorView& out) {
  const int64_t rows = batch.x.rows;
  if (batch.x.cols != desc.hidden) {
    return absl::InvalidArgumentError(absl::StrCat("hidden states have ", batch.x.cols, " columns, want H = ", desc.hidden));
  }
  if (rows < 0 || rows > desc.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("call has ", rows, " rows, want 0 to ", desc.max_tokens));
  }
  if (out.rows != rows || out.cols != desc.hidden) {
    return absl::InvalidArgumentError(
        absl::StrCat("output is [", out.rows, ", ", out.cols, "], want [", rows, ", ", desc.hidden, "]"));
  }
  if (batch.top_k < 1) return absl::InvalidArgumentError(absl::StrCat("top-k is ", batch.top_k, ", want at least 1"));
  const size_t slots = static_cast<size_t>(rows) * static_cast<size_t>(batch.top_k);
  if (batch.ids.size() != slots || batch.weights.size() != slots) {
    return absl::InvalidArgumentError(absl::StrCat("got ", batch.ids.size(), " ids and ", batch.weights.size(), " weights, want ",
                                                   slots, " of each (", rows, " rows x ", batch.top_k, " slots)"));
  }
  return ValidateIds(desc, batch);
}

absl::Status ValidateBatchedExperts(const MoeDesc& desc, const BatchedExperts& batch, const MutableTensorView& out) {
  const int64_t max_m = desc.max_tokens_per_expert;
  if (max_m <= 0) {
    return absl::FailedPreconditionError("the layer was prepared without batched experts (max_tokens_per_expert is 0)");
  }
  if (batch.max_m != max_m) return absl::InvalidArgumentError(absl::StrCat("max_m is ", batch.max_m, ", prepared for ", max_m));
  const int64_t rows = desc.num_experts * max_m;
  const auto shape_error = [&](const char* name, int64_t got_rows, int64_t got_cols) {
    return absl::InvalidArgumentError(absl::StrCat(name, " [", got_rows, ", ", got_cols, "], want [", rows, ", ", desc.hidden, "] (E = ",
                                                   desc.num_experts, ", max_m = ", max_m, ", H = ", desc.hidden, ")"));
  };
  if (batch.x.rows != rows || batch.x.cols != desc.hidden) return shape_error("hidden states are", batch.x.rows, batch.x.cols);
  if (out.rows != rows || out.cols != desc.hidden) return shape_error("output is", out.rows, out.cols);
  if (batch.counts.size() != static_cast<size_t>(desc.num_experts)) {
    return absl::InvalidArgumentError(absl::StrCat("got ", batch.counts.size(), " counts, want E = ", desc.num_experts));
  }
  for (int expert = 0; expert < desc.num_experts; ++expert) {
    const int32_t count = batch.counts[expert];
    if (count >= 0 && count <= max_m) continue;
    return absl::InvalidArgumentError(absl::StrCat("count of expert ", expert, ": got ", count, ", want 0 to ", max_m));
  }
  return absl::OkStatus();
}

void CheckBatchedFormat(const MoeDesc& desc, std::vector<Reason>* reasons) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  const int64_t most = kMost / std::max(desc.num_experts, 1);
  if (desc.max_tokens_per_expert >= 0 && desc.max_tokens_per_expert <= most) return;
  reasons->push_back({"shape_unsupported", absl::StrCat("batched experts: max_tokens_per_expert is ", desc.max_tokens_per_expert,
                                                        ", want 0 to ", most, " with E = ", desc.num_experts)});
}

}  // namespace moed
