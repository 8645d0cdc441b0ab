// The recorder: which calls it takes, what is in their files, what it does when the disk is slow, full or broken, and what it
// counts.
#include "server/recorder.h"

#include <catch2/catch.hpp>

#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::ReadFile;
using testing::TempDir;
using testing::WriteFile;
using Catch::Matchers::Contains;

constexpr int64_t kHidden = 4;

std::chrono::system_clock::time_point Clock() {
  return std::chrono::system_clock::time_point(std::chrono::seconds(1'767'225'600) + std::chrono::microseconds(5));  // 2026-01-01
}

// A call of `rows` rows in bf16 with a float32 answer, and what it views.
struct Call {
  explicit Call(int64_t rows = 2) : hidden(static_cast<size_t>(rows * kHidden), 0x3f80), output(hidden.size(), 0.5f) {
    checked.model = "m";
    checked.call.layer = 3;
    checked.call.hidden = {hidden.data(), DType::kBf16, rows, kHidden};
    checked.output_dtype = DType::kF32;
    facts.name = "m";
    facts.first_expert = 1, facts.end_expert = 5;
    info.backend = "cpu_avx2";
    info.scheme = "int4 g32";
    info.generation = 7;
    info.compute_us = 30;
    info.batch_rows = 9;
  }
  std::shared_ptr<Recording> Sample(Recorder& recorder) { return recorder.Sample(checked, facts, "id", Transport::kRing); }
  void Answer(Recording& recording) const { recording.Complete(checked, output.data(), info, 10, 20); }
  // Whether it was sampled.
  bool Run(Recorder& recorder) {
    const std::shared_ptr<Recording> recording = Sample(recorder);
    if (recording != nullptr) Answer(*recording);
    return recording != nullptr;
  }

  std::vector<uint16_t> hidden;
  std::vector<float> output;
  CheckedForward checked;
  ModelFacts facts;
  ForwardInfo info;
};

std::shared_ptr<Recorder> Open(const std::string& folder, double rate, const std::function<void(Recorder::Options*)>& change = {},
                               Recorder::Write write = WriteRecordedCall) {
  Recorder::Options options;
  options.folder = folder;
  options.rate = rate;
  if (change) change(&options);
  absl::StatusOr<std::shared_ptr<Recorder>> recorder = Recorder::Open(std::move(options), Clock, std::move(write));
  INFO(recorder.status().ToString());
  REQUIRE(recorder.ok());
  return *std::move(recorder);
}

uint64_t Lost(const Recorder& recorder, RecordLoss loss) { return recorder.counts().lost[static_cast<size_t>(loss)]; }

// Of all reasons.
uint64_t AllLost(const Recorder& recorder) {
  uint64_t sum = 0;
  for (const uint64_t count : recorder.counts().lost) sum += count;
  return sum;
}

std::vector<std::string> Files(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().string());
  std::sort(names.begin(), names.end());
  return names;
}

RecordedCall Only(const std::string& folder) {
  const std::vector<std::string> files = Files(folder);
  REQUIRE(files.size() == 1);
  absl::StatusOr<RecordedCall> call = ReadRecordedCall(files[0]);
  INFO(call.status().ToString());
  REQUIRE(call.ok());
  return *std::move(call);
}

// A disk that writes when it is told to.
class SlowDisk {
 public:
  absl::Status Write(const std::string& path, const RecordedCall& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
    return WriteRecordedCall(path, call);
  }
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

template <typename T>
std::vector<uint8_t> Bytes(const std::vector<T>& values) {
  std::vector<uint8_t> bytes(values.size() * sizeof(T));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace

TEST_CASE("At rate 1 every call is recorded with all that it was and got, in files for the server's user alone") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) {
    options->deterministic = true;
    options->activations = "int8";
  });
  Call call;
  CHECK(call.Run(*recorder));
  recorder->Stop();
  const RecordedCall recorded = Only(dir.path());
  CHECK(recorded.model == "m");
  CHECK(recorded.layer == 3);
  CHECK(recorded.hidden_dtype == StDtype::kBf16);
  CHECK((recorded.rows == 2 && recorded.columns == kHidden));
  CHECK(recorded.hidden == Bytes(call.hidden));
  CHECK(recorded.routing == RecordedCall::Routing::kGate);
  CHECK(recorded.output_dtype == StDtype::kF32);
  CHECK(recorded.output == Bytes(call.output));
  CHECK((recorded.backend == "cpu_avx2" && recorded.scheme == "int4 g32" && recorded.generation == 7));
  CHECK((recorded.first_expert == 1 && recorded.end_expert == 5));
  CHECK((recorded.deterministic && recorded.activations == "int8"));
  CHECK((recorded.request_id == "id" && recorded.transport == "ring"));
  CHECK(recorded.time == "2026-01-01T00:00:00.000005Z");
  CHECK((recorded.receive_us == 10 && recorded.queue_us == 20 && recorded.compute_us == 30 && recorded.batch_rows == 9));
  const std::string path = Files(dir.path())[0];
  CHECK_THAT(path, Contains("20260101T000000.000005Z-000000.safetensors"));
  struct stat facts;
  REQUIRE(::stat(path.c_str(), &facts) == 0);
  CHECK((facts.st_mode & 0777) == 0600);
  CHECK(recorder->counts().recorded == 1);
  CHECK(recorder->counts().bytes == static_cast<uint64_t>(facts.st_size));
  CHECK(recorder->counts().folder_bytes == recorder->counts().bytes);
  CHECK(AllLost(*recorder) == 0);
}

TEST_CASE("Routings, codes of one byte with scales, and calls per slot are recorded as they came") {
  TempDir ids_dir, logits_dir, packed_dir;
  const std::vector<int32_t> ids = {0, -1, 2, 3};
  const std::vector<float> weights = {1, 2, 3, 4}, logits = {1, 2, 3, 4, 5, 6}, scales = {0.5f, 2.0f};
  Call by_ids;
  by_ids.checked.call.routing = RoutingByIds{2, ids, weights};
  by_ids.checked.call.routed_only = true;
  CHECK(by_ids.Run(*Open(ids_dir.path(), 1)));
  const RecordedCall one = Only(ids_dir.path());
  CHECK((one.routing == RecordedCall::Routing::kIds && one.top_k == 2 && one.routed_only));
  CHECK((one.ids == ids && one.weights == weights));

  Call by_logits;
  by_logits.checked.call.routing = RoutingByLogits{logits};
  CHECK(by_logits.Run(*Open(logits_dir.path(), 1)));
  const RecordedCall two = Only(logits_dir.path());
  CHECK((two.routing == RecordedCall::Routing::kLogits && two.num_experts == 3 && two.logits == logits));

  // Two rows of two slots: the call runs on four rows of bf16.
  Call packed(4);
  const std::vector<uint8_t> codes = {1, 2, 3, 4, 5, 6, 7, 8};
  packed.checked.rows_each = 2;
  packed.checked.packed = PackedHidden{PayloadCode::kI8, nullptr, {reinterpret_cast<const char*>(scales.data()), 8}};
  packed.checked.call.routing = RoutingByIds{1, ids, weights};
  {
    const auto recorder = Open(packed_dir.path(), 1);
    const auto recording = packed.Sample(*recorder);
    REQUIRE(recording != nullptr);
    REQUIRE(packed.checked.hidden_bytes() == codes.size());
    recording->KeepHidden(codes.data(), codes.size());
    packed.Answer(*recording);
  }
  const RecordedCall three = Only(packed_dir.path());
  CHECK((three.rows == 2 && three.per_slot && three.top_k == 2));
  CHECK(three.hidden_dtype == StDtype::kI8);
  CHECK(three.hidden == codes);
  CHECK(three.scales == scales);
  CHECK(three.ids == ids);
  CHECK(three.output == Bytes(packed.output));
}

TEST_CASE("At rate 0 nothing is recorded, at 0.25 a quarter of the calls, and the same ones each time") {
  TempDir one, other, none;
  const auto nothing = [](const std::string& path, const RecordedCall&) { return WriteFile(path, ""), absl::OkStatus(); };
  const auto all = [](Recorder::Options* options) { options->queue_calls = 1 << 20; };
  const auto never = Open(none.path(), 0), a = Open(one.path(), 0.25, all, nothing), b = Open(other.path(), 0.25, all, nothing);
  int sampled = 0, differ = 0;
  Call call;
  for (int i = 0; i < 4000; ++i) {
    CHECK_FALSE(call.Run(*never));
    const bool taken = call.Run(*a);
    sampled += taken;
    differ += taken != call.Run(*b);
  }
  CHECK(std::abs(sampled - 1000) <= 100);
  CHECK(differ == 0);
}

TEST_CASE("Calls that come in a period have all of its members sampled in their share") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 0.1, [](Recorder::Options* options) { options->queue_calls = 1 << 20; },
                             [](const std::string& path, const RecordedCall&) { return WriteFile(path, ""), absl::OkStatus(); });
  Call call;
  for (const int period : {8, 10, 48, 89, 94}) {
    std::vector<int> taken(static_cast<size_t>(period), 0);
    for (int i = 0; i < 200 * period; ++i) taken[static_cast<size_t>(i % period)] += call.Run(*recorder);
    CHECK(*std::min_element(taken.begin(), taken.end()) >= 5);  // 20 is the mean
    CHECK(*std::max_element(taken.begin(), taken.end()) <= 40);
  }
}

TEST_CASE("A call is lost, and counted, when as many calls or bytes as may wait for the disk do; none waits for it") {
  TempDir calls_dir, bytes_dir;
  for (const bool by_bytes : {false, true}) {
    SlowDisk disk;
    const auto recorder = Open(by_bytes ? bytes_dir.path() : calls_dir.path(), 1, [&](Recorder::Options* options) {
      if (by_bytes) options->queue_bytes = 3 * (2 * kHidden * (2 + 4));  // three calls of hidden states and output
      if (!by_bytes) options->queue_calls = 3;
    }, [&](const std::string& path, const RecordedCall& call) { return disk.Write(path, call); });
    Call call;
    int taken = 0;
    for (int i = 0; i < 5; ++i) taken += call.Run(*recorder);
    CHECK(taken == 3);
    CHECK(Lost(*recorder, RecordLoss::kQueue) == 2);
    disk.Open();
    recorder->Stop();
    CHECK(recorder->counts().recorded == 3);
    CHECK(AllLost(*recorder) == 2);
  }
}

TEST_CASE("Room that a failed call gave back can be used again") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) { options->queue_calls = 1; });
  Call call;
  auto recording = call.Sample(*recorder);
  CHECK(recording != nullptr);
  CHECK(call.Sample(*recorder) == nullptr);
  recording = nullptr;
  CHECK(Lost(*recorder, RecordLoss::kFailed) == 1);
  CHECK(Lost(*recorder, RecordLoss::kQueue) == 1);
  CHECK(call.Run(*recorder));
  recorder->Stop();
  CHECK(recorder->counts().recorded == 1);
}

TEST_CASE("Recording ends before the folder has more bytes than its limit, with what was there before counted") {
  TempDir dir;
  WriteFile(dir.File("other"), std::string(10000, 'x'));
  constexpr uint64_t kLimit = 40000;
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) { options->max_bytes = kLimit; });
  CHECK(recorder->counts().folder_bytes == 10000);
  Call call;
  while (recorder->counts().active) {
    if (!call.Run(*recorder)) std::this_thread::yield();
  }
  for (int i = 0; i < 3; ++i) CHECK_FALSE(call.Run(*recorder));
  recorder->Stop();
  CHECK(recorder->counts().recorded >= 1);
  CHECK(Lost(*recorder, RecordLoss::kLimit) >= 4);
  uint64_t bytes = 0;
  for (const std::string& file : Files(dir.path())) bytes += std::filesystem::file_size(file);
  CHECK(bytes == recorder->counts().folder_bytes);
  CHECK(bytes <= kLimit);
  CHECK(bytes + 2 * kMostOfRecordedHeader > kLimit);
}

TEST_CASE("A limit below one file records nothing") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) { options->max_bytes = 1; });
  Call call;
  CHECK(call.Run(*recorder));
  recorder->Stop();
  CHECK_FALSE(recorder->counts().active);
  CHECK(Files(dir.path()).empty());
}

TEST_CASE("An error of the disk loses one call, leaves no file, and recording goes on") {
  TempDir dir;
  int writes = 0;
  const auto recorder = Open(dir.path(), 1, {}, [&writes](const std::string& path, const RecordedCall& call) {
    if (++writes == 2) return WriteFile(path, "half of"), absl::DataLossError("the disk is on fire");
    return WriteRecordedCall(path, call);
  });
  Call call;
  for (int i = 0; i < 3; ++i) CHECK(call.Run(*recorder));
  recorder->Stop();
  CHECK(Lost(*recorder, RecordLoss::kDisk) == 1);
  CHECK(recorder->counts().recorded == 2);
  CHECK(Files(dir.path()).size() == 2);
  CHECK(recorder->counts().active);
}

TEST_CASE("A file that the system does not let grow is an error of the disk and not the end of the process") {
  TempDir dir;
  rlimit usual;
  REQUIRE(getrlimit(RLIMIT_FSIZE, &usual) == 0);
  rlimit small = usual;
  small.rlim_cur = 64 << 10;
  REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) { options->max_rows = 1 << 20; });
  Call large(64 << 10), call;
  const bool sampled = large.Run(*recorder) && call.Run(*recorder);
  recorder->Stop();
  REQUIRE(setrlimit(RLIMIT_FSIZE, &usual) == 0);
  CHECK(sampled);
  CHECK(Lost(*recorder, RecordLoss::kDisk) == 1);
  CHECK(recorder->counts().recorded == 1);
  CHECK(Only(dir.path()).rows == 2);
}

TEST_CASE("A folder that goes away loses calls and nothing else") {
  TempDir dir;
  const std::string folder = dir.MakeDir("gone");
  const auto recorder = Open(folder, 1);
  std::filesystem::remove_all(folder);
  Call call;
  CHECK(call.Run(*recorder));
  recorder->Stop();
  CHECK(Lost(*recorder, RecordLoss::kDisk) == 1);
}

TEST_CASE("Calls of more rows than the limit, and calls with tensors on a device, are passed over and counted") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 1, [](Recorder::Options* options) { options->max_rows = 4; });
  Call five(5), four(4), hidden, output, slots(8);
  slots.checked.rows_each = 2;  // four rows that came
  slots.checked.call.routing = RoutingByIds{1, {}, {}};
  hidden.checked.hidden_memory = SharedPlace();
  output.checked.output_memory = SharedPlace();
  CHECK_FALSE(five.Run(*recorder));
  CHECK_FALSE(hidden.Run(*recorder));
  CHECK_FALSE(output.Run(*recorder));
  CHECK(four.Run(*recorder));
  CHECK(slots.Sample(*recorder) != nullptr);
  recorder->Stop();
  CHECK(Lost(*recorder, RecordLoss::kRows) == 1);
  CHECK(Lost(*recorder, RecordLoss::kDevice) == 2);
  CHECK(recorder->counts().recorded == 1);
}

TEST_CASE("What waits is written at the end, and calls that come later are not recorded") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 1);
  Call call;
  for (int i = 0; i < 20; ++i) CHECK(call.Run(*recorder));
  recorder->Stop();
  CHECK(recorder->counts().recorded == 20);
  CHECK(Files(dir.path()).size() == 20);
  CHECK_FALSE(call.Run(*recorder));
}

TEST_CASE("From many threads at once every sampled call is recorded or counted as lost") {
  TempDir dir;
  const auto recorder = Open(dir.path(), 0.5, [](Recorder::Options* options) { options->queue_calls = 8; });
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&] {
      Call call;
      for (int i = 0; i < 100; ++i) call.Run(*recorder);
    });
  }
  for (std::thread& thread : threads) thread.join();
  recorder->Stop();
  CHECK(std::abs(static_cast<int>(recorder->counts().recorded + AllLost(*recorder)) - 200) <= 50);
  CHECK(Files(dir.path()).size() == recorder->counts().recorded);
  for (const std::string& file : Files(dir.path())) CHECK(ReadRecordedCall(file).ok());
}

TEST_CASE("Drafts of a server that was killed are removed at the next start, other files are left") {
  TempDir dir;
  WriteFile(dir.File(".20260101T000000.000000Z-000007.safetensors.draft"), "half");
  WriteFile(dir.File("notes.draft"), "mine");
  const auto recorder = Open(dir.path(), 1);
  CHECK(Files(dir.path()) == std::vector<std::string>{dir.File("notes.draft")});
  CHECK(recorder->counts().folder_bytes == 4);
}

TEST_CASE("A folder that cannot be recorded to is refused by name, and so is one where another server records") {
  TempDir dir;
  const auto error = [](const std::string& folder) {
    Recorder::Options options;
    options.folder = folder;
    const absl::Status opened = Recorder::Open(options, Clock).status();
    return opened;
  };
  WriteFile(dir.File("file"), "");
  for (const std::string& folder : {dir.File("none"), dir.File("file")}) {
    CHECK(absl::IsInvalidArgument(error(folder)));
    CHECK_THAT(std::string(error(folder).message()), Contains("--record: wanted a folder") && Contains(folder));
    CHECK(absl::IsInvalidArgument(CheckRecordFolder(folder)));
  }
  const auto recorder = Open(dir.path(), 1);
  CHECK(CheckRecordFolder(dir.path()).ok());
  CHECK(absl::IsUnavailable(error(dir.path())));
  CHECK_THAT(std::string(error(dir.path()).message()), Contains("another records"));
}

}  // namespace moed
