// CPU benchmark: whole layers on the shapes that matter, as fractions of ceilings measured in the same run.
//
//   cpu_bench [--json FILE] [--threads N] [--min-time SECONDS] [FILTER]
//
// FILTER is a substring of "SHAPE/SCHEME/BACKEND/TOKENS". Google Benchmark runs and times each layer (manual time, one
// layer call an iteration); before and after every layer the ceilings are measured again and the median of all windows is
// the denominator, since the machine's speed drifts. Weights are cold: each call takes another random routing, and the
// experts of a shape are far larger than the caches.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "bench/ceilings.h"
#include "bench/report.h"
#include "kernels/backends.h"
#include "tests/support/random_layer.h"

namespace moed::bench {
namespace {

struct Shape {
  const char* name;
  int experts, top_k;
  int64_t hidden, intermediate;
};
constexpr Shape kShapes[] = {{"qwen3-30b", 128, 8, 2048, 768}};

struct Options {
  std::string json, filter;
  int threads = 0;
  double min_time = 1.0;
};

struct NamedScheme {
  const char* name;
  QuantScheme scheme;
};

QuantScheme Quantized(ElementType element, ScaleType scale, GroupShape group) {
  LinearScheme linear;
  linear.weights.element = element;
  linear.weights.scale = scale;
  linear.weights.group = group;
  return UniformScheme(linear);
}

// The schemes of published checkpoints, one of each kind of weights.
std::vector<NamedScheme> Schemes() {
  std::vector<NamedScheme> all = {{"int4-g128", testing::Int4Scheme(128, ScaleType::kF16)},
                                  {"int4-g32", testing::Int4Scheme(32, ScaleType::kBf16)},
                                  {"int4-g128-asymmetric", testing::Int4Scheme(128, ScaleType::kF16)},
                                  {"int8", Quantized(ElementType::kInt8, ScaleType::kBf16, {1, 0})},
                                  {"int8-a8", Quantized(ElementType::kInt8, ScaleType::kBf16, {1, 0})},
                                  {"fp8-block128", Quantized(ElementType::kFp8E4m3, ScaleType::kF32, {128, 128})},
                                  {"mxfp4", Quantized(ElementType::kFp4E2m1, ScaleType::kE8m0, {1, 32})},
                                  {"nvfp4", Quantized(ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16})},
                                  {"bf16", testing::PlainScheme(ElementType::kBf16)}};
  for (NamedScheme& named : all) {
    for (LinearScheme* linear : {&named.scheme.gate, &named.scheme.up, &named.scheme.down}) {
      linear->weights.zero_points = std::string(named.name) == "int4-g128-asymmetric";
      if (std::string(named.name) == "nvfp4") linear->weights.global_scale = GlobalScale::kMultiplier;
      if (std::string(named.name) == "int8-a8") linear->input.mode = ActivationMode::kDynamic;  // int8, per token
    }
  }
  return all;
}

struct Case {
  Shape shape;
  const Backend* backend = nullptr;
  NamedScheme scheme;
  int64_t tokens = 0;
  std::string name() const {
    return std::string(shape.name) + "/" + scheme.name + "/" + backend->Name() + "/" + std::to_string(tokens);
  }
};

// A few distinct experts are made and handed out in turn: their values do not matter for speed, their bytes are all packed.
class RepeatedExperts : public ExpertReader {
 public:
  explicit RepeatedExperts(const MoeDesc& desc) : few_(Few(desc), 1) {}
  absl::Status Read(int expert, ExpertWeights* out) const override { return few_.Read(expert % 2, out); }

 private:
  static MoeDesc Few(MoeDesc desc) {
    desc.num_experts = 2;
    return desc;
  }
  testing::RandomExperts few_;
};

class Runner {
 public:
  explicit Runner(const Options& options)
      : options_(options), device_(ThisDevice()), pool_(options.threads > 0 ? options.threads : device_.cores),
        stream_(size_t{512} << 20) {}

  std::vector<Row> Run() {
    for (const Case& one : Cases()) RunCase(one);
    const double read = Median(read_), fma = Median(fma_);
    for (Row& row : rows_) {
      const bool memory = row.ceiling == "read stream";
      row.ceiling_value = memory ? read / 1e9 : fma / 1e9;
      row.ceiling_unit = memory ? "GB/s" : "GFLOPS";
      row.fraction = work_[&row - rows_.data()] / (row.ms / 1e3) / (memory ? read : fma);
    }
    return rows_;
  }

 private:
  std::vector<Case> Cases() const {
    std::vector<Case> cases;
    for (const Shape& shape : kShapes) {
      for (const NamedScheme& scheme : Schemes()) {
        const MoeDesc desc = testing::MakeDesc(shape.experts, shape.top_k, shape.hidden, shape.intermediate, scheme.scheme);
        for (const Backend* backend : LinkedBackends()) {
          if (!backend->Automatic() || !backend->Check(desc, device_).ok()) continue;
          // The portable code takes long and says little, where another backend is there: only when it is asked for.
          if (backend->Name() == "cpu_generic" && options_.filter.find("generic") == std::string::npos) continue;
          for (int64_t tokens : {1, 4, 16, 64, 512}) {
            Case one{shape, backend, scheme, tokens};
            if (one.name().find(options_.filter) != std::string::npos) cases.push_back(one);
          }
        }
      }
    }
    return cases;
  }

  void MeasureCeilings() {
    read_.push_back(stream_.Measure(pool_, device_.isa));
    fma_.push_back(MeasureFma(pool_, device_.isa));
  }

  // The prepared layer is kept while the next case needs the same one.
  void PrepareFor(const Case& one, const MoeDesc& desc) {
    const std::string key = one.name().substr(0, one.name().rfind('/'));
    if (key == prepared_key_) return;
    prepared_.reset();
    prepared_ = *one.backend->Prepare(desc, RepeatedExperts(desc), pool_);
    prepared_key_ = key;
  }

  void RunCase(const Case& one) {
    const MoeDesc desc = testing::MakeDesc(one.shape.experts, one.shape.top_k, one.shape.hidden, one.shape.intermediate, one.scheme.scheme);
    PrepareFor(one, desc);
    std::vector<testing::RandomBatch> batches;
    for (uint64_t seed = 0; seed < 16; ++seed) batches.emplace_back(desc, one.tokens, desc.top_k, DType::kBf16, seed);
    std::vector<std::byte> storage(prepared_->WorkspaceBytes(one.tokens, desc.top_k) + 64);
    ExecContext context;
    context.pool = &pool_;
    context.workspace = std::span<std::byte>(storage).subspan((64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64);
    std::vector<uint16_t> out(one.tokens * desc.hidden);

    std::vector<double> times;
    size_t turn = 0;
    benchmark::RegisterBenchmark(one.name().c_str(), [&](benchmark::State& state) {
      for (auto _ : state) {
        const testing::RandomBatch& batch = batches[turn++ % batches.size()];
        const auto start = std::chrono::steady_clock::now();
        const absl::Status status = prepared_->Run(batch.view(), {out.data(), DType::kBf16, one.tokens, desc.hidden}, context);
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        if (!status.ok()) state.SkipWithError("Run failed");
        state.SetIterationTime(seconds);
        times.push_back(seconds);
      }
    })->UseManualTime()->MinTime(options_.min_time);
    MeasureCeilings();
    benchmark::ConsoleReporter quiet(benchmark::ConsoleReporter::OO_None);
    std::ostream nowhere(nullptr);
    quiet.SetOutputStream(&nowhere);
    quiet.SetErrorStream(&nowhere);
    benchmark::RunSpecifiedBenchmarks(&quiet);
    benchmark::ClearRegisteredBenchmarks();
    MeasureCeilings();
    AddRow(one, desc, batches, Median(times));
  }

  void AddRow(const Case& one, const MoeDesc& desc, const std::vector<testing::RandomBatch>& batches, double seconds) {
    // Up to about two rows an expert a layer is bound by reading weights, above by arithmetic.
    const double rows_per_expert = static_cast<double>(one.tokens * desc.top_k) / desc.num_experts;
    const bool memory = rows_per_expert <= 2.0;
    double touched = 0.0;
    for (const testing::RandomBatch& batch : batches) {
      std::vector<int32_t> ids = batch.ids;
      std::sort(ids.begin(), ids.end());
      touched += static_cast<double>(std::unique(ids.begin(), ids.end()) - ids.begin()) / static_cast<double>(batches.size());
    }
    const double bytes = touched * static_cast<double>(prepared_->ResidentBytes()) / desc.num_experts;
    const double flops = 6.0 * static_cast<double>(one.tokens * desc.top_k * desc.hidden * desc.intermediate);
    Row row;
    row.bench = "cpu";
    row.shape = one.shape.name;
    row.scheme = one.scheme.name;
    row.backend = one.backend->Name();
    row.tokens = one.tokens;
    row.ms = seconds * 1e3;
    row.ceiling = memory ? "read stream" : "float FMA";
    rows_.push_back(row);
    work_.push_back(memory ? bytes : flops);
  }

  static double Median(std::vector<double> values) {
    if (values.empty()) return 0.0;
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return values[values.size() / 2];
  }

  const Options options_;
  const DeviceInfo device_;
  WorkerPool pool_;
  const ReadStream stream_;
  std::unique_ptr<PreparedMoe> prepared_;
  std::string prepared_key_;
  std::vector<double> read_, fma_;
  std::vector<Row> rows_;
  std::vector<double> work_;  // bytes or floating-point operations of each row
};

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) {
  moed::bench::Options options;
  CLI::App app("Whole MoE layers on the CPU backends, as fractions of the ceilings measured in the same run");
  app.add_option("--json", options.json, "also write the rows to this file");
  app.add_option("--threads", options.threads, "worker threads; default: all usable processors");
  app.add_option("--min-time", options.min_time, "seconds per case");
  app.add_option("FILTER", options.filter, "only cases whose SHAPE/SCHEME/BACKEND/TOKENS contains this");
  CLI11_PARSE(app, argc, argv);
  const std::vector<moed::bench::Row> rows = moed::bench::Runner(options).Run();
  if (rows.empty()) {
    std::fprintf(stderr, "no case contains '%s'\n", options.filter.c_str());
    return 2;
  }
  moed::bench::PrintTable(rows);
  return options.json.empty() || moed::bench::WriteJson(rows, options.json) ? 0 : 1;
}
