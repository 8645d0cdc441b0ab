// What is counted of forwards and runs, and how it is shown: without a server, by the families that a collection returns.
#include "server/metrics.h"

#include <catch2/catch.hpp>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace moed {
namespace {

using prometheus::ClientMetric;

const ObservedLayer kLayer = {"m", 3, 0, 8};

// One collection.
class Collected {
 public:
  explicit Collected(const Metrics& metrics) {
    for (prometheus::MetricFamily& family : metrics.Collect()) {
      INFO(family.name);
      CHECK(families_.count(family.name) == 0);
      families_[family.name] = std::move(family);
    }
  }
  bool Has(const std::string& name) const { return families_.count(name) > 0 && !families_.at(name).metric.empty(); }
  // The series with exactly these labels.
  const ClientMetric* Find(const std::string& name, const std::map<std::string, std::string>& labels) const {
    for (const ClientMetric& series : families_.at(name).metric) {
      std::map<std::string, std::string> have;
      for (const auto& label : series.label) have[label.name] = label.value;
      if (have == labels) return &series;
    }
    return nullptr;
  }
  // Its value; nothing when there is no such series.
  std::optional<double> Value(const std::string& name, const std::map<std::string, std::string>& labels = {}) const {
    const ClientMetric* series = Find(name, labels);
    if (series == nullptr) return std::nullopt;
    return families_.at(name).type == prometheus::MetricType::Counter ? series->counter.value : series->gauge.value;
  }
  const std::map<std::string, prometheus::MetricFamily>& families() const { return families_; }

 private:
  std::map<std::string, prometheus::MetricFamily> families_;
};

FinishedForward Answered(int64_t total_us) {
  FinishedForward forward;
  forward.rows = 4;
  forward.received_bytes = 1000;
  forward.sent_bytes = 500;
  forward.receive_us = 10;
  forward.queue_us = 20;
  forward.compute_us = 30;
  forward.send_us = 5;
  forward.total_us = total_us;
  return forward;
}

FinishedForward Failed(absl::StatusCode code, Drop drop = Drop::kNone) {
  FinishedForward forward;
  forward.code = code;
  forward.drop = drop;
  forward.received_bytes = 10;
  return forward;
}

void Run(LayerObserver& observer, int calls, const std::vector<int32_t>& ids) {
  const std::span<const int32_t> of_call(ids);
  FinishedRun run;
  run.calls = calls;
  run.rows = static_cast<int64_t>(ids.size()) / 2;
  run.compute_us = 100;
  run.ids = std::span(&of_call, 1);
  observer.Ran(run);
}

Metrics MakeMetrics(bool each_expert = false) {
  return Metrics(each_expert, [] { return ServerState{}; });
}

}  // namespace

TEST_CASE("Each end of a forward is counted by layer, transport and code, and bytes by transport") {
  Metrics metrics = MakeMetrics();
  const auto layer = metrics.OfLayer(kLayer);
  layer->Finished(Answered(100));
  FinishedForward ring = Answered(50);
  ring.transport = Transport::kRing;
  layer->Finished(ring);
  layer->Finished(ring);
  layer->Finished(Failed(absl::StatusCode::kInvalidArgument));
  const Collected collected(metrics);
  const auto count = [&](const std::string& transport, const std::string& code) {
    return collected.Value("moed_forwards_total", {{"model", "m"}, {"layer", "3"}, {"transport", transport}, {"code", code}});
  };
  CHECK(count("rpc", "OK") == 1);
  CHECK(count("ring", "OK") == 2);
  CHECK(count("rpc", "INVALID_ARGUMENT") == 1);
  CHECK_FALSE(count("session", "OK").has_value());
  CHECK(collected.Value("moed_received_bytes_total", {{"transport", "rpc"}}) == 1010);
  CHECK(collected.Value("moed_received_bytes_total", {{"transport", "ring"}}) == 2000);
  CHECK(collected.Value("moed_sent_bytes_total", {{"transport", "ring"}}) == 1000);
}

TEST_CASE("Times and rows are those of answered forwards only") {
  Metrics metrics = MakeMetrics();
  const auto layer = metrics.OfLayer(kLayer);
  layer->Finished(Answered(100));
  layer->Finished(Answered(3'000'000));
  layer->Finished(Failed(absl::StatusCode::kDeadlineExceeded, Drop::kExpired));
  const Collected collected(metrics);
  const auto* total = collected.Find("moed_forward_seconds", {{"model", "m"}, {"layer", "3"}});
  REQUIRE(total != nullptr);
  CHECK(total->histogram.sample_count == 2);
  CHECK(total->histogram.sample_sum == Approx(3.0001));
  uint64_t before = 0;
  for (const auto& bucket : total->histogram.bucket) {
    CHECK(bucket.cumulative_count == (bucket.upper_bound < 1e-4 ? 0 : bucket.upper_bound < 3 ? 1 : 2));
    CHECK(bucket.cumulative_count >= before);
    before = bucket.cumulative_count;
  }
  const std::pair<const char*, double> stages[] = {{"receive", 20e-6}, {"queue", 40e-6}, {"compute", 60e-6}, {"send", 10e-6}};
  for (const auto& [stage, sum] : stages) {
    INFO(stage);
    const auto* series = collected.Find("moed_forward_stage_seconds", {{"model", "m"}, {"stage", stage}});
    REQUIRE(series != nullptr);
    CHECK(series->histogram.sample_count == 2);
    CHECK(series->histogram.sample_sum == Approx(sum));
  }
  CHECK(collected.Find("moed_forward_rows", {{"model", "m"}})->histogram.sample_sum == 8);
  CHECK(collected.Value("moed_forward_drops_total", {{"reason", "expired"}}) == 1);
}

TEST_CASE("A forward of a layer that is not known is counted without model and layer") {
  Metrics metrics = MakeMetrics();
  metrics.Finished(Failed(absl::StatusCode::kNotFound));
  metrics.Finished(Failed(absl::StatusCode::kResourceExhausted, Drop::kBytes));
  const Collected collected(metrics);
  CHECK(collected.Value("moed_forwards_total", {{"transport", "rpc"}, {"code", "NOT_FOUND"}}) == 1);
  CHECK(collected.Value("moed_forward_drops_total", {{"reason", "bytes"}}) == 1);
  CHECK(collected.Value("moed_forward_drops_total", {{"reason", "client"}}) == 0);
}

TEST_CASE("The imbalance of a run is the most rows of an expert by the mean over held experts") {
  Metrics metrics = MakeMetrics(true);
  const auto layer = metrics.OfLayer({"m", 0, 2, 6});  // holds 2 to 5
  Run(*layer, 2, {2, 3, 2, 4, 2, -1, 0, 7});           // held: 3, 1, 1 and 0 rows, the mean is 5 / 4
  const Collected collected(metrics);
  const std::map<std::string, std::string> labels = {{"model", "m"}, {"layer", "0"}};
  CHECK(collected.Find("moed_run_imbalance_ratio", labels)->histogram.sample_sum == Approx(3.0 / 1.25));
  CHECK(collected.Value("moed_run_experts_total", labels) == 3);
  CHECK(collected.Value("moed_merged_forwards_total", labels) == 2);
  CHECK(collected.Find("moed_run_rows", labels)->histogram.sample_sum == 4);
  const auto expert = [&](const char* number) {
    return collected.Value("moed_expert_rows_total", {{"model", "m"}, {"layer", "0"}, {"expert", number}});
  };
  CHECK(expert("2") == 3);
  CHECK(expert("3") == 1);
  CHECK(expert("5") == 0);
  CHECK_FALSE(expert("0").has_value());
  CHECK_FALSE(expert("6").has_value());
}

TEST_CASE("Without --expert-metrics there is no series for an expert, and a run of no known routing has no imbalance") {
  Metrics metrics = MakeMetrics();
  const auto layer = metrics.OfLayer(kLayer);
  Run(*layer, 1, {0, 1});
  layer->Ran({1, 5, 10, {}});
  Run(*layer, 1, {-1, -1});
  const Collected collected(metrics);
  CHECK_FALSE(collected.Has("moed_expert_rows_total"));
  const std::map<std::string, std::string> labels = {{"model", "m"}, {"layer", "3"}};
  CHECK(collected.Find("moed_run_imbalance_ratio", labels)->histogram.sample_count == 1);
  CHECK(collected.Find("moed_run_seconds", labels)->histogram.sample_count == 3);
}

TEST_CASE("A layer's series are there from its first observer to its last, and go on when both are held at once") {
  Metrics metrics = MakeMetrics();
  auto first = metrics.OfLayer(kLayer);
  first->Finished(Answered(1));
  auto second = metrics.OfLayer(kLayer);
  CHECK(first == second);
  first.reset();
  second->Finished(Answered(1));
  const std::map<std::string, std::string> labels = {{"model", "m"}, {"layer", "3"}};
  CHECK(Collected(metrics).Find("moed_forward_seconds", labels)->histogram.sample_count == 2);
  second.reset();
  CHECK_FALSE(Collected(metrics).Has("moed_forward_seconds"));
  second = metrics.OfLayer(kLayer);
  CHECK(Collected(metrics).Find("moed_forward_seconds", labels)->histogram.sample_count == 0);
}

TEST_CASE("A layer that comes back with other experts counts anew, while calls of the old one go on") {
  Metrics metrics = MakeMetrics(true);
  const auto old_layer = metrics.OfLayer({"m", 0, 0, 4});
  const auto new_layer = metrics.OfLayer({"m", 0, 0, 6});
  CHECK(old_layer != new_layer);
  Run(*old_layer, 1, {3, 3});
  Run(*new_layer, 1, {5, 3});
  const Collected collected(metrics);
  const auto expert = [&](const char* number) {
    return collected.Value("moed_expert_rows_total", {{"model", "m"}, {"layer", "0"}, {"expert", number}});
  };
  CHECK(expert("3") == 1);
  CHECK(expert("5") == 1);
  CHECK(collected.families().at("moed_expert_rows_total").metric.size() == 6);
}

TEST_CASE("Nothing is lost when many threads count beside a collection") {
  Metrics metrics = MakeMetrics(true);
  const auto layer = metrics.OfLayer(kLayer);
  constexpr int kThreads = 4, kCalls = 2000;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < kCalls; ++call) layer->Finished(Answered(100)), Run(*layer, 1, {1, 2});
    });
  }
  for (int i = 0; i < 20; ++i) Collected{metrics};
  for (std::thread& thread : threads) thread.join();
  const Collected collected(metrics);
  CHECK(collected.Find("moed_forward_seconds", {{"model", "m"}, {"layer", "3"}})->histogram.sample_count == kThreads * kCalls);
  CHECK(collected.Value("moed_expert_rows_total", {{"model", "m"}, {"layer", "3"}, {"expert", "2"}}) == kThreads * kCalls);
}

TEST_CASE("The state of the server is shown as it is: phase, health, layers, device, queue and sessions") {
  ServerState state;
  state.phase = Phase::kServing;
  state.serving = true;
  state.host.gpu = "a GPU";
  state.host.gpu_free_bytes = 60;
  state.device_bytes_at_start = 100;
  state.queue.waiting = 2;
  state.queue.waiting_rows = 30;
  state.bytes_in_flight = 77;
  state.sessions.open = 1;
  state.sessions.bytes = 4096;
  state.sessions.refused = 5;
  ModelStatus model;
  model.name = "m";
  model.generation = 7;
  model.layers.push_back({.layer = 3, .state = LayerState::kReady, .scheme = "file", .executed_scheme = "runs", .backend = "b",
                          .bytes = 9});
  model.layers.push_back({.layer = 4, .state = LayerState::kFailed, .scheme = "file"});
  state.models.push_back(model);
  const Metrics metrics(false, [&] { return state; });
  Collected collected(metrics);
  CHECK(collected.Value("moed_phase", {{"phase", "serving"}}) == 1);
  CHECK(collected.Value("moed_phase", {{"phase", "loading"}}) == 0);
  CHECK(collected.Value("moed_serving") == 1);
  CHECK(collected.Value("moed_model_generation", {{"model", "m"}}) == 7);
  CHECK(collected.Value("moed_layer_backend_info", {{"model", "m"}, {"layer", "3"}, {"backend", "b"}, {"scheme", "runs"}}) == 1);
  CHECK(collected.Value("moed_layer_state", {{"model", "m"}, {"layer", "3"}, {"state", "ready"}}) == 1);
  CHECK(collected.Value("moed_layer_state", {{"model", "m"}, {"layer", "4"}, {"state", "ready"}}) == 0);
  CHECK(collected.Value("moed_layer_state", {{"model", "m"}, {"layer", "4"}, {"state", "failed"}}) == 1);
  CHECK(collected.Value("moed_layer_weights_bytes", {{"model", "m"}, {"layer", "3"}}) == 9);
  CHECK(collected.Value("moed_device_memory_free_bytes", {{"device", "a GPU"}}) == 60);
  CHECK(collected.Value("moed_device_memory_used_bytes", {{"device", "a GPU"}}) == 40);
  CHECK(collected.Value("moed_device_healthy", {{"device", "a GPU"}}) == 1);
  CHECK(collected.Value("moed_queue_calls") == 2);
  CHECK(collected.Value("moed_queue_rows") == 30);
  CHECK(collected.Value("moed_in_flight_bytes") == 77);
  CHECK(collected.Value("moed_sessions_open") == 1);
  CHECK(collected.Value("moed_session_bytes") == 4096);
  CHECK(collected.Value("moed_sessions_total", {{"event", "refused"}}) == 5);
  CHECK_FALSE(collected.Has("moed_recording_active"));
  state.recording = Recorder::Counts{.active = false, .recorded = 3, .bytes = 1000, .folder_bytes = 1500};
  state.recording->lost[static_cast<size_t>(RecordLoss::kQueue)] = 2;
  const Collected recording(metrics);
  CHECK(recording.Value("moed_recording_active") == 0);
  CHECK(recording.Value("moed_recorded_calls_total") == 3);
  CHECK(recording.Value("moed_recorded_bytes_total") == 1000);
  CHECK(recording.Value("moed_recording_folder_bytes") == 1500);
  CHECK(recording.Value("moed_recording_lost_total", {{"reason", "queue"}}) == 2);
  CHECK(recording.Value("moed_recording_lost_total", {{"reason", "disk"}}) == 0);
  state.device_failed = true;
  CHECK(Collected(metrics).Value("moed_device_healthy", {{"device", "a GPU"}}) == 0);
  state.host.gpu = "";
  CHECK_FALSE(Collected(metrics).Has("moed_device_healthy"));
}

TEST_CASE("The process is this one") {
  const Collected collected(MakeMetrics());
  CHECK(*collected.Value("process_resident_memory_bytes") > 1 << 20);
  CHECK(*collected.Value("process_open_fds") >= 3);
  CHECK(*collected.Value("process_threads") >= 1);
  CHECK(*collected.Value("process_start_time_seconds") > 1.6e9);
}

TEST_CASE("Fields of /proc/PID/stat are found behind a name with spaces and parentheses; a text that is none gives zeros") {
  const std::string stat =
      "12 (a (b) c) S 1 1 1 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 7 0 1000 4096000 25 18446744073709551615 1 1 0 0 0";
  const ProcessStats stats = ParseProcessStat(stat, 100, 4096, 5000);
  CHECK(stats.cpu_seconds == Approx(3.0));
  CHECK(stats.threads == 7);
  CHECK(stats.start_seconds == Approx(5010));
  CHECK(stats.virtual_bytes == 4096000);
  CHECK(stats.resident_bytes == 25 * 4096);
  for (const char* bad : {"", "12 (a) S 1", "12 (a) S x x x x x x x x x x x x x x x x x x x x x x x"}) {
    INFO(bad);
    CHECK(ParseProcessStat(bad, 100, 4096, 5000).threads == 0);
  }
}

}  // namespace moed
