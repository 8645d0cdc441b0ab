// CPU benchmark: whole layers on the shapes that matter, as fractions of ceilings measured in the same run.
//
//   cpu_bench [OPTIONS] [FILTER]
//
// FILTER is a substring of "SHAPE/SCHEME/BACKEND/TOKENS". Google Benchmark runs and times each layer (manual time, one layer
// call an iteration). docs/performance.md has the method.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include "absl/status/statusor.h"
#include "bench/cases.h"
#include "bench/peers.h"
#include "bench/report.h"
#include "bench/runner.h"

namespace moed::bench {
namespace {

struct Options {
  RunOptions run{{}, {1, 4, 16, 64, 512}, "", 0, 0.5};
  std::string shapes, json, peers;
  bool pair = false;
};

// Prints on stderr and returns the exit code of wrong options.
int Refuse(const std::string& text) {
  std::fprintf(stderr, "cpu_bench: %s\n", text.c_str());
  return 2;
}

int RunWith(Options options) {
  absl::StatusOr<std::vector<Shape>> shapes = ChooseShapes(options.shapes, options.run.filter);
  if (!shapes.ok()) return Refuse(std::string(shapes.status().message()));
  options.run.shapes = *std::move(shapes);
  std::vector<PeerTime> peers;
  if (!options.peers.empty()) {
    absl::StatusOr<std::vector<PeerTime>> read = ReadPeers(options.peers);
    if (!read.ok()) return Refuse(std::string(read.status().message()));
    peers = *std::move(read);
  }
  Runner runner(options.run);
  absl::StatusOr<std::vector<Row>> rows = options.pair ? runner.RunPair() : runner.Run();
  if (!rows.ok()) {
    std::fprintf(stderr, "cpu_bench: %s\n", rows.status().ToString().c_str());
    return 1;
  }
  if (rows->empty()) {
    std::string names;
    for (const Shape& shape : options.run.shapes) names += (names.empty() ? "" : ", ") + std::string(shape.name);
    return Refuse("no case of the shapes " + names + " contains \"" + options.run.filter + "\"");
  }
  AddPeers(peers, &*rows);
  PrintTable(*rows);
  if (options.pair) PrintPairs(*rows);
  return options.json.empty() || WriteJson(*rows, options.json) ? 0 : 1;
}

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) {
  moed::bench::Options options;
  CLI::App app("Whole MoE layers on the CPU backends, as fractions of the ceilings measured in the same run");
  moed::bench::RunOptions& run = options.run;
  app.add_option("--json", options.json, "also write the rows to this file");
  app.add_option("--threads", run.threads, "worker threads; default: all usable processors")->check(CLI::Range(1, 4096));
  CLI::Option* const pair =
      app.add_flag("--pair-b03", options.pair, "only this: experts 176 and 192 wide, calls alternating, and the times' ratio");
  app.add_option("--min-time", run.min_time, "seconds per case")
      ->check(CLI::PositiveNumber)
      ->capture_default_str()
      ->excludes(pair);
  app.add_option("--tokens", run.tokens, "sizes of a call, with commas between")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::Range(int64_t{1}, moed::bench::kMaxTokens))
      ->capture_default_str()
      ->excludes(pair);
  app.add_option("--shapes", options.shapes, "all, or names with commas between; default: what FILTER names, else qwen3-30b")
      ->excludes(pair);
  app.add_option("--peers", options.peers, "times of other programs: a JSON list of {shape, scheme, tokens, peer, ms}")
      ->excludes(pair);
  app.add_option("FILTER", run.filter, "only cases whose SHAPE/SCHEME/BACKEND/TOKENS contains this");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return moed::bench::RunWith(std::move(options));
}
