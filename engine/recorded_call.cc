#include "engine/recorded_call.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/outside_name.h"
#include "engine/safetensors_header.h"

namespace moed {
namespace {

using Metadata = std::map<std::string, std::string>;
using Tensors = std::vector<std::pair<SafetensorsWriter::Tensor, std::span<const uint8_t>>>;

constexpr char kFormat[] = "moed recorded call 1";
constexpr mode_t kMode = 0600;  // hidden states are data of users

template <typename T>
std::span<const uint8_t> Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

Tensors TensorsOf(const RecordedCall& call) {
  using Routing = RecordedCall::Routing;
  Tensors tensors;
  tensors.push_back({{"hidden", call.hidden_dtype, {call.rows, call.columns}}, call.hidden});
  if (StDtypeBits(call.hidden_dtype) == 8) tensors.push_back({{"hidden_scales", StDtype::kF32, {call.rows}}, Bytes(call.scales)});
  if (call.routing == Routing::kIds) {
    tensors.push_back({{"ids", StDtype::kI32, {call.rows, call.top_k}}, Bytes(call.ids)});
    tensors.push_back({{"weights", StDtype::kF32, {call.rows, call.top_k}}, Bytes(call.weights)});
  }
  if (call.routing == Routing::kLogits) {
    tensors.push_back({{"logits", StDtype::kF32, {call.rows, call.num_experts}}, Bytes(call.logits)});
  }
  tensors.push_back({{"output", call.output_dtype, {call.output_rows(), call.columns}}, call.output});
  return tensors;
}

// Free text of a client as the container takes it.
std::string Utf8(std::string text) {
  if (!IsUtf8(text)) std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c >= 0x80; }, '?');
  return text;
}

const char* Flag(bool on) { return on ? "true" : "false"; }

std::vector<std::pair<std::string, std::string>> MetadataOf(const RecordedCall& call) {
  return {{"format", kFormat},
          {"model", Utf8(call.model)},
          {"layer", absl::StrCat(call.layer)},
          {"routed_only", Flag(call.routed_only)},
          {"per_slot", Flag(call.per_slot)},
          {"backend", call.backend},
          {"scheme", call.scheme},
          {"generation", absl::StrCat(call.generation)},
          {"weights_id", WeightsIdText(call.weights_id)},
          {"layer_weights_id", WeightsIdText(call.layer_weights_id)},
          {"first_expert", absl::StrCat(call.first_expert)},
          {"end_expert", absl::StrCat(call.end_expert)},
          {"deterministic", Flag(call.deterministic)},
          {"activations", call.activations},
          {"version", call.version},
          {"request_id", Utf8(call.request_id)},
          {"transport", call.transport},
          {"time", call.time},
          {"receive_us", absl::StrCat(call.receive_us)},
          {"queue_us", absl::StrCat(call.queue_us)},
          {"compute_us", absl::StrCat(call.compute_us)},
          {"batch_rows", absl::StrCat(call.batch_rows)}};
}

absl::Status NotFound(const std::string& path, const std::string& wanted) {
  return absl::NotFoundError(absl::StrCat(path, ": wanted ", wanted, ", got none"));
}

// Reads one file into a call. The first fault stays in `status`, and later reads do nothing.
class Reader {
 public:
  Reader(const SafetensorsFile& file, Metadata metadata) : file_(file), metadata_(std::move(metadata)) {}

  const absl::Status& status() const { return status_; }
  void Fail(const std::string& what, const std::string& wanted, const std::string& got) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(file_.path(), ": ", what, ": wanted ", wanted, ", got ", got));
  }

  std::string Text(const char* key) {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) return Fail(absl::StrCat("metadata ", key), "a recorded call's", "none"), std::string();
    return found->second;
  }
  template <typename T>
  void Number(const char* key, T* out) {
    const std::string text = Text(key);
    T value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || value < 0) {
      return Fail(absl::StrCat("metadata ", key), "a whole number of 0 or more", QuotedName(text));
    }
    *out = value;
  }
  // 0 where it is missing, as in recordings of older servers.
  void Weights(const char* key, uint64_t* out) {
    if (metadata_.count(key) == 0) return;
    const std::string text = Text(key);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out, 16);
    if (error == std::errc() && end == text.data() + text.size() && text == WeightsIdText(*out)) return;
    Fail(absl::StrCat("metadata ", key), "16 hexadecimal digits", QuotedName(text));
  }
  void Bool(const char* key, bool* out) {
    const std::string text = Text(key);
    if (text != "true" && text != "false") return Fail(absl::StrCat("metadata ", key), "true or false", QuotedName(text));
    *out = text == "true";
  }

  bool Has(const char* name) const { return file_.Find(name) != nullptr; }
  // The tensor's facts; null, and a fault, when it is missing or its dtype or rank is another.
  const TensorInfo* Find(const std::string& name, const std::vector<StDtype>& dtypes, size_t rank) {
    if (!status_.ok()) return nullptr;
    const std::string what = absl::StrCat("tensor ", name);
    const TensorInfo* info = file_.Find(name);
    if (info == nullptr) return Fail(what, "a recorded call's", "none"), nullptr;
    if (std::find(dtypes.begin(), dtypes.end(), info->dtype) == dtypes.end()) {
      std::string wanted;
      for (const StDtype dtype : dtypes) absl::StrAppend(&wanted, wanted.empty() ? "" : " or ", StDtypeName(dtype));
      return Fail(what, wanted, StDtypeName(info->dtype)), nullptr;
    }
    if (info->shape.size() != rank) return Fail(what, absl::StrCat(rank, " dimensions"), ShapeText(info->shape)), nullptr;
    return info;
  }
  // Its bytes, when its shape is `shape`.
  template <typename T>
  void Data(const std::string& name, const TensorInfo* info, const std::vector<int64_t>& shape, std::vector<T>* out) {
    if (!status_.ok()) return;
    if (info->shape != shape) return Fail(absl::StrCat("tensor ", name), ShapeText(shape), ShapeText(info->shape));
    out->resize(info->bytes / sizeof(T));
    status_ = file_.Read(*info, 0, {reinterpret_cast<uint8_t*>(out->data()), info->bytes});
  }

 private:
  const SafetensorsFile& file_;
  const Metadata metadata_;
  absl::Status status_;
};

void ReadFields(Reader* reader, RecordedCall* call) {
  const std::string format = reader->Text("format");
  if (format != kFormat) reader->Fail("metadata format", absl::StrCat("\"", kFormat, "\""), QuotedName(format));
  call->model = reader->Text("model");
  reader->Number("layer", &call->layer);
  reader->Bool("routed_only", &call->routed_only);
  reader->Bool("per_slot", &call->per_slot);
  call->backend = reader->Text("backend");
  call->scheme = reader->Text("scheme");
  reader->Number("generation", &call->generation);
  reader->Weights("weights_id", &call->weights_id);
  reader->Weights("layer_weights_id", &call->layer_weights_id);
  reader->Number("first_expert", &call->first_expert);
  reader->Number("end_expert", &call->end_expert);
  reader->Bool("deterministic", &call->deterministic);
  call->activations = reader->Text("activations");
  call->version = reader->Text("version");
  call->request_id = reader->Text("request_id");
  call->transport = reader->Text("transport");
  call->time = reader->Text("time");
  reader->Number("receive_us", &call->receive_us);
  reader->Number("queue_us", &call->queue_us);
  reader->Number("compute_us", &call->compute_us);
  reader->Number("batch_rows", &call->batch_rows);
}

void ReadRouting(Reader* reader, RecordedCall* call) {
  using Routing = RecordedCall::Routing;
  const bool ids = reader->Has("ids") || reader->Has("weights"), logits = reader->Has("logits");
  if (ids && logits) reader->Fail("routing", "ids and weights, or logits, or none", "both");
  if (call->per_slot && !ids) reader->Fail("routing", "ids and weights of a call per slot", "none");
  call->routing = ids ? Routing::kIds : logits ? Routing::kLogits : Routing::kGate;
  if (ids) {
    const TensorInfo* info = reader->Find("ids", {StDtype::kI32}, 2);
    const TensorInfo* weights = reader->Find("weights", {StDtype::kF32}, 2);
    if (info == nullptr || weights == nullptr) return;
    call->top_k = info->shape[1];
    if (call->top_k < 1 || call->top_k > std::numeric_limits<uint16_t>::max()) {
      return reader->Fail("tensor ids", "1 to 65535 slots a row", ShapeText(info->shape));
    }
    reader->Data("ids", info, {call->rows, call->top_k}, &call->ids);
    reader->Data("weights", weights, {call->rows, call->top_k}, &call->weights);
  }
  if (logits) {
    const TensorInfo* info = reader->Find("logits", {StDtype::kF32}, 2);
    if (info == nullptr) return;
    call->num_experts = info->shape[1];
    reader->Data("logits", info, {call->rows, call->num_experts}, &call->logits);
  }
}

void ReadTensors(Reader* reader, RecordedCall* call) {
  const TensorInfo* hidden =
      reader->Find("hidden", {StDtype::kF32, StDtype::kBf16, StDtype::kF16, StDtype::kF8E4m3, StDtype::kI8}, 2);
  if (hidden == nullptr) return;
  call->hidden_dtype = hidden->dtype;
  call->rows = hidden->shape[0];
  call->columns = hidden->shape[1];
  if (call->columns < 1) return reader->Fail("tensor hidden", "at least one column", ShapeText(hidden->shape));
  reader->Data("hidden", hidden, hidden->shape, &call->hidden);
  if (StDtypeBits(hidden->dtype) == 8) {
    const TensorInfo* scales = reader->Find("hidden_scales", {StDtype::kF32}, 1);
    if (scales != nullptr) reader->Data("hidden_scales", scales, {call->rows}, &call->scales);
  }
  ReadRouting(reader, call);
  const TensorInfo* output = reader->Find("output", {StDtype::kF32, StDtype::kBf16, StDtype::kF16}, 2);
  if (output == nullptr) return;
  call->output_dtype = output->dtype;
  reader->Data("output", output, {call->output_rows(), call->columns}, &call->output);
}

}  // namespace

std::string WeightsIdText(uint64_t weights_id) { return absl::StrCat(absl::Hex(weights_id, absl::kZeroPad16)); }

uint64_t RecordedCall::tensor_bytes() const {
  return hidden.size() + output.size() + sizeof(float) * (scales.size() + ids.size() + weights.size() + logits.size());
}

absl::Status WriteRecordedCall(const std::string& path, const RecordedCall& call) {
  const Tensors tensors = TensorsOf(call);
  std::vector<SafetensorsWriter::Tensor> header;
  for (const auto& [tensor, bytes] : tensors) header.push_back(tensor);
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> writer = SafetensorsWriter::Create(path, header, MetadataOf(call), kMode);
  if (!writer.ok()) return writer.status();
  for (const auto& [tensor, bytes] : tensors) {
    const absl::StatusOr<uint64_t> wanted = TensorBytes(tensor.dtype, tensor.shape);
    if (!wanted.ok() || *wanted != bytes.size()) {
      const std::string shape = absl::StrCat(StDtypeName(tensor.dtype), " ", ShapeText(tensor.shape));
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": tensor ", tensor.name, ": wanted the bytes of ", shape, ", got ", bytes.size()));
    }
    if (absl::Status status = (*writer)->Append(bytes); !status.ok()) return status;
  }
  return (*writer)->Finish();
}

absl::StatusOr<RecordedCall> ReadRecordedCall(const std::string& path) {
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<Metadata> metadata = (*file)->ReadMetadata();
  if (!metadata.ok()) return metadata.status();
  Reader reader(**file, *std::move(metadata));
  RecordedCall call;
  ReadFields(&reader, &call);
  ReadTensors(&reader, &call);
  if (!reader.status().ok()) return reader.status();
  return call;
}

absl::StatusOr<std::vector<std::string>> FindRecordings(const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      if (!fs::exists(path, error)) return NotFound(path, "a recording or a folder of them");
      files.push_back(path);
      continue;
    }
    std::vector<std::string> inside;
    fs::directory_iterator entries(path, error);
    for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
      const fs::path& entry = entries->path();
      if (entry.extension() == ".safetensors" && entry.filename().string().front() != '.') inside.push_back(entry.string());
    }
    if (error) return absl::NotFoundError(absl::StrCat(path, ": cannot be read: ", error.message()));
    if (inside.empty()) return NotFound(path, "recordings (*.safetensors) in the folder");
    std::sort(inside.begin(), inside.end());
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

}  // namespace moed
