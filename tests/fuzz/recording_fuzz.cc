// Fuzz target: the bytes of a recorded call. Whatever is read belongs together, as replays rely on.
#include <cstdint>
#include <vector>

#include "engine/recorded_call.h"
#include "tests/fuzz/memory_folder.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr char kName[] = "call.safetensors";

// Whether so many bytes are a matrix of `rows` and `columns` of `dtype`.
bool IsMatrix(size_t bytes, StDtype dtype, int64_t rows, int64_t columns) {
  return static_cast<unsigned __int128>(bytes) * 8 == static_cast<unsigned __int128>(rows) * columns * StDtypeBits(dtype);
}

void CheckRouting(const RecordedCall& call) {
  const uint64_t rows = static_cast<uint64_t>(call.rows);
  const bool by_ids = call.routing == RecordedCall::Routing::kIds, by_logits = call.routing == RecordedCall::Routing::kLogits;
  Require(by_ids ? call.top_k >= 1 && call.top_k <= 65535 : call.top_k == 0, "only ids have slots, at least one");
  Require(call.ids.size() == rows * static_cast<uint64_t>(call.top_k), "an id for each slot");
  Require(call.weights.size() == call.ids.size(), "a weight for each id");
  Require(by_logits || call.num_experts == 0, "only logits have experts");
  Require(call.logits.size() == rows * static_cast<uint64_t>(call.num_experts), "a logit for each expert of a row");
  Require(!call.per_slot || by_ids, "a call per slot has ids");
}

void Run(Bytes input) {
  MemoryFolder folder;
  folder.Add(kName, input);
  const absl::StatusOr<RecordedCall> call = ReadRecordedCall(MemoryFolder::Path(kName));
  if (!call.ok()) {
    Require(absl::IsInvalidArgument(call.status()), "bytes that are no recording are an invalid argument");
    return;
  }
  Require(call->layer >= 0 && call->rows >= 0 && call->columns >= 1, "a layer, rows and columns");
  Require(IsMatrix(call->hidden.size(), call->hidden_dtype, call->rows, call->columns), "hidden states of every row");
  const bool packed = StDtypeBits(call->hidden_dtype) == 8;
  Require(call->scales.size() == (packed ? static_cast<uint64_t>(call->rows) : 0), "a scale for each row of one byte an element");
  CheckRouting(*call);
  Require(IsMatrix(call->output.size(), call->output_dtype, call->output_rows(), call->columns), "an output of every row");
  Require(call->tensor_bytes() <= input.size(), "no more bytes than the file has");
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
