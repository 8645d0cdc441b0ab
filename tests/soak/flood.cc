#include "tests/soak/flood.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/moed_client.h"
#include "client/table.h"
#include "moe/v1/moe.pb.h"
#include "tests/soak/load_figures.h"
#include "tests/soak/soak_server.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

constexpr int kConnections = 3, kQueue = 64, kRounds = 3;
constexpr int kUnderWay = 16;      // of each connection, which all find room
constexpr int kFlood = 20'000;     // calls a second, and under way, that each connection wants
constexpr int kPoliteRate = 100;   // calls a second of the one beside
constexpr int32_t kLayer = 1;
constexpr int64_t kRows = 16, kHidden = 256;
// To refuse a call takes as much of gRPC as to answer it, so what is refused costs goodput: two cores reach 0.5 to 0.9.
constexpr double kWantedGoodput = 0.9;
constexpr int64_t kMostMemory = int64_t{256} << 20;
constexpr std::chrono::seconds kFilled(1), kHang(120);

// The frame of gRPC with one request.
std::string RequestFrame() {
  moe::v1::ForwardRequest request;
  request.set_layer(kLayer);
  request.mutable_hidden()->set_dtype(moe::v1::DTYPE_BF16);
  request.mutable_hidden()->add_shape(kRows), request.mutable_hidden()->add_shape(kHidden);
  request.mutable_hidden()->set_data(std::string(static_cast<size_t>(kRows * kHidden) * 2, '\0'));
  const std::string body = request.SerializeAsString();
  std::string frame(1, '\0');
  for (int shift = 24; shift >= 0; shift -= 8) frame.push_back(static_cast<char>(body.size() >> shift));
  return frame + body;
}

// Processor time that a process had so far, in seconds.
double ProcessorSeconds(pid_t pid) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(") ");
  if (name_end == std::string::npos) return 0;
  const std::vector<std::string> fields = absl::StrSplit(stat.substr(name_end + 2), ' ');
  constexpr size_t kUser = 11, kSystem = 12;  // behind the name
  double user = 0, system = 0;
  const bool good = fields.size() > kSystem && absl::SimpleAtod(fields[kUser], &user) && absl::SimpleAtod(fields[kSystem], &system);
  return good ? (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK)) : 0;
}

// What came of some windows.
struct Seen {
  double seconds = 0, finished = 0, refused = 0, late = 0;  // by the server's queue
  double server_cpu = 0, h2load_cpu = 0;                    // processor time
  int64_t memory = 0;                                       // of the server, the most
  std::vector<Figures> polite;
};

class Flood {
 public:
  Flood(const OverloadOptions& options, const std::string& folder, SoakServer* server)
      : options_(options), server_(server), request_file_(folder + "/request") {
    WriteFile(request_file_, RequestFrame());
  }

  absl::StatusOr<bool> Run() {
    Seen usual, flooded;
    for (int round = 0; round < kRounds; ++round) {
      if (absl::Status status = Measure(kUnderWay, 0, &usual); !status.ok()) return status;
      if (absl::Status status = Measure(kFlood, kFlood, &flooded); !status.ok()) return status;
    }
    Report(usual, flooded);
    Check("exit code after SIGTERM", absl::StrCat(server_->Stop()), "0", true);
    std::printf("\n%s:\n%s", std::string(kFloodName).c_str(), table_.Text().c_str());
    std::fflush(stdout);
    return good_;
  }

 private:
  // One window beside connections with so many calls under way each, `rate` more a second (0: one for each answer).
  absl::Status Measure(int under_way, int rate, Seen* seen) {
    const std::string path = server_->unix_socket();
    std::vector<std::string> flood = {"h2load", "-t", "1", "-c", absl::StrCat(kConnections), "-m", absl::StrCat(under_way), "-D",
                                      absl::StrCat(options_.window_s + 30), "-d", request_file_, "-B", path,
                                      "-H", "content-type: application/grpc", "-H", "te: trailers", "-H", "grpc-timeout: 1S"};
    if (rate > 0) flood.push_back(absl::StrCat("--rps=", rate));
    flood.push_back("http://localhost/moe.v1.Moe/Forward");
    const std::unique_ptr<Process> flooding = Process::Start(flood);
    std::this_thread::sleep_for(kFilled);
    if (flooding == nullptr || !flooding->Running()) {
      return absl::FailedPreconditionError(absl::StrCat("h2load ended: ", flooding == nullptr ? "" : flooding->Stderr()));
    }
    const absl::StatusOr<client::QueueStatus> before = Queue();
    if (!before.ok()) return before.status();
    const double server_cpu = ProcessorSeconds(server_->pid()), h2load_cpu = ProcessorSeconds(flooding->pid());
    const auto begin = std::chrono::steady_clock::now();
    const auto polite = Process::Start({options_.program, "load", "--server", path, "--layer", absl::StrCat(kLayer), "--rows",
                                        absl::StrCat(kRows), "--hidden", absl::StrCat(kHidden), "--rate", absl::StrCat(kPoliteRate),
                                        "--deadline-ms", "1000", "--window", absl::StrCat(options_.window_s)});
    polite->Wait(kHang);
    const absl::StatusOr<client::QueueStatus> after = Queue();
    if (!after.ok()) return after.status();
    seen->seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    seen->server_cpu += ProcessorSeconds(server_->pid()) - server_cpu;
    seen->h2load_cpu += ProcessorSeconds(flooding->pid()) - h2load_cpu;
    seen->finished += static_cast<double>(after->finished - before->finished);
    seen->refused += static_cast<double>(after->refused - before->refused);
    seen->late += static_cast<double>(after->expired + after->cancelled - before->expired - before->cancelled);
    seen->memory = std::max(seen->memory, NumbersOf(server_->pid()).anonymous_bytes);
    const std::vector<Figures> figures = WindowsOf(polite->Stdout());
    seen->polite.push_back(figures.empty() ? Figures{.other = 1} : figures.front());
    return absl::OkStatus();
  }

  absl::StatusOr<client::QueueStatus> Queue() const {
    const client::ClientOptions options = {.own_connection = true, .transport = client::Transport::kRpc};
    const auto client = client::MoeClient::Connect(server_->unix_socket(), options);
    if (!client.ok()) return client.status();
    const absl::StatusOr<client::ServerStatus> status = (*client)->Status();
    if (!status.ok()) return status.status();
    return status->queue;
  }

  void Report(const Seen& usual, const Seen& flooded) {
    const double best = usual.finished / usual.seconds, goodput = flooded.finished / flooded.seconds;
    const Figures polite = Sum(flooded.polite);
    Check("computed where all find room", absl::StrFormat("%.0f/s", best), "", true);
    Check("calls that the server took of the flood",
          absl::StrFormat("%.0f/s", goodput + (flooded.refused + flooded.late) / flooded.seconds), "", true);
    ReportProcessors(usual, flooded);
    Check("goodput", absl::StrFormat("%.0f/s, %.0f %% of that", goodput, 100 * goodput / best),
          absl::StrFormat(">= %.0f %%", 100 * kWantedGoodput), goodput >= kWantedGoodput * best);
    Check("the other client, answered", absl::StrFormat("%.0f of %.0f, p50 %.1f ms, p99 %.1f ms", polite.ok,
                                                        polite.ok + polite.refused + polite.late, polite.p50_us / 1000,
                                                        polite.p99_us / 1000), "> 0", polite.ok > 0);
    Check("refused without RetryInfo", absl::StrCat(polite.untold), "0", polite.untold == 0);
    Check("late", absl::StrCat(polite.late), "0", polite.late == 0);
    Check("other errors", absl::StrCat(polite.other), "0", polite.other == 0);
    Check("memory in the flood", client::BytesText(static_cast<double>(flooded.memory)),
          absl::StrCat("<= ", client::BytesText(static_cast<double>(kMostMemory))), flooded.memory <= kMostMemory);
  }

  // Where the processors' time went. What a refusal costs decides what goodput there can be: of calls at five times the rate at
  // which they can be computed four fifths and more are refused.
  void ReportProcessors(const Seen& usual, const Seen& flooded) {
    const double computed_us = 1e6 * usual.server_cpu / usual.finished;
    const double refused_us =
        1e6 * std::max(0.0, flooded.server_cpu - flooded.finished * computed_us / 1e6) / std::max(1.0, flooded.refused);
    const double ratio = refused_us / computed_us;
    Check("processors, server and h2load",
          absl::StrFormat("%.2f and %.2f, in the flood %.2f and %.2f", usual.server_cpu / usual.seconds,
                          usual.h2load_cpu / usual.seconds,
                          flooded.server_cpu / flooded.seconds, flooded.h2load_cpu / flooded.seconds),
          "", true);
    Check("a call that is computed, one that is refused",
          absl::StrFormat("%.0f us, %.0f us of the server's", computed_us, refused_us), "", true);
    Check("the most goodput at these and five times the calls",
          absl::StrFormat("%.0f %%", 100 * std::max(0.0, (1 - 5 * ratio) / std::max(0.01, 1 - ratio))), "", true);
  }

  void Check(const std::string& what, const std::string& found, const std::string& wanted, bool ok) {
    table_.Add({what, found, wanted, wanted.empty() ? "" : ok ? "ok" : "FAILED"});
    good_ &= ok;
  }

  const OverloadOptions& options_;
  SoakServer* const server_;
  const std::string request_file_;
  client::Table table_{{"flood", "found", "wanted", "result"}};
  bool good_ = true;
};

}  // namespace

absl::StatusOr<bool> RunFlood(const OverloadOptions& options, const std::string& folder) {
  absl::StatusOr<std::unique_ptr<SoakServer>> server =
      SoakServer::Start(options.moed, folder, {"m=" + options.data + "/ct-w4a16-g32-sym"}, {"--queue", absl::StrCat(kQueue)});
  if (!server.ok()) return server.status();
  return Flood(options, folder, server->get()).Run();
}

}  // namespace moed::testing
