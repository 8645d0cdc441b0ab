#include "engine/weights_hash.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr uint64_t kSampleBytes = 256;  // two of them of each tensor: its first, and those from the middle on
constexpr size_t kDigits = 32;          // as many as a UUID has

class Sha256 {
 public:
  Sha256() { EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr); }

  void Add(std::string_view bytes) { EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()); }
  void Add(std::span<const uint8_t> bytes) { EVP_DigestUpdate(context_.get(), bytes.data(), bytes.size()); }

  std::string Take() {
    std::string digest(EVP_MAX_MD_SIZE, '\0');
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(digest.data()), &size);
    digest.resize(size);
    return digest;
  }

 private:
  struct Free {
    void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
  };
  const std::unique_ptr<EVP_MD_CTX, Free> context_{EVP_MD_CTX_new()};
};

absl::Status AddSamples(const TensorRef& tensor, Sha256* hash) {
  const uint64_t bytes = tensor.info->bytes, half = bytes / 2;
  std::array<uint8_t, kSampleBytes> buffer;
  for (const auto& [begin, end] : {std::pair<uint64_t, uint64_t>{0, half}, {half, bytes}}) {
    const std::span<uint8_t> sample = std::span(buffer).first(std::min(end - begin, kSampleBytes));
    if (absl::Status status = tensor.file->Read(*tensor.info, begin, sample); !status.ok()) return status;
    hash->Add(sample);
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<std::vector<NamedTensor>> TensorsOf(const Checkpoint& checkpoint,
                                                std::span<const std::span<const TensorInfo* const>> layers) {
  absl::flat_hash_map<const TensorInfo*, size_t> layer_of;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    for (const TensorInfo* tensor : layers[layer]) layer_of.emplace(tensor, layer);
  }
  std::vector<std::vector<NamedTensor>> tensors(layers.size());
  for (const auto& [name, ref] : checkpoint.tensors()) {
    const auto found = layer_of.find(ref.info);
    if (found != layer_of.end()) tensors[found->second].push_back({{name.data(), name.size()}, ref});
  }
  for (std::vector<NamedTensor>& layer : tensors) {
    std::sort(layer.begin(), layer.end(), [](const NamedTensor& a, const NamedTensor& b) { return a.name < b.name; });
  }
  return tensors;
}

absl::StatusOr<std::string> HashTensors(std::span<const NamedTensor> tensors) {
  Sha256 hash;
  for (const NamedTensor& tensor : tensors) {
    const TensorInfo& info = *tensor.ref.info;
    hash.Add(absl::StrCat(tensor.name.size(), " ", std::string(tensor.name), " ", StDtypeName(info.dtype), " ",
                          ShapeText(info.shape)));
    if (absl::Status status = AddSamples(tensor.ref, &hash); !status.ok()) return status;
  }
  return hash.Take();
}

std::string JoinHashes(std::span<const std::string> layers) {
  Sha256 hash;
  for (const std::string& layer : layers) hash.Add(std::string_view(layer));
  return absl::BytesToHexString(hash.Take()).substr(0, kDigits);
}

uint64_t WeightsId(const std::string& hash) {
  uint64_t id = 0;
  std::from_chars(hash.data(), hash.data() + std::min<size_t>(hash.size(), 16), id, 16);
  return id;
}

}  // namespace moed
