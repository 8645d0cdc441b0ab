#include "engine/weights_reader.h"

#include <cstring>
#include <utility>

namespace moed {
namespace {

class SeparateReader : public ExpertReader {
 public:
  explicit SeparateReader(std::vector<ExpertSource> experts) : experts_(std::move(experts)) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    const ExpertSource& source = experts_[expert];
    MOED_RETURN_IF_ERROR(ReadLinear(source.gate, &out->gate));
    MOED_RETURN_IF_ERROR(ReadLinear(source.up, &out->up));
    return ReadLinear(source.down, &out->down);
  }

 private:
  const std::vector<ExpertSource> experts_;
};

class InterleavedReader : public ExpertReader {
 public:
  explicit InterleavedReader(std::vector<ExpertSource> experts) : experts_(std::move(experts)) {}

  absl::Status Read(int expert, ExpertWeights* out) const override {
    const ExpertSource& source = experts_[expert];
    LinearWeights both;
    MOED_RETURN_IF_ERROR(ReadLinear(source.gate, &both));
    SplitInterleaved(both, &out->gate, &out->up);
    return ReadLinear(source.down, &out->down);
  }

 private:
  const std::vector<ExpertSource> experts_;
};

// Every second one of the rows of `row_bytes` bytes, from `first` on.
void TakeRows(const std::vector<uint8_t>& from, size_t row_bytes, size_t first, std::vector<uint8_t>* to) {
  const size_t rows = row_bytes == 0 ? 0 : from.size() / row_bytes / 2;
  to->resize(rows * row_bytes);
  for (size_t row = 0; row < rows; ++row) {
    std::memcpy(to->data() + row * row_bytes, from.data() + (2 * row + first) * row_bytes, row_bytes);
  }
}

void TakeHalf(const LinearWeights& both, size_t first, LinearWeights* out) {
  const bool per_row = both.scheme.group.rows == 1;
  const size_t groups = static_cast<size_t>(GroupCount(both.cols, both.scheme.group.cols));
  out->scheme = both.scheme;
  out->rows = both.rows / 2;
  out->cols = both.cols;
  TakeRows(both.codes, static_cast<size_t>(both.row_bytes()), first, &out->codes);
  out->scales = both.scales;
  out->zero_points = both.zero_points;
  if (per_row) {
    TakeRows(both.scales, groups * static_cast<size_t>(ScaleBytes(both.scheme.scale)), first, &out->scales);
    if (both.scheme.zero_points) TakeRows(both.zero_points, groups, first, &out->zero_points);
  }
  out->group_index = both.group_index;
  out->global_scale = both.global_scale;
  out->input_scale = both.input_scale;
  out->bias.clear();
  for (size_t at = first; at < both.bias.size(); at += 2) out->bias.push_back(both.bias[at]);
}

}  // namespace

std::shared_ptr<const ExpertReader> MakeSeparateReader(std::vector<ExpertSource> experts) {
  return std::make_shared<SeparateReader>(std::move(experts));
}

std::shared_ptr<const ExpertReader> MakeInterleavedReader(std::vector<ExpertSource> experts) {
  return std::make_shared<InterleavedReader>(std::move(experts));
}

void SplitInterleaved(const LinearWeights& both, LinearWeights* gate, LinearWeights* up) {
  TakeHalf(both, 0, gate);
  TakeHalf(both, 1, up);
}

}  // namespace moed
