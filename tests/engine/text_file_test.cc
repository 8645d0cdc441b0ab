// Small text files within limits, and JSON texts that would take much more memory than they have bytes.
#include <catch2/catch.hpp>

#include <sys/stat.h>

#include "engine/json_text.h"
#include "engine/text_file.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::TempDir;

void CheckError(const absl::Status& status, absl::StatusCode code, const std::string& text) {
  INFO(status.ToString());
  CHECK(status.code() == code);
  CHECK(std::string(status.message()).find(text) != std::string::npos);
}

std::string ErrorOf(const std::string& text) { return std::string(ParseJson(text, "t").status().message()); }

}  // namespace

TEST_CASE("Text files are read up to a limit") {
  TempDir dir;
  const std::string text = std::string(100000, 'x') + std::string(1, '\0') + "end";
  testing::WriteFile(dir.File("t"), text);
  const auto read = ReadTextFile(dir.File("t"), text.size());
  REQUIRE(read.ok());
  CHECK(*read == text);
  CheckError(ReadTextFile(dir.File("t"), text.size() - 1).status(), absl::StatusCode::kInvalidArgument, "at most");
  CheckError(ReadTextFile(dir.File("none"), 10).status(), absl::StatusCode::kNotFound, "none");
  CheckError(ReadTextFile(dir.path(), 10).status(), absl::StatusCode::kInvalidArgument, "regular");
  REQUIRE(::mkfifo(dir.File("pipe").c_str(), 0600) == 0);
  CheckError(ReadTextFile(dir.File("pipe"), 10).status(), absl::StatusCode::kInvalidArgument, "regular");
}

TEST_CASE("A file that grows while it is read ends with an error at the limit") {
  TempDir dir;
  testing::WriteFile(dir.File("t"), "12345");
  const auto stream = TextStream::Open(dir.File("t"), 8);
  REQUIRE(stream.ok());
  testing::WriteFile(dir.File("t"), "1234567890");
  char c = 0;
  while ((*stream)->Next(&c)) {
  }
  CheckError((*stream)->status(), absl::StatusCode::kInvalidArgument, "at most 8");
}

TEST_CASE("A token of 2^20 characters is read and a longer one is not, wherever it is") {
  const size_t longest = TokenGauge::kLongest - 2;  // with its quotes
  CHECK(ErrorOf("{\"a\": \"" + std::string(longest, 'x') + "\"}").empty());
  CHECK(ErrorOf("{\"" + std::string(longest, 'x') + "\": 1}").empty());
  for (const std::string& token : {"\"" + std::string(longest + 1, 'x') + "\"", std::string(TokenGauge::kLongest + 1, '1'),
                                   "\"" + std::string(longest + 1, ' ') + "\""}) {
    CHECK(ErrorOf("{\"a\": " + token + "}").find("longer than 1048576") != std::string::npos);
    CHECK(ErrorOf("{\"a\": [1, " + token + "]}").find("longer than 1048576") != std::string::npos);
  }
  // A quote behind a backslash ends no text, one behind two does: many short texts are no long one.
  std::string many = "{\"a\": [\"\\\"\"";
  for (int i = 0; i < 60000; ++i) many += ", \"x\\\\\", \"\\\"1234567890\"";
  CHECK(ErrorOf(many + "]}").empty());
}

TEST_CASE("A text with more values than memory is meant for them is refused") {
  const auto list = [](const std::string& value, size_t count) {
    std::string text = "{\"a\": [" + value;
    for (size_t i = 1; i < count; ++i) text += "," + value;
    return text + "]}";
  };
  for (const char* value : {"0", "[]", "{}", "\"\"", "null", "1.5", "true"}) {
    CAPTURE(value);
    CHECK(ErrorOf(list(value, 100000)).empty());
    CHECK(ErrorOf(list(value, 2500000)).find("bytes of memory") != std::string::npos);
  }
}

TEST_CASE("Settings of 50,000 modules, one by one, are no more than a config may hold") {
  std::string text = "{\"quantized_layers\": {\"lm_head\": {}";
  for (int i = 0; i < 50000; ++i) {
    const std::string module = "model.layers." + std::to_string(i / 768) + ".mlp.experts." + std::to_string(i % 768) + ".gate_proj";
    text += ", \"" + module + "\": {\"quant_algo\": \"NVFP4\", \"group_size\": 16}";
  }
  CHECK(ErrorOf(text + "}}").empty());
}

}  // namespace moed
