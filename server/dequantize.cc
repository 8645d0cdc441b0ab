// dequantize: every expert of a checkpoint as plain f32 or bf16, one expert in memory at a time.
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint.h"
#include "engine/model_config.h"
#include "engine/safetensors.h"
#include "engine/weights.h"
#include "kernels/number_formats.h"
#include "server/commands.h"
#include "server/setup.h"

namespace moed {
namespace {

using Tensors = std::vector<SafetensorsWriter::Tensor>;

// The tensors of one expert in the order in which AppendExpert writes them.
void ListExpert(const std::string& prefix, const MoeDesc& desc, StDtype dtype, Tensors* out) {
  const std::pair<const char*, std::pair<int64_t, int64_t>> projections[] = {
      {"gate_proj", {desc.intermediate, desc.hidden}},
      {"up_proj", {desc.intermediate, desc.hidden}},
      {"down_proj", {desc.hidden, desc.intermediate}},
  };
  for (const auto& [name, shape] : projections) {
    out->push_back({absl::StrCat(prefix, name, ".weight"), dtype, {shape.first, shape.second}});
    if (desc.biases) out->push_back({absl::StrCat(prefix, name, ".bias"), dtype, {shape.first}});
  }
}

Tensors ListTensors(const std::vector<LayerPlan>& plans, StDtype dtype) {
  Tensors tensors;
  for (const LayerPlan& plan : plans) {
    const std::string mlp = absl::StrCat("model.layers.", plan.layer, ".mlp.");
    for (int expert = 0; expert < plan.routed.num_experts; ++expert) {
      ListExpert(absl::StrCat(mlp, "experts.", expert, "."), plan.routed, dtype, &tensors);
    }
    if (plan.has_shared) ListExpert(absl::StrCat(mlp, "shared_experts."), plan.shared, dtype, &tensors);
  }
  return tensors;
}

// Streams values into the file in its element type. Buffers are reused.
class ValueWriter {
 public:
  ValueWriter(SafetensorsWriter* file, bool bf16) : file_(file), bf16_(bf16) {}

  absl::Status AppendExpert(const ExpertWeights& expert, const MoeDesc& desc) {
    for (const LinearWeights* linear : {&expert.gate, &expert.up, &expert.down}) {
      row_.resize(static_cast<size_t>(linear->cols));
      for (int64_t row = 0; row < linear->rows; ++row) {
        DequantizeRow(*linear, row, row_.data());
        if (absl::Status status = Append(row_); !status.ok()) return status;
      }
      if (!desc.biases) continue;
      if (absl::Status status = Append(linear->bias); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Append(const std::vector<float>& values) {
    if (!bf16_) return file_->Append({reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)});
    narrow_.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) narrow_[i] = FloatToBf16(values[i]);
    return file_->Append({reinterpret_cast<const uint8_t*>(narrow_.data()), narrow_.size() * sizeof(uint16_t)});
  }

  SafetensorsWriter* const file_;
  const bool bf16_;
  std::vector<float> row_;
  std::vector<uint16_t> narrow_;
};

absl::Status AppendExperts(const ExpertReader& reader, const MoeDesc& desc, ValueWriter* writer, ExpertWeights* buffer) {
  for (int expert = 0; expert < desc.num_experts; ++expert) {
    if (absl::Status status = reader.Read(expert, buffer); !status.ok()) return status;
    if (absl::Status status = writer->AppendExpert(*buffer, desc); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status WriteFile(const std::string& path, const std::vector<LayerPlan>& plans, const Tensors& tensors, bool bf16) {
  absl::StatusOr<std::unique_ptr<SafetensorsWriter>> file = SafetensorsWriter::Create(path, tensors, {{"format", "pt"}});
  if (!file.ok()) return file.status();
  ValueWriter writer(file->get(), bf16);
  ExpertWeights buffer;
  for (const LayerPlan& plan : plans) {
    absl::Status status = AppendExperts(*plan.experts, plan.routed, &writer, &buffer);
    if (status.ok() && plan.has_shared) status = AppendExperts(*plan.shared_expert, plan.shared, &writer, &buffer);
    if (!status.ok()) return status;
  }
  return (*file)->Finish();
}

}  // namespace

absl::StatusOr<size_t> Dequantize(const DequantizeOptions& options) {
  std::error_code error;
  if (!options.force && std::filesystem::exists(std::filesystem::symlink_status(options.out, error))) {
    return absl::AlreadyExistsError(absl::StrCat("OUT: wanted a new file (or --force), got the existing ", options.out));
  }
  if (std::filesystem::is_directory(options.out, error)) {
    return absl::InvalidArgumentError(absl::StrCat("OUT: wanted a file, got the directory ", options.out));
  }
  absl::StatusOr<ModelConfig> config = ReadModelConfig(options.path);
  if (!config.ok()) return config.status();
  absl::StatusOr<std::unique_ptr<Checkpoint>> checkpoint = Checkpoint::Open(options.path);
  if (!checkpoint.ok()) return checkpoint.status();
  std::vector<LayerPlan> plans;
  for (const int layer : config->moe_layers) {
    absl::StatusOr<LayerPlan> plan = PlanLayer(*config, **checkpoint, layer);
    if (!plan.ok()) return plan.status();
    plans.push_back(*std::move(plan));
  }
  const Tensors tensors = ListTensors(plans, options.bf16 ? StDtype::kBf16 : StDtype::kF32);
  // Written beside and renamed, so that OUT is complete whenever it exists.
  const std::string draft = absl::StrCat(options.out, ".", getpid(), ".tmp");
  absl::Status status = WriteFile(draft, plans, tensors, options.bf16);
  if (status.ok()) {
    std::filesystem::rename(draft, options.out, error);
    if (error) status = absl::UnavailableError(absl::StrCat("OUT: cannot rename ", draft, " to ", options.out, ": ", error.message()));
  }
  if (!status.ok()) {
    std::filesystem::remove(draft, error);
    return status;
  }
  return tensors.size();
}

int RunDequantize(const DequantizeOptions& options) {
  absl::StatusOr<size_t> written = Dequantize(options);
  if (!written.ok()) return ReportFailure(written.status());
  std::printf("%zu tensors written to %s\n", *written, options.out.c_str());
  return 0;
}

}  // namespace moed
