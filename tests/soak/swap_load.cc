#include "tests/soak/swap_load.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/histogram.h"
#include "client/moed_client.h"
#include "client/table.h"
#include "tests/soak/soak_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using client::Transport;
using std::chrono::steady_clock;

constexpr int kVariants = 2, kLayers = 8, kExperts = 8, kTopK = 2;
constexpr int64_t kHidden = 512, kIntermediate = 512, kRows = 16;
constexpr double kRate = 40;  // calls a second of each caller
constexpr std::chrono::seconds kBetweenSwaps(2);
constexpr size_t kShownProblems = 10;
constexpr char kModel[] = "m";

// A call on each layer; the spans of the calls point into it.
struct Calls {
  std::vector<uint8_t> hidden = client::FromFloats(client::DType::kBf16, CaseHidden(kRows, kHidden));
  std::vector<client::ForwardCall> calls{kLayers};

  Calls() {
    for (int32_t layer = 0; layer < kLayers; ++layer) {
      calls[static_cast<size_t>(layer)].layer = layer;
      calls[static_cast<size_t>(layer)].hidden = {client::DType::kBf16, kRows, kHidden, hidden};
    }
  }
};

using Answers = std::vector<std::vector<std::string>>;  // [variant][layer]

struct Sample {
  steady_clock::time_point begin, end;
};

// What is served, as far as a caller can know: generations below `flipped` are over, those above `begun` have not come.
struct Generations {
  std::atomic<uint64_t> flipped{1}, begun{1};
};

// One caller: a call at random times, the next not before the last was answered. One thread, joined by Join.
class Caller {
 public:
  Caller(const std::string& address, Transport transport, const Calls& calls, const Answers& answers,
         const Generations& generations, uint32_t seed, steady_clock::time_point end)
      : calls_(calls), answers_(answers), generations_(generations), random_(seed), transport_(transport), address_(address),
        thread_([this, end] { Main(end); }) {}

  void Join() { thread_.join(); }
  // After Join.
  const std::vector<Sample>& samples() const { return samples_; }
  const std::vector<std::string>& errors() const { return errors_; }  // of calls that failed
  const std::vector<std::string>& wrong() const { return wrong_; }    // of answers that are not those of their generation

 private:
  void Main(steady_clock::time_point end) {
    auto client = client::MoeClient::Connect(address_, {.own_connection = true, .transport = transport_});
    if (!client.ok()) return errors_.push_back(client.status().ToString());
    const auto hello = (*client)->Hello({.wait_for_ready = true});
    if (!hello.ok()) return errors_.push_back(hello.status().ToString());
    std::exponential_distribution<double> pause(kRate);
    for (auto next = steady_clock::now(); next < end;
         next += std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(pause(random_)))) {
      std::this_thread::sleep_until(next);
      CallOne(client->get());
    }
  }

  void CallOne(client::MoeClient* client) {
    const size_t layer = random_() % kLayers;
    const uint64_t least = generations_.flipped;
    Sample sample{steady_clock::now(), {}};
    const absl::StatusOr<client::ForwardResult> result = client->Forward(calls_.calls[layer]);
    sample.end = steady_clock::now();
    const uint64_t most = generations_.begun;
    if (!result.ok()) return errors_.push_back(absl::StrCat(client::TransportName(transport_), ": ", result.status().ToString()));
    samples_.push_back(sample);
    const uint64_t got = result->generation;
    if (got < least || got > most) {
      wrong_.push_back(absl::StrCat("layer ", layer, ": wanted generation ", least, " to ", most, ", got ", got));
    } else if (result->data != answers_[(got - 1) % kVariants][layer]) {
      wrong_.push_back(absl::StrCat("layer ", layer, ": not the answer of generation ", got));
    }
  }

  const Calls& calls_;
  const Answers& answers_;
  const Generations& generations_;
  std::mt19937 random_;
  const Transport transport_;
  const std::string address_;
  std::vector<Sample> samples_;
  std::vector<std::string> errors_, wrong_;
  std::thread thread_;
};

class SwapLoad {
 public:
  explicit SwapLoad(const SwapLoadOptions& options) : options_(options) {}

  absl::StatusOr<bool> Run() {
    if (absl::Status status = Prepare(); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<SoakServer>> server = Serve(0, "server");
    if (!server.ok()) return server.status();
    server_ = *std::move(server);
    auto admin = client::MoeClient::Connect(server_->admin(), {.transport = Transport::kRpc});
    if (!admin.ok()) return admin.status();
    const auto end = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(
                                               std::chrono::duration<double>(options_.seconds));
    std::vector<std::unique_ptr<Caller>> callers;
    for (const Transport transport : {Transport::kRpc, Transport::kSharedMemory, Transport::kRing, Transport::kRpc}) {
      const std::string& address = callers.empty() ? server_->tcp() : server_->unix_socket();
      callers.push_back(std::make_unique<Caller>(address, transport, calls_, answers_, generations_, callers.size(), end));
    }
    SwapUntil(end, admin->get());
    for (const auto& caller : callers) caller->Join();
    return Report(callers, server_->Stop());
  }

 private:
  // Two checkpoints of the same shapes, and what a server of each answers.
  absl::Status Prepare() {
    for (int variant = 0; variant < kVariants; ++variant) {
      const WeightFn weights = RcWeights(kHidden, kIntermediate);
      const int shift = variant * kLayers * kExperts;
      CheckpointBuilder builder;
      AddModel({.family = ModelFamily::kMixtral, .num_layers = kLayers, .hidden = kHidden, .intermediate = kIntermediate,
                .num_experts = kExperts, .top_k = kTopK,
                .weights = [weights, shift](int expert, int matrix, int64_t i) { return weights(expert + shift, matrix, i); },
                .keep_reference = false},
               &builder);
      folders_.push_back(folder_.MakeDir(absl::StrCat("weights", variant)));
      if (absl::Status status = builder.Write(folders_.back()); !status.ok()) return status;
      const absl::StatusOr<std::unique_ptr<SoakServer>> server = Serve(variant, absl::StrCat("answers", variant));
      if (!server.ok()) return server.status();
      const auto client = client::MoeClient::Connect((*server)->tcp(), {.transport = Transport::kRpc});
      if (!client.ok()) return client.status();
      answers_.emplace_back();
      for (const client::ForwardCall& call : calls_.calls) {
        absl::StatusOr<client::ForwardResult> result = (*client)->Forward(call);
        if (!result.ok()) return result.status();
        answers_.back().push_back(std::move(result->data));
      }
    }
    if (answers_[0] == answers_[1]) return absl::InternalError("both checkpoints give the same answers");
    return absl::OkStatus();
  }

  // Deterministic, so that a call has the same answer in any company.
  absl::StatusOr<std::unique_ptr<SoakServer>> Serve(int variant, const std::string& name) const {
    return SoakServer::Start(options_.moed, folder_.MakeDir(name),
                             {absl::StrCat(kModel, "=", folders_[static_cast<size_t>(variant)])}, {"--deterministic"});
  }

  void SwapUntil(steady_clock::time_point end, client::MoeClient* admin) {
    for (auto next = steady_clock::now() + kBetweenSwaps; next < end; next += kBetweenSwaps) {
      std::this_thread::sleep_until(next);
      const uint64_t generation = ++generations_.begun;
      const auto begin = steady_clock::now();
      const std::string& folder = folders_[(generation - 1) % kVariants];
      const auto status = admin->SwapModel(kModel, folder, false, {.timeout = std::chrono::minutes(2)});
      swaps_.push_back({begin, steady_clock::now()});
      if (!status.ok()) return problems_.push_back(absl::StrCat("swap: ", status.status().ToString()));
      generations_.flipped = generation;
    }
  }

  bool BesideSwap(const Sample& sample) const {
    return std::any_of(swaps_.begin(), swaps_.end(),
                       [&](const Sample& swap) { return sample.begin < swap.end && swap.begin < sample.end; });
  }

  static double Micros(const Sample& sample) {
    return std::chrono::duration<double, std::micro>(sample.end - sample.begin).count();
  }

  bool Report(const std::vector<std::unique_ptr<Caller>>& callers, int exit_code) {
    client::LatencyHistogram beside, between, swaps;
    size_t errors = 0, wrong = 0;
    for (const auto& caller : callers) {
      for (const Sample& sample : caller->samples()) {
        (BesideSwap(sample) ? beside : between).Add(static_cast<int64_t>(Micros(sample) * 1000));
      }
      errors += caller->errors().size(), wrong += caller->wrong().size();
      problems_.insert(problems_.end(), caller->errors().begin(), caller->errors().end());
      problems_.insert(problems_.end(), caller->wrong().begin(), caller->wrong().end());
    }
    for (const Sample& swap : swaps_) swaps.Add(static_cast<int64_t>(Micros(swap) * 1000));
    const int wanted = std::max(1, static_cast<int>(options_.seconds / std::chrono::duration<double>(kBetweenSwaps).count()) - 1);
    client::Table table({"swaps under load", ">found", ">wanted", "result"});
    bool good = true;
    const auto check = [&](const std::string& what, const std::string& found, const std::string& want, bool ok) {
      table.Add({what, found, want, want.empty() ? "" : ok ? "ok" : "FAILED"});
      good &= ok;
    };
    const auto times = [&](const std::string& what, const client::LatencyHistogram& of) {
      check(what, absl::StrFormat("%d, p50 %.2f ms, p99 %.2f ms, max %.2f ms", of.count(), of.QuantileMicros(0.5) / 1e3,
                                  of.QuantileMicros(0.99) / 1e3, of.QuantileMicros(1) / 1e3), "", true);
    };
    check("swaps", absl::StrCat(swaps_.size()), absl::StrCat(">= ", wanted), swaps_.size() >= static_cast<size_t>(wanted));
    times("time of a swap", swaps);
    times("calls beside a swap", beside);
    times("calls between swaps", between);
    check("calls beside and between", absl::StrCat(beside.count() + between.count()), "> 0 of each",
          beside.count() > 0 && between.count() > 0);
    check("calls that failed", absl::StrCat(errors), "0", errors == 0);
    check("answers of mixed or other weights", absl::StrCat(wrong), "0", wrong == 0);
    check("problems", absl::StrCat(problems_.size()), "0", problems_.empty());
    check("exit code after SIGTERM", absl::StrCat(exit_code), "0", exit_code == 0);
    std::printf("%s", table.Text().c_str());
    for (size_t i = 0; i < std::min(problems_.size(), kShownProblems); ++i) std::printf("  %s\n", problems_[i].c_str());
    std::printf("soak: swap %s\n", good ? "passed" : "FAILED");
    return good;
  }

  const SwapLoadOptions options_;
  const TempDir folder_;
  std::vector<std::string> folders_;  // of the weights, one for each variant
  const Calls calls_;
  Answers answers_;
  Generations generations_;
  std::unique_ptr<SoakServer> server_;
  std::vector<Sample> swaps_;
  std::vector<std::string> problems_;
};

}  // namespace

absl::StatusOr<bool> RunSwapLoad(const SwapLoadOptions& options) { return SwapLoad(options).Run(); }

}  // namespace moed::testing
