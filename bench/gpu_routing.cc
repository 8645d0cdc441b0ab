#include "bench/gpu_routing.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <span>

#include "absl/strings/str_cat.h"

namespace moed::bench {
namespace {

// Element `T` is `dtype` in the file.
template <typename T>
absl::Status ReadTensor(const SafetensorsFile& file, const std::string& name, StDtype dtype, const RoutingKey& key,
                        std::vector<T>* out) {
  const TensorInfo* const tensor = file.Find(name);
  if (tensor == nullptr) return absl::NotFoundError(absl::StrCat("routing: ", file.path(), " has no tensor ", name));
  const std::vector<int64_t> shape = {key.tokens, key.top_k};
  if (tensor->dtype != dtype || tensor->shape != shape) {
    return absl::InvalidArgumentError(absl::StrCat("routing: ", file.path(), ": ", name, ": wanted ", StDtypeName(dtype), " ",
                                                   ShapeText(shape), ", got ", StDtypeName(tensor->dtype), " ",
                                                   ShapeText(tensor->shape)));
  }
  out->resize(static_cast<size_t>(key.tokens * key.top_k));
  return file.Read(*tensor, 0, {reinterpret_cast<uint8_t*>(out->data()), out->size() * sizeof(T)});
}

absl::StatusOr<Routing> ReadRouting(const SafetensorsFile& file, const RoutingKey& key) {
  const std::string name = absl::StrCat(key.shape, ".m", key.tokens, ".r", key.index);
  Routing routing;
  absl::Status status = ReadTensor(file, name + ".ids", StDtype::kI32, key, &routing.ids);
  if (status.ok()) status = ReadTensor(file, name + ".weights", StDtype::kF32, key, &routing.weights);
  if (!status.ok()) return status;
  for (size_t at = 0; at < routing.ids.size(); ++at) {
    if (routing.ids[at] >= 0 && routing.ids[at] < key.experts) continue;
    return absl::InvalidArgumentError(absl::StrCat("routing: ", file.path(), ": ", name, ".ids: row ",
                                                   at / static_cast<size_t>(key.top_k), ": wanted ids from 0 to ", key.experts - 1,
                                                   ", got ", routing.ids[at]));
  }
  return routing;
}

Routing RandomRouting(const RoutingKey& key) {
  std::seed_seq seeds = {static_cast<int64_t>(key.index), key.tokens, static_cast<int64_t>(key.experts),
                         static_cast<int64_t>(key.top_k)};
  std::mt19937 random(seeds);
  std::vector<int32_t> experts(static_cast<size_t>(key.experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::uniform_real_distribution<float> part(0.1f, 1.0f);
  Routing routing;
  for (int64_t row = 0; row < key.tokens; ++row) {
    float sum = 0.0f;
    for (int slot = 0; slot < key.top_k; ++slot) {
      std::uniform_int_distribution<int> rest(slot, key.experts - 1);
      std::swap(experts[static_cast<size_t>(slot)], experts[static_cast<size_t>(rest(random))]);
      routing.ids.push_back(experts[static_cast<size_t>(slot)]);
      routing.weights.push_back(part(random));
      sum += routing.weights.back();
    }
    std::for_each(routing.weights.end() - key.top_k, routing.weights.end(), [&](float& weight) { weight /= sum; });
  }
  return routing;
}

}  // namespace

std::vector<int32_t> RowsOfExperts(const Routing& routing, int experts) {
  std::vector<int32_t> rows(static_cast<size_t>(experts));
  for (const int32_t id : routing.ids) ++rows[static_cast<size_t>(id)];
  return rows;
}

absl::StatusOr<Routings> Routings::Open(const std::string& path) {
  absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(path);
  if (!file.ok()) return file.status();
  return Routings(*std::move(file));
}

absl::StatusOr<Routing> Routings::Get(const RoutingKey& key) const {
  return file_ != nullptr ? ReadRouting(*file_, key) : RandomRouting(key);
}

}  // namespace moed::bench
