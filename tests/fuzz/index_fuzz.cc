// Fuzz target: a sharded checkpoint, "model.safetensors.index.json NUL bytes of the first shard". The second shard is
// fixed and holds the tensors "b" (U8 [4]) and "c" (U8 [0]); a third one lies there that no index should name.
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "tests/fuzz/memory_folder.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr char kHeader[] = R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                           R"("c":{"dtype":"U8","shape":[0],"data_offsets":[4,4]}})";

std::string FixedShard() {
  constexpr size_t length = sizeof(kHeader) - 1;
  std::string bytes(8, '\0');
  bytes[0] = static_cast<char>(length);
  static_assert(length < 128);
  return bytes + kHeader + "data";
}

Bytes BytesOf(const std::string& text) { return {reinterpret_cast<const uint8_t*>(text.data()), text.size()}; }

void CheckTensor(const Checkpoint& checkpoint, const std::string& name, const TensorRef& tensor) {
  Require(tensor.file != nullptr && tensor.file->Find(name) == tensor.info, "a tensor is in the file that the table says");
  Require(checkpoint.Find(name).info == tensor.info, "a tensor is found by its name");
  std::vector<uint8_t> bytes(tensor.info->bytes);
  Require(tensor.file->Read(*tensor.info, 0, bytes).ok(), "a tensor can be read");
  const std::string path = tensor.file->path();
  Require(path.rfind(std::string(MemoryFolder::kPath) + "/", 0) == 0, "only files of the folder are opened");
}

void Run(Bytes input) {
  static const std::string fixed = FixedShard();
  Bytes shard;
  const Bytes index = TakePiece(input, &shard);
  MemoryFolder folder;
  folder.Add("model.safetensors.index.json", index);
  folder.Add("a.safetensors", shard);
  folder.Add("b.safetensors", BytesOf(fixed));
  folder.Add("stray.safetensors", BytesOf(fixed));
  const auto checkpoint = Checkpoint::Open(MemoryFolder::kPath);
  if (!checkpoint.ok()) {
    Require(absl::IsInvalidArgument(checkpoint.status()) || absl::IsNotFound(checkpoint.status()),
            "a bad index is an invalid argument, a missing shard is not found");
    return;
  }
  Require(!(*checkpoint)->tensors().empty(), "a checkpoint has tensors");
  for (const auto& [name, tensor] : (*checkpoint)->tensors()) CheckTensor(**checkpoint, std::string(name), tensor);
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
