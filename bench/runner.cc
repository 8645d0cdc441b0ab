#include "bench/runner.h"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdio>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "kernels/backends.h"

namespace moed::bench {
namespace {

absl::Status In(const std::string& name, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(name, ": ", status.message()));
}

// Google Benchmark's own report, which nobody reads.
void RunQuietly() {
  benchmark::ConsoleReporter quiet(benchmark::ConsoleReporter::OO_None);
  std::ostream nowhere(nullptr);
  quiet.SetOutputStream(&nowhere);
  quiet.SetErrorStream(&nowhere);
  benchmark::RunSpecifiedBenchmarks(&quiet);
  benchmark::ClearRegisteredBenchmarks();
}

}  // namespace

Runner::Runner(const RunOptions& options)
    : options_(options), device_(ThisDevice()), pool_(options.threads > 0 ? options.threads : device_.cores),
      ceilings_(pool_, device_.isa) {}

absl::StatusOr<std::vector<Row>> Runner::Run() {
  for (const Case& one : Cases()) {
    const absl::Status status = RunCase(one);
    if (!status.ok()) return In(one.name(), status);
  }
  std::vector<Row> rows;
  for (const Measured& measured : measured_) {
    Row row = measured.row;
    row.ceiling = CeilingName(measured.ceiling);
    row.ceiling_unit = CeilingUnit(measured.ceiling);
    if (const std::optional<double> value = ceilings_.Of(measured.ceiling)) {
      row.ceiling_value = *value / 1e9;
      row.fraction = measured.work / (row.ms / 1e3) / *value;
    }
    rows.push_back(row);
  }
  return rows;
}

// The portable code takes long and says little where another backend is there: then only when it is asked for.
std::vector<const Backend*> Runner::BackendsFor(const MoeDesc& desc) const {
  std::vector<const Backend*> fitting;
  for (const Backend* backend : LinkedBackends()) {
    if (backend->Automatic() && backend->Check(desc, device_).ok()) fitting.push_back(backend);
  }
  if (fitting.size() > 1 && options_.filter.find("generic") == std::string::npos) {
    std::erase_if(fitting, [](const Backend* backend) { return backend->Name() == "cpu_generic"; });
  }
  return fitting;
}

std::vector<Runner::Case> Runner::Cases() const {
  std::vector<Case> cases;
  for (const Shape& shape : options_.shapes) {
    for (const NamedScheme& scheme : Schemes()) {
      for (const Backend* backend : BackendsFor(DescOf(shape, scheme.scheme))) {
        for (const int64_t tokens : options_.tokens) {
          Case one{shape, scheme, backend, tokens};
          if (one.name().find(options_.filter) != std::string::npos) cases.push_back(std::move(one));
        }
      }
    }
  }
  return cases;
}

absl::Status Runner::PrepareFor(const Case& one, const MoeDesc& desc) {
  if (one.layer() == prepared_key_) return absl::OkStatus();
  prepared_.reset();
  prepared_key_.clear();
  const std::string key = absl::StrCat(one.shape.name, "/", one.scheme.name);
  if (key != experts_key_) {
    experts_.reset();
    experts_ = std::make_unique<RepeatedExperts>(desc);
    experts_key_ = key;
  }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> prepared = one.backend->Prepare(desc, *experts_, pool_);
  if (!prepared.ok()) return prepared.status();
  prepared_ = *std::move(prepared);
  prepared_key_ = one.layer();
  return absl::OkStatus();
}

absl::StatusOr<double> Runner::MedianSeconds(const Case& one, TimedCalls* calls) {
  std::vector<double> times;
  absl::Status status;
  benchmark::RegisterBenchmark(one.name().c_str(), [&](benchmark::State& state) {
    for (auto _ : state) {
      const absl::StatusOr<double> seconds = calls->Next();
      if (!seconds.ok()) {
        status = seconds.status();
        state.SkipWithError("the call failed");
        break;
      }
      state.SetIterationTime(*seconds);
      times.push_back(*seconds);
    }
  })->UseManualTime()->MinTime(options_.min_time);
  absl::StatusOr<double> seconds = calls->Next();  // not counted: it touches the workspace for the first time
  if (!seconds.ok()) return seconds.status();
  RunQuietly();
  if (!status.ok()) return status;
  constexpr size_t kFewest = 3;
  while (times.size() < kFewest) {
    seconds = calls->Next();
    if (!seconds.ok()) return seconds.status();
    times.push_back(*seconds);
  }
  return Median(times);
}

absl::Status Runner::RunCase(const Case& one) {
  const MoeDesc desc = DescOf(one.shape, one.scheme.scheme);
  const absl::Status status = PrepareFor(one, desc);
  if (!status.ok()) return status;
  TimedCalls calls(*prepared_, desc, one.tokens, pool_);
  ceilings_.Measure();
  const absl::StatusOr<double> seconds = MedianSeconds(one, &calls);
  ceilings_.Measure();
  if (!seconds.ok()) return seconds.status();
  const double rows_per_expert = static_cast<double>(one.tokens * desc.top_k) / desc.num_experts;
  Measured measured{MakeRow(one, desc, *seconds), CeilingOf(desc.scheme, one.backend->Name(), rows_per_expert), 0.0};
  measured.work = measured.row.operations;
  if (measured.ceiling == Ceiling::kReadStream) {
    measured.work = calls.TouchedExperts() * static_cast<double>(prepared_->ResidentBytes()) / desc.num_experts;
  }
  measured_.push_back(measured);
  return absl::OkStatus();
}

Row Runner::MakeRow(const Case& one, const MoeDesc& desc, double seconds) const {
  Row row;
  row.bench = "cpu";
  row.shape = one.shape.name;
  row.scheme = one.scheme.name;
  row.backend = one.backend->Name();
  row.threads = pool_.threads();
  row.tokens = one.tokens;
  row.ms = seconds * 1e3;
  row.operations = 6.0 * static_cast<double>(one.tokens * desc.top_k) * static_cast<double>(desc.hidden * desc.intermediate);
  return row;
}

absl::StatusOr<std::vector<Row>> Runner::RunPair() {
  std::vector<Row> rows;
  const std::span<const Shape> shapes = PairShapes();
  for (const NamedScheme& scheme : Schemes()) {
    if (scheme.name != "bf16" && scheme.name != "int8") continue;
    for (const Backend* backend : BackendsFor(DescOf(shapes[0], scheme.scheme))) {
      const Case narrow{shapes[0], scheme, backend, 64}, wide{shapes[1], scheme, backend, 64};
      if (narrow.name().find(options_.filter) == std::string::npos) continue;
      const absl::Status status = RunOnePair(narrow, wide, &rows);
      if (!status.ok()) return In(narrow.name(), status);
    }
  }
  return rows;
}

absl::Status Runner::RunOnePair(const Case& narrow, const Case& wide, std::vector<Row>* rows) {
  const Case* const pair[] = {&narrow, &wide};
  MoeDesc descs[2];
  std::unique_ptr<PreparedMoe> layers[2];
  std::unique_ptr<TimedCalls> calls[2];
  for (int at = 0; at < 2; ++at) {
    descs[at] = DescOf(pair[at]->shape, pair[at]->scheme.scheme);
    absl::StatusOr<std::unique_ptr<PreparedMoe>> layer =
        pair[at]->backend->Prepare(descs[at], RepeatedExperts(descs[at]), pool_);
    if (!layer.ok()) return layer.status();
    layers[at] = *std::move(layer);
    calls[at] = std::make_unique<TimedCalls>(*layers[at], descs[at], pair[at]->tokens, pool_);
  }
  constexpr int kWarmUps = 3, kCalls = 20;
  std::vector<double> times[2];
  for (int turn = 0; turn < kWarmUps + kCalls; ++turn) {
    for (int at = 0; at < 2; ++at) {
      const absl::StatusOr<double> seconds = calls[at]->Next();
      if (!seconds.ok()) return seconds.status();
      if (turn >= kWarmUps) times[at].push_back(*seconds);
    }
  }
  for (int at = 0; at < 2; ++at) {
    rows->push_back(MakeRow(*pair[at], descs[at], Median(times[at])));
    rows->back().bench = "cpu-pair";
  }
  return absl::OkStatus();
}

void PrintPairs(const std::vector<Row>& rows) {
  for (size_t at = 0; at + 1 < rows.size(); at += 2) {
    const Row &narrow = rows[at], &wide = rows[at + 1];
    std::printf("%-6s %-14s %s takes %.2f times as long as %s\n", narrow.scheme.c_str(), narrow.backend.c_str(),
                narrow.shape.c_str(), narrow.ms / wide.ms, wide.shape.c_str());
  }
}

}  // namespace moed::bench
