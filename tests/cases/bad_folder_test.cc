// Folders that are none, files that are no files, and files that end early or change under the reader: refused by name,
// without waiting for a writer and without reading what is not there.
#include <catch2/catch.hpp>

#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/cases/bad_files.h"
#include "tests/support/case_calls.h"
#include "tests/support/skip.h"

namespace moed::testing {
namespace {

namespace fs = std::filesystem;

constexpr char kWeights[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";

// The sound model with one of its files replaced by what `put` makes in its place.
std::function<void(const TempDir&)> Replaced(const std::string& name,
                                             const std::function<void(const std::string& path)>& put, int shards = 1) {
  return [=](const TempDir& dir) {
    Model(SmallSpec(), {}, shards)(dir);
    fs::remove(dir.File(name));
    put(dir.File(name));
  };
}

void Fifo(const std::string& path) { REQUIRE(::mkfifo(path.c_str(), 0600) == 0); }
void Folder(const std::string& path) { fs::create_directory(path); }
void Loop(const std::string& path) { fs::create_symlink(fs::path(path).filename(), path); }
void Dangling(const std::string& path) { fs::create_symlink("nothing-here", path); }
void Device(const std::string& path) { fs::create_symlink("/dev/zero", path); }
void Nothing(const std::string&) {}

// Sets the tensor's shape to [elements] and gives it the bytes that this needs, as a hole at the end of the file: such a
// file takes no space on the disk, and its size is real.
void Inflate(const std::string& path, CheckpointBuilder* builder, const std::string& name, int64_t elements) {
  std::vector<SafetensorsWriter::Tensor> tensors;
  for (const BuilderTensor& tensor : builder->tensors()) {
    if (tensor.name != name) tensors.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  const BuilderTensor& target = *builder->Find(name);
  tensors.push_back({name, target.dtype, {elements}});
  auto writer = SafetensorsWriter::Create(path, tensors);
  REQUIRE(writer.ok());
  for (const BuilderTensor& tensor : builder->tensors()) {
    if (tensor.name != name) REQUIRE((*writer)->Append(tensor.bytes).ok());
  }
  writer->reset();
  const auto bits = static_cast<uint64_t>(StDtypeBits(target.dtype));
  REQUIRE(::truncate(path.c_str(), static_cast<off_t>(fs::file_size(path) + static_cast<uint64_t>(elements) * bits / 8)) ==
          0);
}

}  // namespace

TEST_CASE("What is no regular file is refused by name, at once") {
  const std::string shard = "model-00002-of-00002.safetensors";
  std::vector<BadFile> table = {{"no folder", [](const TempDir& dir) { fs::remove_all(dir.path()); }, {"config.json"}},
                                {"an empty folder", [](const TempDir&) {}, {"config.json"}}};
  const std::pair<std::string, std::function<void(const std::string&)>> things[] = {{"a pipe", Fifo},
                                                                                    {"a folder", Folder},
                                                                                    {"a link to itself", Loop},
                                                                                    {"a link to nothing", Dangling},
                                                                                    {"a device", Device}};
  for (const auto& [what, put] : things) {
    for (const std::string& name : {std::string("config.json"), std::string(kWeights)}) {
      table.push_back({absl::StrCat(what, " called ", name), Replaced(name, put), {name}});
    }
    for (const std::string& name : {std::string(kIndex), shard}) {
      table.push_back({absl::StrCat(what, " called ", name), Replaced(name, put, 2), {name}});
    }
  }
  table.push_back({"no weights", Replaced(kWeights, Nothing), {kWeights}});
  table.push_back({"no shard", Replaced(shard, Nothing, 2), {shard}});
  CheckRefused(table);
}

TEST_CASE("A folder beside the model that is called like weights changes nothing") {
  TempDir dir;
  Model(SmallSpec())(dir);
  Folder(dir.File("other.safetensors"));
  Fifo(dir.File("pipe.safetensors"));
  Loop(dir.File("loop.safetensors"));
  const LoadOutcome outcome = LoadInChild(dir.path());
  INFO(outcome.trouble << outcome.error);
  CHECK(outcome.ok);
}

TEST_CASE("A file that may not be read is refused by name") {
  if (::geteuid() == 0) return Skip("runs as root, who may read every file");
  for (const std::string& name : {std::string("config.json"), std::string(kWeights)}) {
    CheckRefused({"unreadable " + name,
                  [&](const TempDir& dir) {
                    Model(SmallSpec())(dir);
                    REQUIRE(::chmod(dir.File(name).c_str(), 0) == 0);
                  },
                  {name}});
  }
}

TEST_CASE("A file cut before it is opened is refused by name, wherever it is cut") {
  TempDir whole;
  Model(SmallSpec())(whole);
  const std::string bytes = ReadFile(whole.File(kWeights));
  for (size_t size : {size_t{0}, size_t{8}, size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    CheckRefused({absl::StrCat("cut to ", size, " of ", bytes.size()),
                  [&](const TempDir& dir) {
                    Model(SmallSpec())(dir);
                    WriteFile(dir.File(kWeights), bytes.substr(0, size));
                  },
                  {kWeights}});
  }
  CheckRefused({"one byte more",
                [&](const TempDir& dir) {
                  Model(SmallSpec())(dir);
                  WriteFile(dir.File(kWeights), bytes + "x");
                },
                {kWeights, "trailing"}});
}

TEST_CASE("A file that shrinks between planning and loading is an error with its name, for every scheme") {
  for (const CaseScheme& scheme : CaseSchemes()) {
    INFO(scheme.name);
    const CaseModel model(SpecOf(scheme, 4, 2, 256, 128), scheme);
    const std::string file = model.path() + "/" + kWeights;
    const auto size = static_cast<int64_t>(fs::file_size(file));
    for (int64_t cut : {int64_t{0}, size / 3, size - 1}) {
      const std::string bytes = ReadFile(file);
      const LoadOutcome outcome = LoadInChild(model.path(), {"--cut", file, std::to_string(cut)});
      INFO("cut to " << cut << " of " << size << ": " << outcome.trouble << outcome.error);
      REQUIRE(outcome.finished);
      CHECK_FALSE(outcome.ok);
      CHECK(outcome.error.find(kWeights) != std::string::npos);
      CHECK(outcome.error.find("shorter") != std::string::npos);
      if (!kAddressSanitizer) CHECK(outcome.peak < kRefusalBytes);
      WriteFile(file, bytes);
    }
  }
}

// Whatever a tensor is for, its size is compared with what the layer needs before its bytes are asked for.
TEST_CASE(
    "Each tensor of an expert, blown up to 2^34 elements that are really there, costs nothing and is refused by name, for "
    "every scheme") {
  const std::string module = "model.layers.0.mlp.experts.1.up_proj";
  const std::vector<std::string> optional = {".g_idx", ".weight_zero_point", ".input_scale", ".input_zero_point",
                                             ".weight_shape"};
  for (const CaseScheme& scheme : CaseSchemes()) {
    CheckpointBuilder builder;
    AddModel(SpecOf(scheme, 2, 1, 128, 128), &builder);
    if (scheme.input_levels > 0.0f) SetInputScales(&builder, [](int, int) { return 1.0f; });
    std::vector<std::string> names = {"model.layers.0.mlp.gate.weight"};
    for (const BuilderTensor& tensor : builder.tensors()) {
      if (tensor.name.rfind(module, 0) == 0) names.push_back(tensor.name);
    }
    REQUIRE(names.size() >= 2);
    for (const std::string& suffix : optional) {
      if (builder.Find(module + suffix) == nullptr) names.push_back(module + suffix);
    }
    for (const std::string& name : names) {
      CheckpointBuilder blown = builder;
      if (blown.Find(name) == nullptr) blown.AddInt32(name, {1}, std::vector<int32_t>{0});
      TempDir dir;
      WriteFile(dir.File("config.json"), blown.GetFile("config.json"));
      Inflate(dir.File(kWeights), &blown, name, int64_t{1} << 34);
      const LoadOutcome outcome = LoadInChild(dir.path());
      INFO(scheme.name << ", " << name << ": " << outcome.trouble << outcome.error);
      REQUIRE(outcome.finished);
      if (!kAddressSanitizer) CHECK(outcome.peak < kRefusalBytes);
      // Static scales of activations that are not quantized are known and never read.
      if (outcome.ok && name.ends_with(".input_scale") && scheme.input_levels == 0.0f) continue;
      CHECK_FALSE(outcome.ok);
      CHECK(outcome.error.find(name.substr(0, name.rfind('.'))) != std::string::npos);
    }
  }
}

}  // namespace moed::testing
