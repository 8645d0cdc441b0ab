#include "tests/soak/overload.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/moed_client.h"
#include "client/table.h"
#include "tests/soak/flood.h"
#include "tests/soak/load_figures.h"
#include "tests/soak/soak_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

constexpr int kClients = 3;
constexpr int kRounds = 3;
constexpr double kTimes = 5;  // calls that come, of those that can be computed
constexpr double kWantedGoodput = 0.9, kWantedP99 = 1.5;
constexpr int kHang = 120;  // seconds, a guard

// A server and the calls that it gets.
struct Kind {
  std::string name;
  std::string model;
  std::vector<std::string> options;
  int32_t layer;
  int64_t rows, hidden;
  int queue;        // calls that may wait
  int deadline_ms;  // under overload
};

class Overload {
 public:
  Overload(const OverloadOptions& options, Kind kind) : options_(options), kind_(std::move(kind)) {}

  absl::StatusOr<bool> Run(const std::string& folder) {
    std::vector<std::string> more = kind_.options;
    more.insert(more.end(), {"--queue", absl::StrCat(kind_.queue)});
    absl::StatusOr<std::unique_ptr<SoakServer>> server = SoakServer::Start(options_.moed, folder, {"m=" + kind_.model}, more);
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    Saturate();
    Flood();
    Kill();
    Check("exit code after SIGTERM", absl::StrCat(server_->Stop()), "0", true);
    std::printf("\n%s:\n%s", kind_.name.c_str(), table_.Text().c_str());
    std::fflush(stdout);
    return good_;
  }

 private:
  std::unique_ptr<Process> Start(int windows, int concurrency, double rate, int deadline_ms, int seed) const {
    return Process::Start({options_.program, "load",
                           "--server",       server_->unix_socket(),
                           "--layer",        absl::StrCat(kind_.layer),
                           "--rows",         absl::StrCat(kind_.rows),
                           "--hidden",       absl::StrCat(kind_.hidden),
                           "--windows",      absl::StrCat(windows),
                           "--window",       absl::StrCat(options_.window_s),
                           "--concurrency",  absl::StrCat(concurrency),
                           "--rate",         absl::StrCat(rate),
                           "--deadline-ms",  absl::StrCat(deadline_ms),
                           "--seed",         absl::StrCat(seed)});
  }

  // The second of two windows of all clients together: the first is for connections and a queue that fills.
  Figures Measure(int concurrency, double rate, int deadline_ms) const {
    std::vector<std::unique_ptr<Process>> clients;
    for (int i = 0; i < kClients; ++i) clients.push_back(Start(2, concurrency, rate / kClients, deadline_ms, i));
    std::vector<Figures> last;
    for (const auto& one : clients) {
      one->Wait(std::chrono::seconds(kHang));
      const std::vector<Figures> windows = WindowsOf(one->Stdout());
      last.push_back(windows.size() == 2 ? windows[1] : Figures{.other = 1});
    }
    return Sum(last);
  }

  void Saturate() {
    for (const int concurrency : {1, 4, 12}) {
      const Figures figures = Measure(concurrency, 0, 60'000);
      const double goodput = figures.ok / options_.window_s;
      if (goodput > best_) best_ = goodput, best_concurrency_ = concurrency;
      table_.Add({absl::StrCat("saturation, ", kClients * concurrency, " calls under way"),
                  absl::StrFormat("%.0f/s, p99 %.1f ms", goodput, figures.p99_us / 1000)});
    }
  }

  // Saturation and flood in turns, since others may use the machine as well.
  void Flood() {
    std::vector<Figures> saturated, flooded;
    const double rate = best_ * kTimes, seconds = options_.window_s * kRounds;
    client::QueueStatus met;  // by the server, of the floods
    for (int round = 0; round < kRounds; ++round) {
      saturated.push_back(Measure(best_concurrency_, 0, 60'000));
      const client::QueueStatus before = Queue();
      flooded.push_back(Measure(0, rate, kind_.deadline_ms));
      const client::QueueStatus after = Queue();
      met.accepted += after.accepted - before.accepted, met.refused += after.refused - before.refused;
      met.expired += after.expired - before.expired, met.cancelled += after.cancelled - before.cancelled;
    }
    const Figures figures = Sum(flooded);
    const double best = Sum(saturated).ok / seconds, goodput = figures.ok / seconds;
    const double came = goodput + (figures.refused + figures.late + figures.other) / seconds;
    // A call waits for the run that is under way, which may be as large as the queue, and for what is before it in the queue.
    const double bound_ms = std::min<double>(2.25 * kind_.queue / best * 1000, kind_.deadline_ms);
    Check("saturation between floods", absl::StrFormat("%.0f/s", best), "", true);
    Check("calls that came", absl::StrFormat("%.0f/s", came), "", true);
    Check("goodput", absl::StrFormat("%.0f/s, %.0f %% of saturation", goodput, 100 * goodput / best), ">= 90 %",
          goodput >= kWantedGoodput * best);
    Check("accepted calls, p50", absl::StrFormat("%.1f ms", figures.p50_us / 1000), "", true);
    Check("accepted calls, p99", absl::StrFormat("%.1f ms", figures.p99_us / 1000), absl::StrFormat("<= %.1f ms", bound_ms),
          figures.p99_us / 1000 <= bound_ms);
    Check("refused", absl::StrFormat("%.0f/s", figures.refused / seconds), "", true);
    Check("refused without RetryInfo", absl::StrCat(figures.untold), "0", figures.untold == 0);
    Check("late", absl::StrFormat("%.0f/s", figures.late / seconds), "", true);
    Check("other errors", absl::StrCat(figures.other), "0", figures.other == 0);
    Check("met by the server's queue, first windows too",
          absl::StrCat(met.accepted, " accepted, ", met.refused, " refused, ", met.expired, " late, ", met.cancelled, " left"), "",
          true);
  }

  // What the server's queue did so far; zeros when it does not tell.
  client::QueueStatus Queue() const {
    const client::ClientOptions options = {.own_connection = true, .transport = client::Transport::kRpc};
    const auto client = client::MoeClient::Connect(server_->unix_socket(), options);
    const auto status = (*client)->Status("", {.wait_for_ready = true});
    return status.ok() ? status->queue : client::QueueStatus();
  }

  // Three clients, one of which is killed in the middle of its calls.
  void Kill() {
    std::vector<std::unique_ptr<Process>> clients;
    for (int i = 0; i < kClients; ++i) clients.push_back(Start(4, 4, 0, 60'000, i));
    const auto two_windows = std::chrono::duration<double>(options_.window_s * 2);
    std::this_thread::sleep_for(two_windows);
    clients.back()->Signal(SIGKILL);
    clients.pop_back();
    double before = 0, after = 0, other = 0;
    for (const auto& one : clients) {
      one->Wait(std::chrono::seconds(kHang));
      const std::vector<Figures> windows = WindowsOf(one->Stdout());
      other += Sum(windows).other + Sum(windows).refused + (windows.size() == 4 ? 0 : 1);
      if (windows.size() != 4) continue;
      before = std::max(before, windows[1].p99_us);
      after = std::max({after, windows[2].p99_us, windows[3].p99_us});
    }
    Check("p99 of others when a client is killed", absl::StrFormat("%.1f ms -> %.1f ms", before / 1000, after / 1000), "<= 1.5 x",
          before > 0 && after <= kWantedP99 * before);
    Check("errors of others", absl::StrCat(other), "0", other == 0);
  }

  void Check(const std::string& what, const std::string& found, const std::string& wanted, bool ok) {
    table_.Add({what, found, wanted, wanted.empty() ? "" : ok ? "ok" : "FAILED"});
    good_ &= ok;
  }

  const OverloadOptions options_;
  const Kind kind_;
  std::unique_ptr<SoakServer> server_;
  client::Table table_{{"overload", "found", "wanted", "result"}};
  double best_ = 0;  // calls a second
  int best_concurrency_ = 1;
  bool good_ = true;
};

}  // namespace

absl::StatusOr<bool> RunOverload(const OverloadOptions& options) {
  const TempDir folder;
  CheckpointBuilder builder;
  AddModel({.family = ModelFamily::kMixtral, .hidden = 1024, .intermediate = 1024, .num_experts = 2}, &builder);
  if (absl::Status status = builder.Write(folder.MakeDir("slow")); !status.ok()) return status;
  // Where computing takes the time, clients on the same processors are not noticed.
  const std::vector<std::string> slow = {"--policy", "require:reference", "--threads", "1", "--max-batch-tokens", "64"};
  const std::vector<Kind> kinds = {
      {"long calls, deadline beyond the queue's time", folder.path() + "/slow", slow, 0, 8, 1024, 32, 5'000},
      {"long calls, deadline within the queue's time", folder.path() + "/slow", slow, 0, 8, 1024, 256, 1'000},
  };
  bool good = true;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i].name.find(options.filter) == std::string::npos) continue;
    const absl::StatusOr<bool> one = Overload(options, kinds[i]).Run(folder.MakeDir(absl::StrCat("s", i)));
    if (!one.ok()) return one.status();
    good &= *one;
  }
  if (kFloodName.find(options.filter) != std::string_view::npos) {
    const absl::StatusOr<bool> flood = RunFlood(options, folder.MakeDir("f"));
    if (!flood.ok()) return flood.status();
    good &= *flood;
  }
  std::printf("soak: overload %s\n", good ? "passed" : "FAILED");
  return good;
}

}  // namespace moed::testing
