#include "tests/soak/kill_load.h"

#include <algorithm>
#include <array>
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

enum class End { kNone, kByItself, kKilled };
constexpr std::array<const char*, 3> kEndNames = {"nobody ends", "one ends by itself, over and over",
                                                  "one is killed, over and over"};

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

class KillLoad {
 public:
  KillLoad(const KillLoadOptions& options, Kind kind) : options_(options), kind_(std::move(kind)) {}

  absl::StatusOr<bool> Run(const std::string& folder) {
    absl::StatusOr<std::unique_ptr<SoakServer>> server =
        SoakServer::Start(options_.moed, folder, {"m=" + kind_.model}, kind_.options);
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    const auto alone = Start(kWindows, options_.window_s, 0, 1, 1);
    alone->Wait(kHang);
    alone_us_ = SeenBy(alone->Stdout(), 1).Quantile(0.5);
    if (alone_us_ <= 0) return absl::InternalError(absl::StrCat(kind_.name, ": no call was answered: ", alone->Stderr()));
    std::array<Seen, kEndNames.size()> seen;
    for (int round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < seen.size(); ++i) seen[i].Add(Measure(static_cast<End>(i)));
    }
    const ProcessNumbers after = Idle();
    return Report(seen, after, server_->Stop());
  }

 private:
  std::unique_ptr<Process> Start(int windows, double window_s, double rate, int concurrency, uint32_t seed) const {
    return Process::Start({options_.program, "load", "--server", server_->unix_socket(), "--layer", absl::StrCat(kind_.layer),
                           "--rows", absl::StrCat(kind_.rows), "--hidden", absl::StrCat(kind_.hidden), "--windows",
                           absl::StrCat(windows), "--window", absl::StrCat(window_s), "--concurrency", absl::StrCat(concurrency),
                           "--rate", absl::StrCat(rate), "--transport", kind_.transport, "--list", "--seed", absl::StrCat(seed)});
  }

  // What the others saw while the third client ended in that way.
  Seen Measure(End end) {
    const double rate = kBusy * 1e6 / alone_us_ / (kOthers + 1);
    const double seconds = options_.window_s * kWindows;
    std::vector<std::unique_ptr<Process>> others;
    for (int i = 0; i < kOthers; ++i) others.push_back(Start(kWindows, options_.window_s, rate, 2, ++seed_));
    const auto until = steady_clock::now() + std::chrono::duration<double>(seconds);
    int ends = 0, wrong_ends = 0;
    do {
      const double life = end == End::kNone ? seconds : kLife;
      const auto one = Start(1, end == End::kKilled ? 60 : life, rate, 2, ++seed_);
      if (end == End::kKilled) std::this_thread::sleep_for(std::chrono::duration<double>(life)), one->Signal(SIGKILL);
      const int exit_code = one->Wait(kHang).value_or(-1);
      ++ends, wrong_ends += exit_code != (end == End::kKilled ? 128 + SIGKILL : 0);
    } while (steady_clock::now() < until);
    Seen all;
    for (const auto& one : others) one->Wait(kHang), all.Add(SeenBy(one->Stdout(), 1));
    all.ends += ends, all.wrong_ends += wrong_ends;
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
    const Seen& ended = seen[1];
    const Seen& killed = seen[2];
    const auto ratio = [](const Seen& a, const Seen& b) { return b.times_us.empty() ? 0 : a.Quantile(0.99) / b.Quantile(0.99); };
    check("clients killed", absl::StrCat(killed.ends), "> 0", killed.ends > 0);
    check("others' p99, by that when one ends by itself", absl::StrFormat("%.2f x", ratio(killed, ended)),
          absl::StrFormat("<= %.1f x", kWantedP99), ratio(killed, ended) > 0 && ratio(killed, ended) <= kWantedP99);
    check("others' p99, by that when nobody ends", absl::StrFormat("%.2f x", ratio(killed, none)),
          absl::StrFormat("<= %.1f x", kWantedP99), ratio(killed, none) > 0 && ratio(killed, none) <= kWantedP99);
    const double lost = none.lost + ended.lost + killed.lost;
    check("calls that the others lost", absl::StrCat(lost), "0", lost == 0);
    const int wrong_ends = none.wrong_ends + ended.wrong_ends + killed.wrong_ends;
    check("clients that ended otherwise", absl::StrCat(wrong_ends), "0", wrong_ends == 0);
    check("sessions that are left", absl::StrCat(after.sessions), "0", after.sessions == 0);
    check("exit code after SIGTERM", absl::StrCat(exit_code), "0", exit_code == 0);
    std::printf("%s\n", table.Text().c_str());
    std::fflush(stdout);
    return good;
  }

  const KillLoadOptions options_;
  const Kind kind_;
  std::unique_ptr<SoakServer> server_;
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
    const absl::StatusOr<bool> one = KillLoad(options, kinds[i]).Run(folder.MakeDir(absl::StrCat("s", i)));
    if (!one.ok()) return one.status();
    good &= *one;
  }
  std::printf("soak: kill %s\n", good ? "passed" : "FAILED");
  return good;
}

}  // namespace moed::testing
