// The container's writer against its reader.
#include "engine/safetensors.h"

#include <catch2/catch.hpp>

#include <sys/stat.h>

#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;
using Catch::Matchers::Contains;

// Refused as INVALID_ARGUMENT with `text` in the message.
void CheckRefused(const absl::Status& status, const std::string& text) {
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Contains(text));
}

}  // namespace

TEST_CASE("What the writer writes the reader reads, and the header is the same each time") {
  TempDir dir;
  const std::vector<SafetensorsWriter::Tensor> tensors = {{"z \"quoted\" \\ \n\x01 \xC3\xA4", StDtype::kU8, {3}},
                                                          {"scalar", StDtype::kF32, {}},
                                                          {"empty", StDtype::kBf16, {0, 4}},
                                                          {"fp4", StDtype::kF4, {2, 6}}};
  std::string first;
  for (int round = 0; round < 2; ++round) {
    const std::string path = dir.File(absl::StrCat("w", round));
    auto writer = SafetensorsWriter::Create(path, tensors, {{"format", "pt"}, {"note", "\"q\""}});
    REQUIRE(writer.ok());
    const std::vector<uint8_t> data = {1, 2, 3, 0, 0, 0x20, 0x40, 9, 8, 7, 6, 5, 4};
    CHECK((*writer)->Append(std::span(data).first(2)).ok());
    CHECK((*writer)->Append(std::span(data).subspan(2)).ok());
    REQUIRE((*writer)->Finish().ok());
    if (round == 0) first = ReadFile(path);
    CHECK(ReadFile(path) == first);
  }
  uint64_t header = 0;
  std::memcpy(&header, first.data(), 8);
  CHECK(header % 8 == 0);
  CHECK(first.size() == 8 + header + 13);

  const auto file = SafetensorsFile::Open(dir.File("w0"));
  REQUIRE(file.ok());
  for (const SafetensorsWriter::Tensor& tensor : tensors) {
    CAPTURE(tensor.name);
    const TensorInfo* info = (*file)->Find(tensor.name);
    REQUIRE(info != nullptr);
    CHECK(info->dtype == tensor.dtype);
    CHECK(info->shape == tensor.shape);
  }
  std::vector<uint8_t> scalar(4);
  REQUIRE((*file)->Read(*(*file)->Find("scalar"), 0, scalar).ok());
  CHECK(scalar == std::vector<uint8_t>{0, 0, 0x20, 0x40});
}

TEST_CASE("Metadata is read back as it was written, and more than its limit is refused") {
  TempDir dir;
  const std::string path = dir.File("w");
  const auto read = [&path](const std::vector<std::pair<std::string, std::string>>& metadata) {
    auto writer = SafetensorsWriter::Create(path, {{"a", StDtype::kU8, {0}}}, metadata);
    REQUIRE(writer.ok());
    REQUIRE((*writer)->Finish().ok());
    const auto file = SafetensorsFile::Open(path);
    REQUIRE(file.ok());
    return (*file)->ReadMetadata();
  };
  const std::map<std::string, std::string> none, some = {{"k \"1\"", "v\n\x01 \xC3\xA4"}, {"empty", ""}};
  CHECK(*read({}) == none);
  CHECK(*read({some.begin(), some.end()}) == some);
  CHECK(read({{"k", std::string(65535, 'x')}}).ok());
  for (const std::string& value : {std::string(65536, 'x'), std::string(1 << 20, 'x')}) {
    const auto metadata = read({{"k", value}});
    CheckRefused(metadata.status(), path);
    CheckRefused(metadata.status(), "65536 bytes");
  }
}

TEST_CASE("A new file has the mode that its writer asks for") {
  TempDir dir;
  REQUIRE(SafetensorsWriter::Create(dir.File("w"), {}, {}, 0600).ok());
  struct stat facts;
  REQUIRE(::stat(dir.File("w").c_str(), &facts) == 0);
  CHECK((facts.st_mode & 0777) == 0600);
}

TEST_CASE("The writer refuses what the reader would refuse") {
  TempDir dir;
  const std::string path = dir.File("w");
  const auto create = [&path](const std::vector<SafetensorsWriter::Tensor>& tensors) {
    return SafetensorsWriter::Create(path, tensors).status();
  };
  CheckRefused(create({{"a", StDtype::kU8, {1}}, {"a", StDtype::kU8, {1}}}), "twice");
  CheckRefused(create({{"__metadata__", StDtype::kU8, {1}}}), "__metadata__");
  CheckRefused(create({{"\xFF", StDtype::kU8, {1}}}), "UTF-8");
  CheckRefused(create({{"a", StDtype::kU8, {-1}}}), "negative");
  CheckRefused(create({{"a", StDtype::kF32, {int64_t{1} << 40, int64_t{1} << 40}}}), "overflows");
  CheckRefused(create({{"a", StDtype::kF4, {3}}}), "even");
  CheckRefused(create({{"a", StDtype::kU8, {int64_t{1} << 59}}, {"b", StDtype::kU8, std::vector<int64_t>(9, 1)}}),
               "dimensions");
  CheckRefused(SafetensorsWriter::Create(path, {}, {{"k", "1"}, {"k", "2"}}).status(), "twice");
  CHECK(SafetensorsWriter::Create(dir.File("no/such/dir"), {}).status().code() == absl::StatusCode::kNotFound);
  CHECK_THAT(std::string(SafetensorsWriter::Create(dir.File("no/such/dir"), {}).status().message()),
             Contains("no/such/dir"));
}

TEST_CASE("The writer counts bytes and its errors name the path") {
  TempDir dir;
  const std::string path = dir.File("w");
  auto writer = SafetensorsWriter::Create(path, {{"a", StDtype::kU8, {4}}});
  REQUIRE(writer.ok());
  const std::vector<uint8_t> five(5);
  const absl::Status more = (*writer)->Append(five);
  CHECK(more.code() == absl::StatusCode::kOutOfRange);
  CHECK_THAT(std::string(more.message()), Contains(path));
  const absl::Status early = (*writer)->Finish();
  CHECK(early.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(early.message()), Contains("4 bytes"));
  CHECK((*writer)->Append(std::span(five).first(4)).ok());
  CHECK((*writer)->Finish().ok());
  CHECK((*writer)->Finish().code() == absl::StatusCode::kFailedPrecondition);
  CHECK((*writer)->Append({}).code() == absl::StatusCode::kFailedPrecondition);
  CHECK(SafetensorsFile::Open(path).ok());
}

TEST_CASE("An unfinished file does not open") {
  TempDir dir;
  const std::string path = dir.File("w");
  {
    auto writer = SafetensorsWriter::Create(path, {{"a", StDtype::kU8, {4}}});
    REQUIRE(writer.ok());
  }
  CheckRefused(SafetensorsFile::Open(path).status(), "\"a\"");
}

}  // namespace moed
