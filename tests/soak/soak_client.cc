#include "tests/soak/soak_client.h"

#include <chrono>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/soak/soak_caller.h"

namespace moed::testing {
namespace {

using std::chrono::steady_clock;

void PrintCounts(const SoakReport& report) {
  std::string line = "COUNTS";
  for (size_t i = 0; i < kSeenNames.size(); ++i) absl::StrAppend(&line, " ", kSeenNames[i], "=", report.counts[i].load());
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

}  // namespace

absl::Status RunSoakClient(const SoakClientOptions& options) {
  const auto end =
      steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(std::chrono::duration<double>(options.seconds));
  absl::StatusOr<std::unique_ptr<client::MoeClient>> client = client::MoeClient::Connect(options.unix_socket);
  if (!client.ok()) return client.status();
  const absl::StatusOr<client::ServerStatus> status = (*client)->Status();
  if (!status.ok()) return status.status();
  const absl::StatusOr<SoakCases> cases = MakeCases(*status);
  if (!cases.ok()) return cases.status();
  const absl::StatusOr<SoakAnswers> answers = SoakAnswers::Read(options.answers);
  if (!answers.ok()) return answers.status();
  SoakReport report;
  std::vector<std::thread> threads;
  for (int i = 0; i < options.threads; ++i) {
    threads.emplace_back([&, i] {
      SoakCaller caller(options, *cases, *answers, options.seed * 1000 + static_cast<uint32_t>(i), &report);
      while (steady_clock::now() < end) caller.Step();
    });
  }
  while (steady_clock::now() < end) {
    std::this_thread::sleep_for(std::min<steady_clock::duration>(std::chrono::seconds(1), end - steady_clock::now()));
    PrintCounts(report);
  }
  for (std::thread& thread : threads) thread.join();
  PrintCounts(report);
  return absl::OkStatus();
}

}  // namespace moed::testing
