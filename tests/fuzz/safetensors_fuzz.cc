// Fuzz target: the bytes of one safetensors file. Whatever opens is held to the rules that readers of tensors rely on.
#include <vector>

#include "engine/safetensors.h"
#include "tests/fuzz/memory_folder.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr char kName[] = "model.safetensors";

void CheckTensor(const SafetensorsFile& file, const TensorInfo& info, Bytes input) {
  Require(info.begin <= input.size() && info.bytes <= input.size() - info.begin, "a tensor lies in its file");
  const auto bits = static_cast<unsigned __int128>(info.elements()) * StDtypeBits(info.dtype);
  Require(info.elements() >= 0 && bits == static_cast<unsigned __int128>(info.bytes) * 8, "shape and dtype give the bytes");
  std::vector<uint8_t> bytes(info.bytes);
  Require(file.Read(info, 0, bytes).ok(), "a tensor can be read");
  Require(std::equal(bytes.begin(), bytes.end(), input.begin() + info.begin), "a read gives the file's bytes");
  Require(file.Read(info, info.bytes, {}).ok(), "nothing can be read at the end");
  uint8_t one = 0;
  for (const uint64_t offset : {info.bytes, info.bytes + 1, UINT64_MAX}) {
    Require(absl::IsOutOfRange(file.Read(info, offset, {&one, 1})), "a read beyond a tensor is refused");
  }
}

// Half of the file is gone: reads of what is left work, others are told.
void CheckShortened(const SafetensorsFile& file, const TensorInfo& info, size_t left) {
  std::vector<uint8_t> bytes(info.bytes);
  const absl::Status status = file.Read(info, 0, bytes);
  const bool there = info.bytes == 0 || info.begin + info.bytes <= left;
  Require(there ? status.ok() : absl::IsDataLoss(status), "a file that became shorter is data loss");
}

void Run(Bytes input) {
  MemoryFolder folder;
  folder.Add(kName, input);
  const auto file = SafetensorsFile::Open(MemoryFolder::Path(kName));
  if (!file.ok()) {
    Require(absl::IsInvalidArgument(file.status()), "bytes that are no safetensors file are an invalid argument");
    return;
  }
  const auto metadata = (*file)->ReadMetadata();
  Require(metadata.ok() || absl::IsInvalidArgument(metadata.status()), "metadata is read, or is too much");
  uint64_t bytes = 0;
  for (const auto& [name, info] : (*file)->tensors()) {
    Require((*file)->Find(name) == &info, "a tensor is found by its name");
    CheckTensor(**file, info, input);
    bytes += info.bytes;
  }
  Require(bytes <= input.size() - 8, "no byte belongs to two tensors");
  folder.Shorten(kName, input.size() / 2);
  for (const auto& [name, info] : (*file)->tensors()) CheckShortened(**file, info, input.size() / 2);
  Require(absl::IsInvalidArgument(SafetensorsFile::Open(MemoryFolder::Path(kName)).status()), "half of a file is refused");
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
