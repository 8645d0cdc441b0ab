#include "tests/soak/kill_load.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
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
#include "client/table.h"
#include "tests/soak/soak_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using std::chrono::steady_clock;

constexpr int kOthers = 2;        // clients that live
constexpr double kBusy = 0.4;     // of the server's time that the calls of all three take
constexpr double kLife = 0.4;     // seconds of the client that ends
constexpr double kWantedP99 = 1.5;
constexpr int kWindows = 3;       // of which the first, for connections, is not counted
constexpr std::chrono::seconds kHang(120);

enum class End { kNone, kStranger, kByItself, kKilled };
constexpr std::array<const char*, 4> kEndNames = {"nobody ends", "strangers are killed, one after the other",
                                                  "one ends by itself, over and over", "one is killed, over and over"};

struct Kind {
  std::string name, model;
  std::vector<std::string> options;
  std::string transport;
  int32_t layer;
  int64_t rows, hidden;
};

// What became of calls.
struct Seen {
  std::vector<double> times_us;
  double lost = 0;  // that did not get their answer
  int ends = 0;     // of the client that ends, as it was meant to
  int wrong_ends = 0;

  void Add(const Seen& more) {
    times_us.insert(times_us.end(), more.times_us.begin(), more.times_us.end());
    lost += more.lost, ends += more.ends, wrong_ends += more.wrong_ends;
  }
  double Quantile(double q) const {
    if (times_us.empty()) return 0;
    std::vector<double> sorted = times_us;
    std::sort(sorted.begin(), sorted.end());
    return sorted[std::min(sorted.size() - 1, static_cast<size_t>(q * static_cast<double>(sorted.size())))];
  }
};

// What a client printed, from its window number `first` on; one that did not print all counts as a lost call.
Seen SeenBy(const std::string& output, int first) {
  Seen seen;
  int windows = 0;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    const bool counted = windows >= first;
    if (line.rfind("LOAD ", 0) == 0) ++windows;
    for (const absl::string_view word : absl::StrSplit(line, ' ')) {
      const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
      double value = 0;
      if (line.rfind("TIMES", 0) == 0 && counted && absl::SimpleAtod(word, &value)) seen.times_us.push_back(value);
      const bool loss = parts.first == "refused" || parts.first == "late" || parts.first == "other";
      if (loss && absl::SimpleAtod(parts.second, &value)) seen.lost += value;
    }
  }
  if (windows != kWindows) ++seen.lost;
  return seen;
}

// Whether a process was stopped by a signal.
bool Stopped(pid_t pid) {
  const std::string stat = ReadFile(absl::StrCat("/proc/", pid, "/stat"));
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string::npos && stat.compare(name_end + 2, 1, "T") == 0;
}

class KillLoad {
 public:
  KillLoad(const KillLoadOptions& options, Kind kind) : options_(options), kind_(std::move(kind)) {}

  absl::StatusOr<bool> Run(const std::string& folder, const std::string& beside_folder) {
    absl::StatusOr<std::unique_ptr<SoakServer>> server =
        SoakServer::Start(options_.moed, folder, {"m=" + kind_.model}, kind_.options);
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    absl::StatusOr<std::unique_ptr<SoakServer>> beside =
        SoakServer::Start(options_.moed, beside_folder, {"m=" + kind_.model}, kind_.options);
    if (!beside.ok()) return beside.status();
    beside_ = *std::move(beside);
    const auto alone = Start(kWindows, options_.window_s, 0, 1, 1);
    alone->Wait(kHang);
    alone_us_ = SeenBy(alone->Stdout(), 1).Quantile(0.5);
    if (alone_us_ <= 0) return absl::InternalError(absl::StrCat(kind_.name, ": no call was answered: ", alone->Stderr()));
    std::array<Seen, kEndNames.size()> seen;
    for (int round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < seen.size(); ++i) {
        const absl::StatusOr<Seen> more = Measure(static_cast<End>(i));
        if (!more.ok()) return more.status();
        seen[i].Add(*more);
      }
    }
    const ProcessNumbers after = Idle();
    return Report(seen, after, server_->Stop());
  }

 private:
  std::vector<std::string> Arguments(const SoakServer& server, int windows, double window_s, double rate, int concurrency,
                                     uint32_t seed) const {
    return {options_.program, "load", "--server", server.unix_socket(), "--layer", absl::StrCat(kind_.layer), "--rows",
            absl::StrCat(kind_.rows), "--hidden", absl::StrCat(kind_.hidden), "--windows", absl::StrCat(windows), "--window",
            absl::StrCat(window_s), "--concurrency", absl::StrCat(concurrency), "--rate", absl::StrCat(rate), "--transport",
            kind_.transport, "--list", "--seed", absl::StrCat(seed)};
  }

  std::unique_ptr<Process> Start(int windows, double window_s, double rate, int concurrency, uint32_t seed) const {
    return Process::Start(Arguments(*server_, windows, window_s, rate, concurrency, seed));
  }

  // The clients that will end, each connected and stopped.
  absl::StatusOr<std::vector<std::unique_ptr<Process>>> StartStopped(End end, double rate, double seconds) {
    std::vector<std::unique_ptr<Process>> clients;
    const int count = end == End::kNone ? 0 : static_cast<int>(std::ceil(seconds / kLife));
    for (int i = 0; i < count; ++i) {
      const SoakServer& server = end == End::kStranger ? *beside_ : *server_;
      std::vector<std::string> arguments = Arguments(server, 1, end == End::kKilled ? 60 : kLife, rate, 2, ++seed_);
      arguments.push_back("--stopped");
      clients.push_back(Process::Start(arguments));
    }
    const auto end_of_wait = steady_clock::now() + kHang;
    for (const auto& client : clients) {
      while (!Stopped(client->pid()) && steady_clock::now() < end_of_wait) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (!Stopped(client->pid())) return absl::InternalError(absl::StrCat("a client did not connect: ", client->Stderr()));
    }
    return clients;
  }

  // What the others saw while clients ended in that way. Of strangers and where nobody ends a third client lives beside them.
  absl::StatusOr<Seen> Measure(End end) {
    const double rate = kBusy * 1e6 / alone_us_ / (kOthers + 1);
    const double seconds = options_.window_s * kWindows;
    absl::StatusOr<std::vector<std::unique_ptr<Process>>> ending = StartStopped(end, rate, seconds);
    if (!ending.ok()) return ending.status();
    std::vector<std::unique_ptr<Process>> others;
    for (int i = 0; i < kOthers; ++i) others.push_back(Start(kWindows, options_.window_s, rate, 2, ++seed_));
    std::unique_ptr<Process> third;
    if (end == End::kNone || end == End::kStranger) third = Start(1, seconds, rate, 2, ++seed_);
    Seen all;
    for (const auto& one : *ending) {
      const auto until = steady_clock::now() + std::chrono::duration<double>(kLife);
      if (end != End::kStranger) one->Signal(SIGCONT);
      if (end != End::kByItself) std::this_thread::sleep_until(until), one->Signal(SIGKILL);
      ++all.ends, all.wrong_ends += one->Wait(kHang).value_or(-1) != (end == End::kByItself ? 0 : 128 + SIGKILL);
    }
    if (third != nullptr) all.wrong_ends += third->Wait(kHang).value_or(-1) != 0;
    for (const auto& one : others) one->Wait(kHang), all.Add(SeenBy(one->Stdout(), 1));
    return all;
  }

  // The server without clients, as soon as it forgot them.
  ProcessNumbers Idle() const {
    const auto end = steady_clock::now() + std::chrono::seconds(10);
    ProcessNumbers numbers = NumbersOf(server_->pid());
    for (; numbers.sessions > 0 && steady_clock::now() < end; numbers = NumbersOf(server_->pid()))
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return numbers;
  }

  bool Report(const std::array<Seen, kEndNames.size()>& seen, const ProcessNumbers& after, int exit_code) {
    client::Table table({"kill: " + kind_.name, ">found", ">wanted", "result"});
    bool good = true;
    const auto check = [&](const std::string& what, const std::string& found, const std::string& wanted, bool ok) {
      table.Add({what, found, wanted, wanted.empty() ? "" : ok ? "ok" : "FAILED"});
      good &= ok;
    };
    check("a call alone, p50", absl::StrFormat("%.2f ms", alone_us_ / 1000), "", true);
    for (size_t i = 0; i < seen.size(); ++i) {
      check(kEndNames[i], absl::StrFormat("%d calls of the others, p50 %.2f ms, p99 %.2f ms", seen[i].times_us.size(),
                                          seen[i].Quantile(0.5) / 1000, seen[i].Quantile(0.99) / 1000), "", true);
    }
    const Seen& none = seen[0];
    const Seen& strangers = seen[1];
    const Seen& ended = seen[2];
    const Seen& killed = seen[3];
    const auto ratio = [](const Seen& a, const Seen& b) { return b.times_us.empty() ? 0 : a.Quantile(0.99) / b.Quantile(0.99); };
    check("clients killed", absl::StrCat(killed.ends), "> 0", killed.ends > 0);
    const auto check_ratio = [&](const std::string& than, const Seen& base) {
      check("others' p99, by that when " + than, absl::StrFormat("%.2f x", ratio(killed, base)),
            absl::StrFormat("<= %.1f x", kWantedP99), ratio(killed, base) > 0 && ratio(killed, base) <= kWantedP99);
    };
    check_ratio("nobody ends", none);
    check_ratio("one ends by itself", ended);
    check_ratio("strangers are killed", strangers);
    const double lost = none.lost + strangers.lost + ended.lost + killed.lost;
    check("calls that the others lost", absl::StrCat(lost), "0", lost == 0);
    const int wrong_ends = none.wrong_ends + strangers.wrong_ends + ended.wrong_ends + killed.wrong_ends;
    check("clients that ended otherwise", absl::StrCat(wrong_ends), "0", wrong_ends == 0);
    check("sessions that are left", absl::StrCat(after.sessions), "0", after.sessions == 0);
    check("exit code after SIGTERM", absl::StrCat(exit_code), "0", exit_code == 0);
    std::printf("%s\n", table.Text().c_str());
    std::fflush(stdout);
    return good;
  }

  const KillLoadOptions options_;
  const Kind kind_;
  std::unique_ptr<SoakServer> server_, beside_;  // the strangers are clients of the second
  double alone_us_ = 0;
  uint32_t seed_ = 0;
};

}  // namespace

absl::StatusOr<bool> RunKillLoad(const KillLoadOptions& options) {
  const TempDir folder;
  CheckpointBuilder builder;
  AddModel({.family = ModelFamily::kMixtral, .hidden = 1024, .intermediate = 1024, .num_experts = 2}, &builder);
  if (absl::Status status = builder.Write(folder.MakeDir("slow")); !status.ok()) return status;
  const std::string slow = folder.path() + "/slow", fast = options.data + "/ct-w4a16-g32-sym";
  const std::vector<std::string> one_thread = {"--policy", "require:reference", "--threads", "1"};
  const std::vector<Kind> kinds = {
      {"long calls by message", slow, one_thread, "rpc", 0, 1, 1024},
      {"long calls by session", slow, one_thread, "shared-memory", 0, 1, 1024},
      {"short calls by ring", fast, {}, "ring", 1, 64, 256},
  };
  bool good = true;
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i].name.find(options.filter) == std::string::npos) continue;
    const absl::StatusOr<bool> one =
        KillLoad(options, kinds[i]).Run(folder.MakeDir(absl::StrCat("s", i)), folder.MakeDir(absl::StrCat("b", i)));
    if (!one.ok()) return one.status();
    good &= *one;
  }
  std::printf("soak: kill %s\n", good ? "passed" : "FAILED");
  return good;
}

}  // namespace moed::testing
