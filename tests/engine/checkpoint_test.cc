// Checkpoint directories: single files, indexed shards, strays, and indexes that lie.
#include "engine/checkpoint.h"

#include <catch2/catch.hpp>

#include <cstdio>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::AddModel;
using testing::CheckpointBuilder;
using testing::ModelSpec;
using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;
using Catch::Matchers::Contains;

constexpr char kIndex[] = "model.safetensors.index.json";

std::vector<uint8_t> ReadAll(const TensorRef& tensor) {
  std::vector<uint8_t> bytes(tensor.info->bytes);
  REQUIRE(tensor.file->Read(*tensor.info, 0, bytes).ok());
  return bytes;
}

void CheckError(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  CHECK(status.code() == code);
  CHECK_THAT(std::string(status.message()), Contains(text));
}

// Three one-byte tensors a, b, c.
CheckpointBuilder Small() {
  CheckpointBuilder builder;
  for (const char* name : {"a", "b", "c"}) builder.Add(name, StDtype::kU8, {1}, {static_cast<uint8_t>(name[0])});
  return builder;
}

std::string IndexOf(const std::string& map) {
  return absl::StrCat("{\"metadata\":{\"total_size\":1.5},\"weight_map\":{", map, "}}");
}

// Opens a directory that holds x.safetensors and y.safetensors (both a, b, c as in Small) and this index.
absl::Status OpenWithIndex(const std::string& index) {
  TempDir dir;
  REQUIRE(Small().Write(dir.path()).ok());
  std::filesystem::copy(dir.File("model.safetensors"), dir.File("x.safetensors"));
  std::filesystem::rename(dir.File("model.safetensors"), dir.File("y.safetensors"));
  WriteFile(dir.File(kIndex), index);
  return Checkpoint::Open(dir.path()).status();
}

}  // namespace

TEST_CASE("One file and many shards of the same model give the same tensors") {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(ModelSpec{.hidden = 32, .intermediate = 32}, &builder);
  const std::string single = dir.MakeDir("single");
  const std::string sharded = dir.MakeDir("sharded");
  REQUIRE(builder.Write(single).ok());
  REQUIRE(builder.Write(sharded, 3).ok());
  const auto one = Checkpoint::Open(single);
  const auto many = Checkpoint::Open(sharded);
  REQUIRE(one.ok());
  REQUIRE(many.ok());
  CHECK((*one)->path() == single);
  CHECK((*one)->warnings().empty());
  CHECK((*many)->warnings().empty());
  CHECK((*one)->tensors().size() == builder.tensors().size());
  CHECK((*many)->tensors().size() == builder.tensors().size());
  for (const auto& tensor : builder.tensors()) {
    CAPTURE(tensor.name);
    REQUIRE((*one)->Find(tensor.name));
    REQUIRE((*many)->Find(tensor.name));
    CHECK(ReadAll((*one)->Find(tensor.name)) == tensor.bytes);
    CHECK(ReadAll((*many)->Find(tensor.name)) == tensor.bytes);
  }
  CHECK_FALSE((*one)->Find("absent"));
}

TEST_CASE("B30: a missing shard, a lacking tensor and a stray file") {
  TempDir dir;
  CheckpointBuilder builder;
  AddModel(ModelSpec{.hidden = 32, .intermediate = 32, .num_experts = 8}, &builder);
  REQUIRE(builder.Write(dir.path(), 2).ok());

  SECTION("a deleted shard is named") {
    std::filesystem::remove(dir.File("model-00002-of-00002.safetensors"));
    CheckError(Checkpoint::Open(dir.path()).status(), absl::StatusCode::kNotFound, "model-00002-of-00002.safetensors");
  }
  SECTION("tensors that their shard lacks are counted and the first ten named") {
    std::string map = ReadFile(dir.File(kIndex));
    std::string extra;
    for (int i = 10; i < 22; ++i) absl::StrAppend(&extra, "\"ghost.", i, "\":\"model-00001-of-00002.safetensors\",");
    const std::string key = "\"weight_map\": {";
    map.insert(map.find(key) + key.size(), extra);
    WriteFile(dir.File(kIndex), map);
    const absl::Status status = Checkpoint::Open(dir.path()).status();
    CheckError(status, absl::StatusCode::kInvalidArgument, "12: ghost.10 (model-00001-of-00002.safetensors)");
    CHECK_THAT(std::string(status.message()), Contains("ghost.19") && !Contains("ghost.20"));
  }
  SECTION("a model.safetensors that the index does not map is ignored with a warning") {
    CheckpointBuilder zeros;
    for (const auto& tensor : builder.tensors()) {
      zeros.Add(tensor.name, tensor.dtype, tensor.shape, std::vector<uint8_t>(tensor.bytes.size()));
    }
    REQUIRE(zeros.Write(dir.path()).ok());
    const auto checkpoint = Checkpoint::Open(dir.path());
    REQUIRE(checkpoint.ok());
    REQUIRE((*checkpoint)->warnings().size() == 1);
    CHECK_THAT((*checkpoint)->warnings()[0], Contains("/model.safetensors: ignored"));
    for (const auto& tensor : builder.tensors()) CHECK(ReadAll((*checkpoint)->Find(tensor.name)) == tensor.bytes);
  }
  SECTION("a damaged shard is named") {
    const std::string path = dir.File("model-00001-of-00002.safetensors");
    std::filesystem::resize_file(path, std::filesystem::file_size(path) - 1);
    CheckError(Checkpoint::Open(dir.path()).status(), absl::StatusCode::kInvalidArgument, path);
  }
  SECTION("a damaged stray is not even opened") {
    WriteFile(dir.File("consolidated.safetensors"), "garbage");
    const auto checkpoint = Checkpoint::Open(dir.path());
    REQUIRE(checkpoint.ok());
    CHECK((*checkpoint)->warnings().size() == 1);
  }
}

TEST_CASE("An index that maps to model.safetensors is normal") {
  TempDir dir;
  REQUIRE(Small().Write(dir.path()).ok());
  WriteFile(dir.File(kIndex), IndexOf("\"a\":\"model.safetensors\",\"c\":\"model.safetensors\""));
  const auto checkpoint = Checkpoint::Open(dir.path());
  REQUIRE(checkpoint.ok());
  CHECK((*checkpoint)->tensors().size() == 2);
  CHECK_FALSE((*checkpoint)->Find("b"));
  REQUIRE((*checkpoint)->warnings().size() == 1);
  CHECK_THAT((*checkpoint)->warnings()[0], Contains("ignored 1 tensors"));
}

TEST_CASE("Further files beside a single one are strays") {
  TempDir dir;
  REQUIRE(Small().Write(dir.path()).ok());
  std::filesystem::copy(dir.File("model.safetensors"), dir.File("mtp.safetensors"));
  const auto checkpoint = Checkpoint::Open(dir.path());
  REQUIRE(checkpoint.ok());
  CHECK((*checkpoint)->tensors().size() == 3);
  REQUIRE((*checkpoint)->warnings().size() == 1);
  CHECK_THAT((*checkpoint)->warnings()[0], Contains("mtp.safetensors"));
}

TEST_CASE("A name in two mapped places is refused") {
  CheckError(OpenWithIndex(IndexOf("\"a\":\"x.safetensors\",\"a\":\"y.safetensors\"")), absl::StatusCode::kInvalidArgument,
             "tensor \"a\" twice");
  CheckError(OpenWithIndex(IndexOf("\"a\":\"x.safetensors\",\"\\u0061\":\"x.safetensors\"")),
             absl::StatusCode::kInvalidArgument, "tensor \"a\" twice");
  CheckError(OpenWithIndex(IndexOf("\"a\":\"x.safetensors\",\"b\":\"y.safetensors\"")), absl::StatusCode::kInvalidArgument,
             "tensors in two mapped files, 2: a (");
}

TEST_CASE("File names of the index stay in the directory") {
  for (const char* name :
       {"../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "a..b", "sub\\\\x", "x.safetensors\\u0000"}) {
    CAPTURE(name);
    CheckError(OpenWithIndex(IndexOf(absl::StrCat("\"a\":\"", name, "\""))), absl::StatusCode::kInvalidArgument,
               "same directory");
  }
}

TEST_CASE("An index that is not as specified is refused") {
  for (const char* index : {"",
                            "{",
                            "null",
                            "[]",
                            "7",
                            "\"weight_map\"",
                            "{}",
                            "{\"weight_map\":null}",
                            "{\"weight_map\":[]}",
                            "{\"weight_map\":\"x.safetensors\"}",
                            "{\"weight_map\":3}",
                            "{\"weight_map\":{}}",
                            "{\"weight_map\":{\"a\":1}}",
                            "{\"weight_map\":{\"a\":null}}",
                            "{\"weight_map\":{\"a\":[\"x.safetensors\"]}}",
                            "{\"weight_map\":{\"a\":{\"b\":\"x.safetensors\"}}}",
                            "{\"metadata\":{\"weight_map\":{\"a\":\"x.safetensors\"}}}",
                            "{\"weight_map\":{\"a\":\"x.safetensors\"},\"weight_map\":{\"b\":\"x.safetensors\"}}",
                            "{\"weight_map\":{\"a\":\"x.safetensors\"}} trailing",
                            "{\"weight_map\":{\"a\":\"x.safetensors\"}",
                            "{\"weight_map\":{\"\xFF\":\"x.safetensors\"}}",
                            "{\"metadata\":{\"total_size\":1e999},\"weight_map\":{\"a\":\"x.safetensors\"}}"}) {
    CAPTURE(index);
    CheckError(OpenWithIndex(index), absl::StatusCode::kInvalidArgument, kIndex);
  }
  CHECK(OpenWithIndex("{\"weight_map\":{\"a\":\"x.safetensors\"},\"more\":[{\"weight_map\":[1]}]}").ok());
  // Depth is no recursion.
  CheckError(OpenWithIndex(absl::StrCat("{\"metadata\":", std::string(1000000, '['))), absl::StatusCode::kInvalidArgument,
             kIndex);
}

TEST_CASE("What is no checkpoint says what is missing") {
  TempDir dir;
  CheckError(Checkpoint::Open(dir.File("absent")).status(), absl::StatusCode::kNotFound, dir.File("absent"));
  CheckError(Checkpoint::Open(dir.path()).status(), absl::StatusCode::kNotFound, "model.safetensors");
  WriteFile(dir.File("file"), "x");
  CheckError(Checkpoint::Open(dir.File("file")).status(), absl::StatusCode::kInvalidArgument, "not a directory");
  REQUIRE(Small().Write(dir.path(), 2).ok());
  std::filesystem::remove(dir.File(kIndex));
  CheckError(Checkpoint::Open(dir.path()).status(), absl::StatusCode::kNotFound, "2 other .safetensors files");
}

TEST_CASE("Shards may be symbolic links, as in a download cache") {
  TempDir dir;
  REQUIRE(Small().Write(dir.MakeDir("blobs")).ok());
  const std::string model = dir.MakeDir("model");
  std::filesystem::create_symlink("../blobs/model.safetensors", model + "/model.safetensors");
  CHECK(Checkpoint::Open(model).ok());
  std::filesystem::remove(dir.File("blobs/model.safetensors"));
  CheckError(Checkpoint::Open(model).status(), absl::StatusCode::kNotFound, "model.safetensors");
}

}  // namespace moed
