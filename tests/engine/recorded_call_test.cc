// Recordings: what is written is read back, whatever the call's kind, and files that are none are refused with their names.
#include "engine/recorded_call.h"

#include <catch2/catch.hpp>

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <functional>

#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;
using Catch::Matchers::Contains;

RecordedCall Call() {
  RecordedCall call;
  call.model = "m";
  call.layer = 3;
  call.rows = 2;
  call.columns = 4;
  call.hidden.assign(16, 0x3c);
  call.routing = RecordedCall::Routing::kIds;
  call.top_k = 2;
  call.ids = {0, 1, -1, 2};
  call.weights = {0.5f, 0.5f, 0.25f, 1.0f};
  call.output.assign(16, 0x40);
  call.backend = "cpu_avx2";
  call.scheme = "int4 g32";
  call.generation = 7;
  call.weights_id = 0x0123456789abcdef, call.layer_weights_id = 0xfedc;
  call.end_expert = 8;
  call.deterministic = true;
  call.version = "0.1.0";
  call.request_id = "call \"1\"\n";
  call.transport = "ring";
  call.time = "2026-01-01T00:00:00.000000Z";
  call.receive_us = 1, call.queue_us = 2, call.compute_us = 3, call.batch_rows = 9;
  return call;
}

void CheckSame(const RecordedCall& got, const RecordedCall& want) {
  CHECK(got.model == want.model);
  CHECK(got.layer == want.layer);
  CHECK(got.hidden_dtype == want.hidden_dtype);
  CHECK((got.rows == want.rows && got.columns == want.columns));
  CHECK(got.hidden == want.hidden);
  CHECK(got.scales == want.scales);
  CHECK(got.routing == want.routing);
  CHECK((got.top_k == want.top_k && got.num_experts == want.num_experts));
  CHECK(got.ids == want.ids);
  CHECK(got.weights == want.weights);
  CHECK(got.logits == want.logits);
  CHECK((got.routed_only == want.routed_only && got.per_slot == want.per_slot));
  CHECK(got.output_dtype == want.output_dtype);
  CHECK(got.output == want.output);
  CHECK((got.backend == want.backend && got.scheme == want.scheme && got.generation == want.generation));
  CHECK((got.weights_id == want.weights_id && got.layer_weights_id == want.layer_weights_id));
  CHECK((got.first_expert == want.first_expert && got.end_expert == want.end_expert));
  CHECK((got.deterministic == want.deterministic && got.activations == want.activations && got.version == want.version));
  CHECK((got.request_id == want.request_id && got.transport == want.transport && got.time == want.time));
  CHECK((got.receive_us == want.receive_us && got.queue_us == want.queue_us && got.compute_us == want.compute_us));
  CHECK(got.batch_rows == want.batch_rows);
}

// Writes `call`, reads it, and looks at what is there.
void CheckRoundTrip(const RecordedCall& call) {
  TempDir dir;
  const std::string path = dir.File("a.safetensors");
  const absl::Status written = WriteRecordedCall(path, call);
  INFO(written.ToString());
  REQUIRE(written.ok());
  const absl::StatusOr<RecordedCall> read = ReadRecordedCall(path);
  INFO(read.status().ToString());
  REQUIRE(read.ok());
  CheckSame(*read, call);
  struct stat facts;
  REQUIRE(::stat(path.c_str(), &facts) == 0);
  CHECK((facts.st_mode & 0777) == 0600);
  CHECK(static_cast<uint64_t>(facts.st_size) < call.tensor_bytes() + kMostOfRecordedHeader);
}

// The error of reading `call` after `change` of the file's bytes.
std::string ErrorAfter(const std::function<void(std::string*)>& change) {
  TempDir dir;
  const std::string path = dir.File("bad.safetensors");
  REQUIRE(WriteRecordedCall(path, Call()).ok());
  std::string bytes = ReadFile(path);
  change(&bytes);
  WriteFile(path, bytes);
  const absl::Status status = ReadRecordedCall(path).status();
  CHECK(absl::IsInvalidArgument(status));
  CHECK_THAT(std::string(status.message()), Contains(path));
  return std::string(status.message());
}

void Replace(const std::string& from, const std::string& to, std::string* bytes) {
  REQUIRE(from.size() == to.size());
  const size_t at = bytes->find(from);
  REQUIRE(at != std::string::npos);
  bytes->replace(at, from.size(), to);
}

}  // namespace

TEST_CASE("A recorded call of every kind is read as it was written, from a file for its owner alone") {
  CheckRoundTrip(Call());
  RecordedCall packed = Call();
  packed.hidden_dtype = StDtype::kF8E4m3;
  packed.hidden.resize(8);
  packed.scales = {0.5f, 2.0f};
  CheckRoundTrip(packed);
  packed.hidden_dtype = StDtype::kI8;
  packed.per_slot = true;
  packed.output.assign(32, 1);
  CheckRoundTrip(packed);
  RecordedCall logits = Call();
  logits.routing = RecordedCall::Routing::kLogits;
  logits.top_k = 0, logits.ids.clear(), logits.weights.clear();
  logits.num_experts = 3, logits.logits = {1, 2, 3, 4, 5, 6};
  logits.output_dtype = StDtype::kF32, logits.output.assign(32, 0);
  CheckRoundTrip(logits);
  RecordedCall gate = logits;
  gate.routing = RecordedCall::Routing::kGate;
  gate.num_experts = 0, gate.logits.clear();
  gate.routed_only = true;
  CheckRoundTrip(gate);
  gate.rows = 0, gate.hidden.clear(), gate.output.clear();
  CheckRoundTrip(gate);
}

TEST_CASE("The longest texts fit into the promised header") {
  RecordedCall call = Call();
  call.model.assign(128, '"');
  call.request_id.assign(128, '\x01');
  call.scheme.assign(1000, 's');
  CheckRoundTrip(call);
}

TEST_CASE("A request id that is no UTF-8 is recorded with question marks") {
  TempDir dir;
  RecordedCall call = Call();
  call.request_id = "a\xff" "b\xc3\xa4";
  REQUIRE(WriteRecordedCall(dir.File("a"), call).ok());
  CHECK(ReadRecordedCall(dir.File("a"))->request_id == "a?b??");
  call.request_id = "\xc3\xa4";
  REQUIRE(WriteRecordedCall(dir.File("a"), call).ok());
  CHECK(ReadRecordedCall(dir.File("a"))->request_id == "\xc3\xa4");
}

TEST_CASE("Fields that contradict each other are not written") {
  TempDir dir;
  RecordedCall call = Call();
  call.output.pop_back();
  const absl::Status status = WriteRecordedCall(dir.File("a"), call);
  CHECK(absl::IsInvalidArgument(status));
  CHECK_THAT(std::string(status.message()), Contains("tensor output: wanted the bytes of BF16 [2, 4], got 15"));
}

TEST_CASE("A recording that does not say whose weights answered is read, with none") {
  TempDir dir;
  const std::string path = dir.File("old.safetensors");
  REQUIRE(WriteRecordedCall(path, Call()).ok());
  std::string bytes = ReadFile(path);
  Replace("\"weights_id\"", "\"weights_jd\"", &bytes);
  Replace("\"layer_weights_id\"", "\"layer_weights_jd\"", &bytes);
  WriteFile(path, bytes);
  const absl::StatusOr<RecordedCall> read = ReadRecordedCall(path);
  INFO(read.status().ToString());
  REQUIRE(read.ok());
  CHECK((read->weights_id == 0 && read->layer_weights_id == 0));
}

TEST_CASE("A file that is no recording is refused with its name and what is missing") {
  const auto after = [](const std::string& from, const std::string& to) {
    return ErrorAfter([&](std::string* bytes) { Replace(from, to, bytes); });
  };
  CHECK_THAT(ErrorAfter([](std::string* bytes) { bytes->resize(bytes->size() - 3); }), Contains("data area"));
  CHECK_THAT(after("call 1", "call 2"), Contains("metadata format: wanted"));
  CHECK_THAT(after("\"layer\":\"3\"", "\"later\":\"3\""), Contains("metadata layer"));
  CHECK_THAT(after("\"layer\":\"3\"", "\"layer\":\"x\""), Contains("whole number"));
  CHECK_THAT(after("0123456789abcdef", "0123456789ABCDEF"), Contains("metadata weights_id: wanted 16 hexadecimal digits"));
  CHECK_THAT(after("000000000000fedc", "00000000000fedc "), Contains("metadata layer_weights_id"));
  CHECK_THAT(after("\"ids\"", "\"idx\""), Contains("tensor ids"));
  CHECK_THAT(after("\"weights\":{\"dtype\":\"F32\"", "\"weights\":{\"dtype\":\"I32\""),
             Contains("tensor weights: wanted F32, got I32"));
  CHECK_THAT(after("\"per_slot\":\"false\"", "\"per_slot\":\"true\" "), Contains("tensor output: wanted [4, 4], got [2, 4]"));
  TempDir dir;
  auto writer = SafetensorsWriter::Create(dir.File("w"), {{"x", StDtype::kF32, {0}}}, {{"format", "pt"}});
  REQUIRE((*writer)->Finish().ok());
  CHECK_THAT(std::string(ReadRecordedCall(dir.File("w")).status().message()), Contains("moed recorded call") && Contains("\"pt\""));
}

TEST_CASE("No single changed byte of a recording's header crashes its reader") {
  TempDir dir;
  REQUIRE(WriteRecordedCall(dir.File("a"), Call()).ok());
  const std::string bytes = ReadFile(dir.File("a"));
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  for (size_t at = 0; at < 8 + header; ++at) {
    for (const char to : {'0', '9', '"', '[', '}'}) {
      std::string changed = bytes;
      changed[at] = to;
      WriteFile(dir.File("b"), changed);
      const absl::StatusOr<RecordedCall> read = ReadRecordedCall(dir.File("b"));
      if (read.ok()) CHECK(read->hidden.size() == 16);
    }
  }
}

TEST_CASE("A folder gives its recordings by name, without drafts, and one without any is refused") {
  TempDir dir;
  const std::string folder = dir.MakeDir("f"), empty = dir.MakeDir("empty");
  for (const char* name : {"b.safetensors", "a.safetensors", ".c.safetensors", "d.txt"}) WriteFile(folder + "/" + name, "");
  const auto found = FindRecordings({dir.File("f/d.txt"), folder});
  REQUIRE(found.ok());
  CHECK(*found == std::vector<std::string>{folder + "/d.txt", folder + "/a.safetensors", folder + "/b.safetensors"});
  for (const std::string& path : {empty, dir.File("none")}) {
    const absl::Status status = FindRecordings({folder, path}).status();
    CHECK(absl::IsNotFound(status));
    CHECK_THAT(std::string(status.message()), Contains(path) && Contains("wanted"));
  }
}

}  // namespace moed
