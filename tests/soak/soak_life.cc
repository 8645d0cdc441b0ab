#include "tests/soak/soak_life.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/moed_client.h"
#include "client/table.h"
#include "tests/soak/other_weights.h"
#include "tests/soak/soak_cases.h"
#include "tests/soak/soak_client.h"
#include "tests/soak/soak_server.h"
#include "tests/soak/soak_swapper.h"
#include "tests/support/process.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr double kFlat = 0.02;    // that memory may grow
constexpr double kRamp = 200;     // seconds after which memory is looked at, or 40 % of the time
constexpr double kPeak = 30;      // seconds of that with more clients' threads, or 10 % of the time
constexpr int kPeakTimes = 2;     // how many more
constexpr int kPeaks = 3;         // after which an idle server has given back what it does not need
constexpr int64_t kIdleMore = 4 << 20;  // bytes that an idle server may hold more: pages of which a piece is in use
constexpr int kMappingsMore = 8;  // gRPC's pool of threads has some stacks more or less
constexpr std::chrono::seconds kSettle(40);
constexpr size_t kShownProblems = 20;

double Seconds(steady_clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

struct Totals {
  std::array<uint64_t, kSeenNames.size()> counts{};
  uint64_t kills = 0;
  std::vector<std::string> problems;

  uint64_t of(Seen seen) const { return counts[static_cast<size_t>(seen)]; }
};

// Adds what a client printed.
void AddOutput(const std::string& output, Totals* totals) {
  std::string last;
  for (const absl::string_view line : absl::StrSplit(output, '\n')) {
    if (line.rfind("PROBLEM ", 0) == 0) totals->problems.emplace_back(line.substr(8));
    // A line that a kill cut short lacks its last count.
    if (line.rfind("COUNTS ", 0) == 0 && line.find(" error=") != absl::string_view::npos) last = std::string(line);
  }
  for (const absl::string_view word : absl::StrSplit(last, ' ')) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    const auto name = std::find(kSeenNames.begin(), kSeenNames.end(), parts.first);
    uint64_t count = 0;
    if (name != kSeenNames.end() && absl::SimpleAtoi(parts.second, &count))
      totals->counts[static_cast<size_t>(name - kSeenNames.begin())] += count;
  }
}

// A sample of the server's memory, by time.
struct Sample {
  double second = 0;
  int64_t bytes = 0;
};

// The mean of the samples between two shares of the time; 0 without any.
double Mean(const std::vector<Sample>& samples, double seconds, double from, double to) {
  double sum = 0;
  int count = 0;
  for (const Sample& sample : samples) {
    if (sample.second < from * seconds || sample.second > to * seconds) continue;
    sum += static_cast<double>(sample.bytes), ++count;
  }
  return count == 0 ? 0 : sum / count;
}

// The most of the samples until then.
double Most(const std::vector<Sample>& samples, double until) {
  int64_t most = 0;
  for (const Sample& sample : samples) most = std::max(most, sample.second <= until ? sample.bytes : 0);
  return static_cast<double>(most);
}

class Life {
 public:
  explicit Life(const SoakOptions& options) : options_(options), random_(options.seed) {}

  absl::StatusOr<bool> Run();

 private:
  absl::Status Prepare();
  absl::StatusOr<std::unique_ptr<SoakServer>> Serve(int variant, const std::string& name);
  absl::Status Answer();
  std::unique_ptr<Process> StartClient(double seconds, int threads);
  // Clients and changes for that long, kPeakTimes the threads for the first `peak` seconds; false when the server ended.
  bool Phase(const char* name, double seconds, double peak);
  void KillOne(std::vector<std::unique_ptr<Process>>* clients, double left, int threads);
  void EndClients(std::vector<std::unique_ptr<Process>>* clients);
  // The numbers without clients, when they are as few as `before` or stay as they are.
  ProcessNumbers Idle(const ProcessNumbers* before) const;
  // Whether an idle server holds no more than before.
  static bool Fits(const ProcessNumbers& now, const ProcessNumbers& before);
  bool Report(const ProcessNumbers& before, const ProcessNumbers& after, int exit_code);

  const SoakOptions options_;
  std::mt19937 random_;
  TempDir folder_;
  std::vector<std::string> folders_;  // of the swapped model's weights
  std::unique_ptr<SoakServer> server_;
  Totals totals_;
  int changes_ = 0;
  uint64_t generation_ = 1;      // of the swapped model
  std::vector<Sample> samples_;  // of the last phase
};

absl::Status Life::Prepare() {
  folders_ = {options_.data + "/ct-w4a16-g32-sym", folder_.path() + "/other"};
  return CopyWithOtherWeights(folders_[0], folders_[1]);
}

absl::StatusOr<std::unique_ptr<SoakServer>> Life::Serve(int variant, const std::string& name) {
  const std::vector<std::string> models = {absl::StrCat(kSwapped, "=", folders_[static_cast<size_t>(variant)]),
                                           absl::StrCat(kSteady, "=", options_.data, "/tiny-gptoss-bf16")};
  return SoakServer::Start(options_.moed, folder_.MakeDir(name), models, {"--deterministic"});
}

absl::Status Life::Answer() {
  std::vector<std::unique_ptr<SoakServer>> servers;
  std::vector<std::unique_ptr<client::MoeClient>> clients;
  std::vector<client::MoeClient*> asked;
  for (int variant = 0; variant < kVariants; ++variant) {
    absl::StatusOr<std::unique_ptr<SoakServer>> server = Serve(variant, absl::StrCat("answers", variant));
    if (!server.ok()) return server.status();
    servers.push_back(*std::move(server));
    auto client = client::MoeClient::Connect(servers.back()->tcp(), {.transport = client::Transport::kRpc});
    if (!client.ok()) return client.status();
    clients.push_back(*std::move(client));
    asked.push_back(clients.back().get());
  }
  const absl::StatusOr<client::ServerStatus> status = asked.front()->Status();
  if (!status.ok()) return status.status();
  const absl::StatusOr<SoakCases> cases = MakeCases(*status);
  if (!cases.ok()) return cases.status();
  const absl::StatusOr<SoakAnswers> answers = SoakAnswers::Ask(*cases, asked);
  if (!answers.ok()) return answers.status();
  std::printf("soak: %zu calls with known answers, each of %d weights\n", cases->size(), kVariants);
  return answers->Write(folder_.File("answers"));
}

std::unique_ptr<Process> Life::StartClient(double seconds, int threads) {
  return Process::Start({options_.program, "client", "--tcp", server_->tcp(), "--unix", server_->unix_socket(), "--answers",
                         folder_.File("answers"), "--seed", absl::StrCat(random_() % 1'000'000), "--threads",
                         absl::StrCat(threads), "--seconds", absl::StrCat(std::max(seconds, 0.1))});
}

void Life::KillOne(std::vector<std::unique_ptr<Process>>* clients, double left, int threads) {
  std::unique_ptr<Process>& one = (*clients)[random_() % clients->size()];
  one->Signal(SIGKILL);
  const std::optional<int> ended = one->Wait(std::chrono::seconds(30));
  if (ended != 128 + SIGKILL)
    totals_.problems.push_back(absl::StrCat("a client ended with ", ended.value_or(-1), ": ", one->Stderr()));
  AddOutput(one->Stdout(), &totals_);
  ++totals_.kills;
  one = StartClient(left, threads);
}

void Life::EndClients(std::vector<std::unique_ptr<Process>>* clients) {
  for (std::unique_ptr<Process>& one : *clients) {
    const std::optional<int> ended = one->Wait(std::chrono::minutes(2));
    if (ended != 0) totals_.problems.push_back(absl::StrCat("a client ended with ", ended.value_or(-1), ": ", one->Stderr()));
    AddOutput(one->Stdout(), &totals_);
  }
  clients->clear();
}

bool Life::Phase(const char* name, double seconds, double peak) {
  samples_.clear();
  const auto begin = steady_clock::now();
  std::vector<std::unique_ptr<Process>> clients;
  int threads = options_.threads * (peak > 0 ? kPeakTimes : 1);
  double end = peak > 0 ? peak : seconds;  // of these clients
  const auto start = [&](double now) {
    for (int i = 0; i < options_.processes; ++i) clients.push_back(StartClient(end - now, threads));
  };
  start(0);
  SoakSwapper swapper(server_->admin(), folders_, options_.data + "/gptq-int4-g32-sym", generation_,
                      static_cast<uint32_t>(random_()));
  double kill_at = 3, tell_at = 10, sample_at = 0;
  for (double now = 0; now < seconds && server_->Running(); now = Seconds(steady_clock::now() - begin)) {
    if (now >= sample_at) {
      const ProcessNumbers numbers = NumbersOf(server_->pid());
      samples_.push_back({now, numbers.anonymous_bytes});
      sample_at += 0.5;
      if (now >= tell_at) {
        tell_at += 10;
        std::printf("soak: %s %3.0f s: %s anonymous, %d descriptors, %d mappings, %d sessions; %d changes, %llu kills\n", name, now,
                    client::BytesText(static_cast<double>(numbers.anonymous_bytes)).c_str(), numbers.files, numbers.mappings,
                    numbers.sessions, changes_ + swapper.changes(), static_cast<unsigned long long>(totals_.kills));
        std::fflush(stdout);
      }
    }
    if (now >= end) {
      EndClients(&clients);
      threads = options_.threads, end = seconds;
      start(now);
    }
    if (now >= kill_at && end - now > 3) {
      KillOne(&clients, end - now, threads);
      kill_at = now + 2 + static_cast<double>(random_() % 3000) / 1000;
    }
    std::this_thread::sleep_for(milliseconds(50));
  }
  EndClients(&clients);
  swapper.Stop();
  generation_ = swapper.generation();
  changes_ += swapper.changes();
  for (const std::string& problem : swapper.Problems()) totals_.problems.push_back(problem);
  return server_->Running();
}

ProcessNumbers Life::Idle(const ProcessNumbers* before) const {
  const auto end = steady_clock::now() + kSettle;
  ProcessNumbers numbers = NumbersOf(server_->pid());
  for (int same = 0; steady_clock::now() < end && same < 40;) {
    std::this_thread::sleep_for(milliseconds(250));
    const ProcessNumbers now = NumbersOf(server_->pid());
    const bool stays = now.files == numbers.files && now.mappings == numbers.mappings &&
                       now.anonymous_bytes == numbers.anonymous_bytes;
    same = stays ? same + 1 : 0;
    numbers = now;
    if (before != nullptr && Fits(now, *before)) break;
  }
  return numbers;
}

bool Life::Fits(const ProcessNumbers& now, const ProcessNumbers& before) {
  return now.files <= before.files && now.mappings <= before.mappings && now.sessions == 0 &&
         now.anonymous_bytes <= before.anonymous_bytes + kIdleMore;
}

bool Life::Report(const ProcessNumbers& before, const ProcessNumbers& after, int exit_code) {
  client::Table table({"check", ">found", ">wanted", "result"});
  bool good = true;
  const auto check = [&](const std::string& what, const std::string& found, const std::string& wanted, bool ok) {
    table.Add({what, found, wanted, ok ? "ok" : "FAILED"});
    good &= ok;
  };
  for (size_t i = 0; i < static_cast<size_t>(Seen::kWrong); ++i) {
    check(absl::StrCat(i <= static_cast<size_t>(Seen::kRing) ? "right by " : "", kSeenNames[i]), absl::StrCat(totals_.counts[i]),
          i <= static_cast<size_t>(Seen::kRing) ? "> 0" : "", i > static_cast<size_t>(Seen::kRing) || totals_.counts[i] > 0);
  }
  check("clients killed", absl::StrCat(totals_.kills), "> 0", totals_.kills > 0);
  check("changes of models", absl::StrCat(changes_), "> 0", changes_ > 0);
  check("wrong answers", absl::StrCat(totals_.of(Seen::kWrong)), "0", totals_.of(Seen::kWrong) == 0);
  check("problems", absl::StrCat(totals_.problems.size()), "0", totals_.problems.empty());
  // Under load the heap is as large as what the calls that ever met needed, and the holes between: those of twice as many threads
  // have made it larger than others will, so what it grows later are holes that become more. What leaks fills these holes first; it
  // is seen on the idle server, which has given back all that it does not hold.
  const double ramp = std::min(0.4, kRamp / options_.seconds) * options_.seconds;
  const double most = Most(samples_, ramp), last = Mean(samples_, options_.seconds, 0.9, 1);
  check(absl::StrFormat("memory, most until %.0f s", ramp), client::BytesText(most), "", true);
  check("memory, last tenth", absl::StrFormat("%s (%+.1f %%)", client::BytesText(last), most > 0 ? (last / most - 1) * 100 : 0),
        "+2.0 %", most > 0 && last <= most * (1 + kFlat));
  const int64_t more = after.anonymous_bytes - before.anonymous_bytes;
  check("idle memory", absl::StrFormat("%s (%+.2f MiB)", client::BytesText(static_cast<double>(after.anonymous_bytes)),
                                       static_cast<double>(more) / (1 << 20)),
        absl::StrCat("+", client::BytesText(static_cast<double>(kIdleMore))), more <= kIdleMore);
  check("idle descriptors", absl::StrCat(after.files), absl::StrCat("<= ", before.files), after.files <= before.files);
  check("idle mappings", absl::StrCat(after.mappings), absl::StrCat("<= ", before.mappings + kMappingsMore),
        after.mappings <= before.mappings + kMappingsMore);
  check("idle sessions", absl::StrCat(after.sessions), "0", after.sessions == 0);
  check("exit code after SIGTERM", absl::StrCat(exit_code), "0", exit_code == 0);
  std::printf("%s", table.Text().c_str());
  for (size_t i = 0; i < std::min(totals_.problems.size(), kShownProblems); ++i) std::printf("  %s\n", totals_.problems[i].c_str());
  std::printf("soak: %s\n", good ? "passed" : "FAILED");
  return good;
}

absl::StatusOr<bool> Life::Run() {
  if (absl::Status status = Prepare(); !status.ok()) return status;
  if (absl::Status status = Answer(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<SoakServer>> server = Serve(0, "server");
  if (!server.ok()) return server.status();
  server_ = *std::move(server);
  // Until everything has been used that the server then keeps: threads, arenas, memory of the largest calls.
  const double warm_up = std::clamp(options_.seconds / 5, 20.0, 120.0);
  if (!Phase("warm-up", warm_up, warm_up)) return absl::InternalError(absl::StrCat("the server ended: ", server_->Errors()));
  const ProcessNumbers before = Idle(nullptr);
  if (!Phase("soak", options_.seconds, std::min(kPeak, options_.seconds / 10))) {
    totals_.problems.push_back(absl::StrCat("the server ended: ", server_->Errors()));
  }
  ProcessNumbers after = Idle(&before);
  // What an idle server has above the least that it ever needed it gives back when that is noticeable (server/allocator.h), which it
  // is after many calls at once.
  const std::vector<Sample> samples = samples_;
  for (int i = 0; i < kPeaks && !Fits(after, before) && server_->Running(); ++i) {
    Phase("peak", kPeak, kPeak);
    after = Idle(&before);
  }
  samples_ = samples;
  return Report(before, after, server_->Stop());
}

}  // namespace

absl::StatusOr<bool> RunSoak(const SoakOptions& options) { return Life(options).Run(); }

}  // namespace moed::testing
