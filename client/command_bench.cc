// The command bench: load on one layer, latencies and throughput, the server's time apart from the transport's.
#include <cstdio>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/load.h"
#include "client/moectl.h"
#include "client/table.h"

namespace moed::client {
namespace {

struct BenchOptions {
  int32_t layer = 0;
  std::vector<int64_t> tokens = {1};
  std::vector<int64_t> concurrency = {1};
  double seconds = 5;
  std::string dtype = "bf16";
  std::vector<std::string> transports = {"auto"};
  bool random_ids = false;
  uint64_t seed = 1;
};

struct BenchRow {
  LoadOptions load;
  LoadResult result;
};

// Fills H, E and k from the status of the model that the call will reach.
absl::Status FindShape(const Globals& globals, int32_t layer, LoadOptions* load) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return client.status();
  const absl::StatusOr<ServerStatus> status = (*client)->Status(globals.model, globals.Call());
  if (!status.ok()) return status.status();
  if (status->models.size() != 1) {
    std::string names;
    for (const ModelStatus& model : status->models) absl::StrAppend(&names, names.empty() ? "" : ", ", model.name);
    return absl::InvalidArgumentError(
        absl::StrCat("--model: wanted one of the server's ", status->models.size(), " models (", names, "), got none"));
  }
  const ModelStatus& model = status->models.front();
  std::string layers;
  for (const LayerStatus& each : model.layers) {
    if (each.layer == layer) {
      load->hidden = model.hidden;
      load->num_experts = model.num_experts;
      load->top_k = model.top_k;
      const bool usable = model.hidden > 0 && model.top_k > 0 && model.top_k <= model.num_experts;
      return usable ? absl::OkStatus()
                    : absl::InternalError(absl::StrCat("status of model ", model.name,
                                                       ": wanted H > 0 and 0 < k <= E, got H=", model.hidden,
                                                       " k=", model.top_k, " E=", model.num_experts));
    }
    absl::StrAppend(&layers, layers.empty() ? "" : ", ", each.layer);
  }
  return absl::NotFoundError(absl::StrCat("--layer: wanted one of ", layers, " (model ", model.name, "), got ", layer));
}

DType ParseDType(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kF8E4m3, DType::kI8}) {
    if (name == DTypeName(dtype)) return dtype;
  }
  return DType::kBf16;
}

Transport ParseTransport(const std::string& name) {
  for (const Transport transport : {Transport::kRpc, Transport::kSharedMemory, Transport::kRing}) {
    if (name == TransportName(transport)) return transport;
  }
  return Transport::kAuto;
}

Json ToJson(const BenchRow& row) {
  const LoadOptions& load = row.load;
  const LoadResult& result = row.result;
  const double calls = static_cast<double>(result.calls > 0 ? result.calls : 1);
  return {{"layer", load.layer},
          {"tokens", load.tokens},
          {"concurrency", load.concurrency},
          {"dtype", DTypeName(load.dtype)},
          {"transport", load.server.rfind("unix:", 0) == 0 ? "unix" : "tcp"},
          {"memory", TransportName(load.transport)},
          {"bytes", load.tokens * load.hidden * static_cast<int64_t>(ElementBytes(load.dtype))},
          {"seconds", result.seconds},
          {"calls", result.calls},
          {"errors", result.errors},
          {"first_error", result.first_error},
          {"tokens_per_s", static_cast<double>(result.calls * load.tokens) / result.seconds},
          {"p50_us", result.latency.QuantileMicros(0.5)},
          {"p90_us", result.latency.QuantileMicros(0.9)},
          {"p99_us", result.latency.QuantileMicros(0.99)},
          {"p999_us", result.latency.QuantileMicros(0.999)},
          {"server_p50_us", result.server.QuantileMicros(0.5)},
          {"server_p99_us", result.server.QuantileMicros(0.99)},
          {"transport_p50_us", result.transport.QuantileMicros(0.5)},
          {"transport_p99_us", result.transport.QuantileMicros(0.99)},
          {"server_mean_us",
           {{"receive", static_cast<double>(result.sum.receive_us) / calls},
            {"queue", static_cast<double>(result.sum.queue_us) / calls},
            {"compute", static_cast<double>(result.sum.compute_us) / calls},
            {"send", static_cast<double>(result.sum.send_us) / calls}}},
          {"batch_rows_mean", static_cast<double>(result.sum.batch_rows) / calls}};
}

void Print(const std::vector<BenchRow>& rows) {
  Table table({">layer", "transport", ">tokens", ">workers", ">calls", ">errors", ">tokens/s", ">p50 us", ">p90 us", ">p99 us",
               ">p99.9 us", ">server p50", ">server p99", ">transport p50", ">transport p99"});
  const auto micros = [](const LatencyHistogram& histogram, double q) {
    return absl::StrFormat("%.1f", histogram.QuantileMicros(q));
  };
  for (const BenchRow& row : rows) {
    const LoadResult& r = row.result;
    table.Add({absl::StrCat(row.load.layer), TransportName(row.load.transport), absl::StrCat(row.load.tokens), absl::StrCat(row.load.concurrency),
               absl::StrCat(r.calls), absl::StrCat(r.errors),
               absl::StrFormat("%.0f", static_cast<double>(r.calls * row.load.tokens) / r.seconds), micros(r.latency, 0.5),
               micros(r.latency, 0.9), micros(r.latency, 0.99), micros(r.latency, 0.999), micros(r.server, 0.5),
               micros(r.server, 0.99), micros(r.transport, 0.5), micros(r.transport, 0.99)});
  }
  std::printf("%s", table.Text().c_str());
  for (const BenchRow& row : rows) {
    if (row.result.errors > 0)
      std::printf("%lld calls failed, the first with %s\n", static_cast<long long>(row.result.errors),
                  row.result.first_error.c_str());
  }
}

int RunBench(const Globals& globals, const BenchOptions& options) {
  LoadOptions load;
  load.server = globals.server;
  load.connection = globals.connection;
  load.model = globals.model;
  load.layer = options.layer;
  load.seconds = options.seconds;
  load.dtype = ParseDType(options.dtype);
  load.random_ids = options.random_ids;
  load.seed = options.seed;
  load.call = globals.Call();
  if (absl::Status status = FindShape(globals, options.layer, &load); !status.ok()) return Fail(status);
  std::vector<BenchRow> rows;
  bool passed = true;
  const int64_t row_bytes = load.hidden * static_cast<int64_t>(ElementBytes(load.dtype));
  for (int64_t tokens : options.tokens) {
    if (tokens > ClientOptions().max_message_bytes / row_bytes) {
      return Fail(
          absl::InvalidArgumentError(absl::StrCat("--tokens: wanted at most ", ClientOptions().max_message_bytes / row_bytes,
                                                  " rows of ", row_bytes, " bytes in a message, got ", tokens)));
    }
    for (int64_t concurrency : options.concurrency) {
      for (const std::string& transport : options.transports) {
        load.tokens = tokens;
        load.concurrency = concurrency;
        load.transport = ParseTransport(transport);
        absl::StatusOr<LoadResult> result = RunLoad(load);
        if (!result.ok()) return Fail(result.status());
        passed = passed && result->errors == 0 && result->calls > 0;
        rows.push_back({load, *std::move(result)});
      }
    }
  }
  if (globals.json) {
    Json list = Json::array();
    for (const BenchRow& row : rows) list.push_back(ToJson(row));
    PrintJson({{"rows", std::move(list)}, {"passed", passed}});
  } else {
    Print(rows);
  }
  return passed ? kExitOk : kExitCheckFailed;
}

constexpr char kExamples[] = R"(Examples:
  moectl bench --layer 0 --tokens 64 --concurrency 4 --seconds 10
  moectl --server unix:/run/moed.sock bench --layer 0 --tokens 1,16,256 --concurrency 1,8 --seconds 2 --json
  moectl --server unix:/run/moed.sock bench --layer 0 --tokens 64 --transport rpc,shared-memory,ring

Random hidden states, routed by the server's gate or, with --random-ids, by the client. Each worker has a connection of its
own and one call under way. Transport is the time that the caller saw less the server's own.
Exit code 1 when a call failed.)";

}  // namespace

void AddBench(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("bench", "load generator: latencies, tokens/s, server time apart from transport");
  auto options = std::make_shared<BenchOptions>();
  command->add_option("--layer", options->layer, "the layer's number, as in the checkpoint")
      ->required()
      ->check(LayerNumber());
  CLI::Option* tokens = command->add_option("--tokens", options->tokens, "rows of each call; a list M,N,... runs each");
  tokens->delimiter(',')->allow_extra_args(false)->check(Between(1, 1 << 24));
  CLI::Option* workers = command->add_option("--concurrency", options->concurrency, "workers; a list C,D,... runs each");
  workers->delimiter(',')->allow_extra_args(false)->check(Between(1, 1024));
  command->add_option("--seconds", options->seconds, "measured time of each run")
      ->check(Between(0.01, 86400))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype, "of hidden states, and of the answer but for f8e4m3 and i8, which get bf16")
      ->check(CLI::IsMember({"f32", "bf16", "f16", "f8e4m3", "i8"}))
      ->capture_default_str();
  command->add_option("--transport", options->transports, "auto, rpc, shared-memory or ring; a list T,U,... runs each")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(CLI::IsMember({"auto", "rpc", "shared-memory", "ring"}))
      ->capture_default_str();
  command->add_flag("--random-ids", options->random_ids, "send random ids and weights instead of using the server's gate");
  command->add_option("--seed", options->seed, "of the random numbers")->capture_default_str();
  command->footer(kExamples);
  command->callback([&globals, run, options] { *run = [&globals, options] { return RunBench(globals, *options); }; });
}

}  // namespace moed::client
