#include "engine/weights_reader.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/packing.h"
#include "kernels/number_formats.h"

namespace moed {
namespace {

// Prefixes an error of a tensor's contents with where the tensor is.
absl::Status At(const TensorRef& tensor, const std::string& name, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(tensor.file->path(), ": ", name, ": ",
                                                  std::string(status.message().data(), status.message().size())));
}

absl::Status ReadAll(const TensorRef& tensor, std::vector<uint8_t>* out) {
  out->resize(tensor.info->bytes);
  return tensor.file->Read(*tensor.info, 0, *out);
}

float ElementAsFloat(StDtype dtype, const uint8_t* bytes) {
  uint16_t half;
  float single;
  if (dtype == StDtype::kF32) {
    std::memcpy(&single, bytes, 4);
    return single;
  }
  std::memcpy(&half, bytes, 2);
  return dtype == StDtype::kBf16 ? Bf16ToFloat(half) : F16ToFloat(half);
}

absl::Status CheckFinite(StDtype dtype, const std::vector<uint8_t>& bytes) {
  const size_t size = static_cast<size_t>(StDtypeBits(dtype)) / 8;
  for (size_t at = 0; at < bytes.size(); at += size) {
    const float value = ElementAsFloat(dtype, bytes.data() + at);
    if (std::isfinite(value)) continue;
    return absl::InvalidArgumentError(absl::StrCat("scale ", at / size, " is ", value, ", want a finite number"));
  }
  return absl::OkStatus();
}

// One projection: reads its tensors and converts. `raw` is a scratch buffer.
class LinearReader {
 public:
  LinearReader(const LinearSource& source, LinearWeights* out) : source_(source), out_(out) {}

  absl::Status Read() {
    out_->scheme = source_.scheme;
    out_->rows = source_.rows;
    out_->cols = source_.cols;
    out_->zero_points.clear();
    out_->group_index.clear();
    out_->bias.clear();
    out_->scales.clear();
    switch (source_.container) {
      case DeclaredScheme::Container::kPlain: return ReadAll(source_.codes, &out_->codes);
      case DeclaredScheme::Container::kGptq: return ReadGptq();
      case DeclaredScheme::Container::kPacked: return ReadPacked();
      default: break;
    }
    return absl::InternalError("unknown container");
  }

 private:
  int64_t group() const { return source_.scheme.group.cols > 0 ? source_.scheme.group.cols : source_.cols; }

  absl::Status ReadGptq() {
    const int64_t groups = GroupCount(source_.cols, source_.scheme.group.cols);
    absl::Status status = ReadAll(source_.codes, &raw_);
    if (!status.ok()) return status;
    UnpackGptqInt4(raw_, source_.rows, source_.cols, &out_->codes);

    status = ReadAll(source_.zeros, &raw_);
    if (status.ok()) status = CheckGptqSymmetricZeros(raw_, groups, source_.rows, source_.gptq_v2);
    if (!status.ok()) return At(source_.zeros, source_.module + ".qzeros", status);

    if (source_.g_idx) {
      status = ReadAll(source_.g_idx, &raw_);
      if (status.ok()) status = CheckTrivialGroupIndex(raw_, group());
      if (!status.ok()) return At(source_.g_idx, source_.module + ".g_idx", status);
    }
    status = ReadAll(source_.scales, &raw_);
    if (status.ok()) status = CheckFinite(source_.scales.info->dtype, raw_);
    if (!status.ok()) return At(source_.scales, source_.module + ".scales", status);
    TransposeElements(raw_, groups, source_.rows, ScaleBytes(source_.scheme.scale), &out_->scales);
    return absl::OkStatus();
  }

  absl::Status ReadPacked() {
    absl::Status status = ReadAll(source_.codes, &raw_);
    if (!status.ok()) return status;
    UnpackRowsInt4(raw_, source_.rows, source_.cols, &out_->codes);
    status = ReadAll(source_.shape, &raw_);
    if (status.ok()) status = CheckStoredShape();
    if (!status.ok()) return At(source_.shape, source_.module + ".weight_shape", status);
    status = ReadAll(source_.scales, &out_->scales);
    if (status.ok()) status = CheckFinite(source_.scales.info->dtype, out_->scales);
    if (!status.ok()) return At(source_.scales, source_.module + ".weight_scale", status);
    return absl::OkStatus();
  }

  // weight_shape holds {N, K} as int64 (int32 in some files).
  absl::Status CheckStoredShape() const {
    int64_t got[2];
    if (source_.shape.info->dtype == StDtype::kI64) {
      std::memcpy(got, raw_.data(), sizeof(got));
    } else {
      int32_t narrow[2];
      std::memcpy(narrow, raw_.data(), sizeof(narrow));
      got[0] = narrow[0];
      got[1] = narrow[1];
    }
    if (got[0] == source_.rows && got[1] == source_.cols) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("says [", got[0], ", ", got[1], "], want [", source_.rows, ", ", source_.cols, "] from the config"));
  }

  const LinearSource& source_;
  LinearWeights* const out_;
  std::vector<uint8_t> raw_;
};

class SeparateReader : public ExpertReader {
 public:
  explicit SeparateReader(std::vector<ExpertSource> experts) : experts_(std::move(experts)) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    const ExpertSource& source = experts_[expert];
    absl::Status status = LinearReader(source.gate, &out->gate).Read();
    if (status.ok()) status = LinearReader(source.up, &out->up).Read();
    if (status.ok()) status = LinearReader(source.down, &out->down).Read();
    return status;
  }

 private:
  const std::vector<ExpertSource> experts_;
};

class FusedReader : public ExpertReader {
 public:
  explicit FusedReader(const FusedSource& source) : source_(source) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    std::vector<uint8_t> raw;
    absl::Status status = ReadExpert(source_.gate_up, expert, &raw);
    if (!status.ok()) return status;
    // Column 2i of the transposed matrix is gate row i, column 2i + 1 is up row i.
    TakeColumns(raw, source_.hidden, source_.intermediate, 2 * source_.intermediate, 0, 2, &out->gate);
    TakeColumns(raw, source_.hidden, source_.intermediate, 2 * source_.intermediate, 1, 2, &out->up);
    status = ReadExpert(source_.down, expert, &raw);
    if (!status.ok()) return status;
    TakeColumns(raw, source_.intermediate, source_.hidden, source_.hidden, 0, 1, &out->down);
    return ReadBiases(expert, out);
  }

 private:
  // The slice of one expert: its size is an even share of the tensor.
  absl::Status ReadExpert(const TensorRef& tensor, int expert, std::vector<uint8_t>* out) const {
    const uint64_t bytes = tensor.info->bytes / static_cast<uint64_t>(source_.experts);
    out->resize(bytes);
    return tensor.file->Read(*tensor.info, bytes * static_cast<uint64_t>(expert), *out);
  }

  // out [rows, cols], out[n][k] = raw[k][first + step * n], raw is [cols, raw_cols].
  void TakeColumns(const std::vector<uint8_t>& raw, int64_t cols, int64_t rows, int64_t raw_cols, int64_t first, int64_t step,
                   LinearWeights* out) const {
    const int64_t bytes = ElementBits(source_.scheme.element) / 8;
    out->scheme = source_.scheme;
    out->rows = rows;
    out->cols = cols;
    out->scales.clear();
    out->zero_points.clear();
    out->group_index.clear();
    out->codes.resize(static_cast<size_t>(rows * cols * bytes));
    for (int64_t k = 0; k < cols; ++k) {
      const uint8_t* from = raw.data() + (k * raw_cols + first) * bytes;
      for (int64_t n = 0; n < rows; ++n) {
        std::memcpy(out->codes.data() + (n * cols + k) * bytes, from + n * step * bytes, bytes);
      }
    }
  }

  absl::Status ReadBiases(int expert, ExpertWeights* out) const {
    std::vector<uint8_t> raw;
    absl::Status status = ReadExpert(source_.gate_up_bias, expert, &raw);
    if (!status.ok()) return status;
    TakeBias(source_.gate_up_bias.info->dtype, raw, 0, 2, &out->gate.bias);
    TakeBias(source_.gate_up_bias.info->dtype, raw, 1, 2, &out->up.bias);
    status = ReadExpert(source_.down_bias, expert, &raw);
    if (!status.ok()) return status;
    TakeBias(source_.down_bias.info->dtype, raw, 0, 1, &out->down.bias);
    return absl::OkStatus();
  }

  static void TakeBias(StDtype dtype, const std::vector<uint8_t>& raw, size_t first, size_t step, std::vector<float>* out) {
    const size_t bytes = static_cast<size_t>(StDtypeBits(dtype)) / 8;
    out->clear();
    for (size_t at = first; at < raw.size() / bytes; at += step) out->push_back(ElementAsFloat(dtype, raw.data() + at * bytes));
  }

  const FusedSource source_;
};

}  // namespace

std::shared_ptr<const ExpertReader> MakeSeparateReader(std::vector<ExpertSource> experts) {
  return std::make_shared<SeparateReader>(std::move(experts));
}

std::shared_ptr<const ExpertReader> MakeFusedReader(const FusedSource& source) { return std::make_shared<FusedReader>(source); }

absl::Status ReadFloats(const TensorRef& tensor, const std::string& name, std::vector<float>* out) {
  const StDtype dtype = tensor.info->dtype;
  if (dtype != StDtype::kF32 && dtype != StDtype::kBf16 && dtype != StDtype::kF16) {
    return At(tensor, name, absl::InvalidArgumentError(absl::StrCat("dtype is ", StDtypeName(dtype), ", want F32, BF16 or F16")));
  }
  std::vector<uint8_t> raw;
  absl::Status status = ReadAll(tensor, &raw);
  if (!status.ok()) return status;
  const size_t bytes = static_cast<size_t>(StDtypeBits(dtype)) / 8;
  out->resize(raw.size() / bytes);
  for (size_t at = 0; at < out->size(); ++at) (*out)[at] = ElementAsFloat(dtype, raw.data() + at * bytes);
  return absl::OkStatus();
}

}  // namespace moed
