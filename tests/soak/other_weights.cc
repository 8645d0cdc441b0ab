#include "tests/soak/other_weights.h"

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace moed::testing {

absl::Status CopyWithOtherWeights(const std::string& from, const std::string& to) {
  std::error_code error;
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive, error);
  if (error) return absl::InternalError(absl::StrCat("copying ", from, " to ", to, ": ", error.message()));
  const std::string path = to + "/model.safetensors";
  std::ifstream in(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  uint64_t length = 0;
  if (bytes.size() > sizeof(length)) std::memcpy(&length, bytes.data(), sizeof(length));
  if (bytes.size() < sizeof(length) + length)
    return absl::InvalidArgumentError(absl::StrCat(path, ": wanted safetensors, got less"));
  const char* const begin = bytes.data() + sizeof(length);
  const nlohmann::json header = nlohmann::json::parse(begin, begin + length, nullptr, false);
  int changed = 0;
  for (const auto& [name, tensor] : header.items()) {
    if (!absl::EndsWith(name, ".weight_packed")) continue;
    const size_t base = sizeof(length) + length;
    for (size_t at = base + tensor["data_offsets"][0].get<size_t>(); at < base + tensor["data_offsets"][1].get<size_t>(); ++at) {
      bytes.at(at) = static_cast<char>(bytes[at] ^ 0x35);
    }
    ++changed;
  }
  if (changed == 0) return absl::InvalidArgumentError(absl::StrCat(path, ": wanted tensors *.weight_packed, got none"));
  std::filesystem::remove(path, error);  // the copy may not be writable
  std::ofstream out(path, std::ios::binary);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  out.close();
  return out.good() ? absl::OkStatus() : absl::InternalError(absl::StrCat("could not write ", path));
}

}  // namespace moed::testing
