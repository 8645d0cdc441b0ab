#include "tests/support/checkpoint_builder.h"

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/number_formats.h"
#include "nlohmann/json.hpp"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

template <typename T>
std::vector<uint8_t> BytesOf(std::span<const T> values) {
  std::vector<uint8_t> bytes(values.size_bytes());
  if (!bytes.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// One file with the tensors whose number is `shard` modulo `shards`.
absl::Status WriteShard(const std::string& path, const std::vector<BuilderTensor>& tensors, size_t shard, size_t shards) {
  std::vector<SafetensorsWriter::Tensor> entries;
  for (size_t t = shard; t < tensors.size(); t += shards)
    entries.push_back({tensors[t].name, tensors[t].dtype, tensors[t].shape});
  auto writer = SafetensorsWriter::Create(path, entries, {{"format", "pt"}});
  if (!writer.ok()) return writer.status();
  for (size_t t = shard; t < tensors.size(); t += shards) {
    const absl::Status status = (*writer)->Append(tensors[t].bytes);
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

}  // namespace

double R(uint32_t s, uint64_t i) {
  uint32_t z = static_cast<uint32_t>(i) * 0x9E3779B9u + s * 0x85EBCA77u;
  z ^= z >> 16;
  z *= 0x85EBCA6Bu;
  z ^= z >> 13;
  z *= 0xC2B2AE35u;
  z ^= z >> 16;
  return z / 4294967296.0 - 0.5;
}

WeightFn RcWeights(int64_t hidden, int64_t intermediate) {
  const double in = 8.0 / std::sqrt(static_cast<double>(hidden));
  const double out = 8.0 / std::sqrt(static_cast<double>(intermediate));
  return [in, out](int expert, int projection, int64_t index) {
    const uint32_t stream = 1000u + 3u * static_cast<uint32_t>(expert) + static_cast<uint32_t>(projection);
    return static_cast<float>(R(stream, static_cast<uint64_t>(index)) * (projection == kDown ? out : in));
  };
}

WeightFn PcWeights(int64_t hidden, int64_t intermediate, float a, float b) {
  return [hidden, intermediate, a, b](int, int projection, int64_t index) {
    if (projection == kDown) return 1.0f / static_cast<float>(intermediate);
    if (index % hidden != 0) return 0.0f;
    return projection == kGate ? a : b;
  };
}

std::vector<float> CaseHidden(int64_t tokens, int64_t hidden) {
  std::vector<float> x(static_cast<size_t>(tokens * hidden));
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(4.0 * R(7, i));
  return x;
}

std::vector<float> CaseLogits(int64_t tokens, int experts) {
  std::vector<float> logits(static_cast<size_t>(tokens * experts));
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = static_cast<float>(8.0 * R(9, i));
  return logits;
}

void CheckpointBuilder::Add(const std::string& name, StDtype dtype, const std::vector<int64_t>& shape,
                            std::vector<uint8_t> bytes) {
  tensors_.push_back({name, dtype, shape, std::move(bytes)});
}

void CheckpointBuilder::AddFloats(const std::string& name, StDtype dtype, const std::vector<int64_t>& shape,
                                  std::span<const float> values) {
  if (dtype == StDtype::kF32) return Add(name, dtype, shape, BytesOf(values));
  std::vector<uint16_t> halves(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    halves[i] = dtype == StDtype::kBf16 ? FloatToBf16(values[i]) : FloatToF16(values[i]);
  }
  Add(name, dtype, shape, BytesOf<uint16_t>(halves));
}

void CheckpointBuilder::AddInt32(const std::string& name, const std::vector<int64_t>& shape,
                                 std::span<const int32_t> values) {
  Add(name, StDtype::kI32, shape, BytesOf(values));
}

void CheckpointBuilder::AddInt64(const std::string& name, const std::vector<int64_t>& shape,
                                 std::span<const int64_t> values) {
  Add(name, StDtype::kI64, shape, BytesOf(values));
}

BuilderTensor* CheckpointBuilder::Find(const std::string& name) {
  for (BuilderTensor& tensor : tensors_) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

int CheckpointBuilder::Remove(const std::string& name) {
  return static_cast<int>(std::erase_if(tensors_, [&name](const BuilderTensor& tensor) { return tensor.name == name; }));
}

int CheckpointBuilder::RenameAll(const std::string& from, const std::string& to) {
  int changed = 0;
  for (BuilderTensor& tensor : tensors_) {
    size_t at = tensor.name.find(from);
    if (at == std::string::npos) continue;
    ++changed;
    for (; at != std::string::npos; at = tensor.name.find(from, at + to.size())) tensor.name.replace(at, from.size(), to);
  }
  return changed;
}

void CheckpointBuilder::SetFile(const std::string& name, std::string text) {
  for (auto& [file, content] : files_) {
    if (file != name) continue;
    content = std::move(text);
    return;
  }
  files_.emplace_back(name, std::move(text));
}

std::string CheckpointBuilder::GetFile(const std::string& name) const {
  for (const auto& [file, content] : files_) {
    if (file == name) return content;
  }
  return {};
}

absl::Status CheckpointBuilder::Write(const std::string& directory, int shards) const {
  for (const auto& [name, text] : files_) WriteFile(absl::StrCat(directory, "/", name), text);
  if (shards <= 1) return WriteShard(absl::StrCat(directory, "/model.safetensors"), tensors_, 0, 1);

  nlohmann::json index;
  uint64_t total = 0;
  const size_t count = static_cast<size_t>(shards);
  for (size_t shard = 0; shard < count; ++shard) {
    const std::string name = absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, count);
    for (size_t t = shard; t < tensors_.size(); t += count) {
      index["weight_map"][tensors_[t].name] = name;
      total += tensors_[t].bytes.size();
    }
    const absl::Status status = WriteShard(absl::StrCat(directory, "/", name), tensors_, shard, count);
    if (!status.ok()) return status;
  }
  index["metadata"]["total_size"] = total;
  WriteFile(absl::StrCat(directory, "/model.safetensors.index.json"), index.dump(1));
  return absl::OkStatus();
}

}  // namespace moed::testing
