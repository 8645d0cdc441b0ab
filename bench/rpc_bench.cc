// What a call costs beside its computing, over each transport, next to the bare things that it is made of.
//
//   rpc_bench [FILTER] [--json FILE] [--moed PROGRAM] [--seconds S]
//
// Starts `moed serve --bench-layer`, whose layer only copies its input, and servers of the bare things, each in its own process,
// all at unix sockets. In turn, round after round, each is called some times; a row is the median of a transport's calls, less the
// time that the server computed, and the bare thing's median in the same rounds. Those of a ring are also less what the engine
// takes beside computing for a program that has it in itself, since that is what they replace. Default settings everywhere: no
// environment, no option but the addresses. FILTER: only rows whose "CASE/TRANSPORT" has it. Exit code: 0 ok, 1 a call failed, 2
// usage or set-up.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "bench/rpc_bare.h"
#include "bench/rpc_in_process.h"
#include "client/moed_client.h"

namespace moed::bench {
namespace {

namespace fs = std::filesystem;
using client::Transport;
using std::chrono::steady_clock;

constexpr int64_t kHidden = 7168;  // H of the layer
constexpr int64_t kMostRows = 256;
constexpr int kSpinUs = 50;        // as the client and the server look at a ring before they sleep
constexpr size_t kHeaderBytes = 40;  // of a request without tensors, about

struct Options {
  std::string filter, json, moed;
  double seconds = 1.5;  // of each row
};

// One row: calls of a transport, and what they are compared with.
struct Case {
  std::string name;
  Transport transport;
  int64_t rows;
  bool in_place;   // the caller's tensors are in the session; else they are copied there and back
  std::string bare;  // in words
  std::function<absl::StatusOr<double>()> bare_us;
  double bar;      // the largest ratio that is wanted
  double plus_us;  // and what may be added to it
};

struct Row {
  const Case* what;
  double p50_us = 0, p99_us = 0, compute_us = 0, bare_us = 0;
  double server_us = 0;   // between receiving and answering, beside compute
  double engine_us = 0;   // in process, beside compute; of rings
  double wanted_us() const { return what->bar * bare_us + what->plus_us; }
  double net_us() const { return p50_us - compute_us - engine_us; }
};

double Quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  const size_t at = std::min(values.size() - 1, static_cast<size_t>(q * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(at), values.end());
  return values[at];
}

// A client of the bench layer over one transport, with inputs of one size.
class Caller {
 public:
  static absl::StatusOr<std::unique_ptr<Caller>> Make(const std::string& address, const Case& what) {
    auto client = client::MoeClient::Connect(address, {.own_connection = true, .transport = what.transport});
    if (!client.ok()) return client.status();
    const size_t bytes = static_cast<size_t>(what.rows * kHidden) * 2;
    std::unique_ptr<Caller> caller(new Caller);
    caller->client_ = *std::move(client);
    if (what.in_place) {
      for (int i = 0; i < 2; ++i) {
        absl::StatusOr<client::Buffer> buffer = caller->client_->Allocate(bytes);
        if (!buffer.ok()) return buffer.status();
        caller->buffers_.push_back(*std::move(buffer));
      }
      caller->hidden_ = caller->buffers_[0].bytes(), caller->output_ = caller->buffers_[1].bytes();
    } else {
      caller->own_.resize(2 * bytes);
      caller->hidden_ = std::span(caller->own_).first(bytes), caller->output_ = std::span(caller->own_).last(bytes);
    }
    for (size_t i = 0; i < bytes; ++i) caller->hidden_[i] = static_cast<uint8_t>(i % 61);
    caller->call_.hidden = {client::DType::kBf16, what.rows, kHidden, caller->hidden_};
    if (what.in_place) caller->call_.hidden_owner = caller->buffers_[0].owner();
    caller->ids_.assign(static_cast<size_t>(what.rows), 0), caller->weights_.assign(static_cast<size_t>(what.rows), 1.0f);
    caller->call_.top_k = what.rows > 0 ? 1 : 0;
    caller->call_.ids = caller->ids_, caller->call_.weights = caller->weights_;
    return caller;
  }

  // Microseconds of one call; adds the layer's part in it, and the rest of the server's, to the lists.
  absl::StatusOr<double> Call(std::vector<double>* compute_us, std::vector<double>* server_us) {
    const auto begin = steady_clock::now();
    absl::StatusOr<client::ForwardResult> result = client_->ForwardInto(call_, output_);
    const double micros = std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
    if (!result.ok()) return result.status();
    compute_us->push_back(static_cast<double>(result->timing.compute_us));
    server_us->push_back(static_cast<double>(result->timing.receive_us + result->timing.queue_us + result->timing.send_us));
    return micros;
  }

  bool Right() const { return std::equal(hidden_.begin(), hidden_.end(), output_.begin(), output_.end()); }

 private:
  std::unique_ptr<client::MoeClient> client_;
  std::vector<client::Buffer> buffers_;
  std::vector<uint8_t> own_;
  std::span<uint8_t> hidden_, output_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
  client::ForwardCall call_;
};

absl::StatusOr<Row> Measure(const std::string& address, const Case& what, InProcess* in_process, double seconds) {
  absl::StatusOr<std::unique_ptr<Caller>> caller = Caller::Make(address, what);
  if (!caller.ok()) return caller.status();
  std::vector<double> ours, compute, server, bare, engine;
  constexpr int kPerRound = 20;
  const auto end = steady_clock::now() + std::chrono::duration<double>(seconds);
  for (int round = 0; round < 3 || steady_clock::now() < end; ++round) {
    for (int i = 0; i < kPerRound; ++i) {
      const absl::StatusOr<double> micros = (*caller)->Call(&compute, &server);
      if (!micros.ok()) return micros.status();
      if (round > 0) ours.push_back(*micros);
    }
    for (int i = 0; i < kPerRound; ++i) {
      const absl::StatusOr<double> micros = what.bare_us();
      if (!micros.ok()) return micros.status();
      if (round > 0) bare.push_back(*micros);
    }
    for (int i = 0; i < kPerRound && what.transport == Transport::kRing; ++i) {
      const absl::StatusOr<double> micros = in_process->Call(what.rows);
      if (!micros.ok()) return micros.status();
      if (round > 0) engine.push_back(*micros);
    }
  }
  if (!(*caller)->Right()) return absl::InternalError(absl::StrCat(what.name, ": the answer is not the input"));
  return Row{&what, Quantile(ours, 0.5), Quantile(ours, 0.99), Quantile(compute, 0.5), Quantile(bare, 0.5), Quantile(server, 0.5),
             Quantile(engine, 0.5)};
}

// The bare things, made once.
struct Bare {
  std::unique_ptr<Echo> tuned, defaults;
  std::unique_ptr<PingPong> ping_pong, looking;  // asleep until woken; looking at the word for some time before

  static absl::StatusOr<Bare> Start(const std::string& folder) {
    Bare bare;
    absl::StatusOr<std::unique_ptr<Echo>> tuned = Echo::Start(folder + "/tuned.sock", true);
    if (!tuned.ok()) return tuned.status();
    absl::StatusOr<std::unique_ptr<Echo>> defaults = Echo::Start(folder + "/defaults.sock", false);
    if (!defaults.ok()) return defaults.status();
    absl::StatusOr<std::unique_ptr<PingPong>> ping_pong = PingPong::Start(0), looking = PingPong::Start(kSpinUs);
    if (!ping_pong.ok() || !looking.ok()) return ping_pong.ok() ? looking.status() : ping_pong.status();
    bare.tuned = *std::move(tuned), bare.defaults = *std::move(defaults), bare.ping_pong = *std::move(ping_pong);
    bare.looking = *std::move(looking);
    return bare;
  }
};

std::vector<Case> Cases(Bare& bare) {
  const auto echo = [&bare](size_t bytes) { return [&bare, bytes] { return bare.tuned->Call(bytes); }; };
  const auto defaults = [&bare](size_t bytes) { return [&bare, bytes] { return bare.defaults->CallMessage(bytes); }; };
  const auto message = [&bare](size_t bytes) { return [&bare, bytes] { return bare.tuned->CallMessage(bytes); }; };
  const auto header_and_copies = [&bare](size_t bytes) {
    return [&bare, bytes]() -> absl::StatusOr<double> {
      absl::StatusOr<double> header = bare.tuned->Call(kHeaderBytes);
      if (!header.ok()) return header;
      return *header + CopyMicros(bytes) + CopyMicros(bytes);
    };
  };
  const auto ping_pong = [&bare]() -> absl::StatusOr<double> { return bare.ping_pong->Call(); };
  const auto looking = [&bare]() -> absl::StatusOr<double> { return bare.looking->Call(); };
  const auto echo_and_work = [&bare](size_t bytes, bool copies) {
    return [&bare, bytes, copies] { return bare.tuned->CallWork(bytes, copies); };
  };
  const auto ping_pong_and_work = [&bare](size_t bytes) {
    return [&bare, bytes]() -> absl::StatusOr<double> { return bare.looking->CallWork(bytes); };
  };
  std::vector<Case> cases = {{"header", Transport::kRpc, 0, false, "echo", echo(kHeaderBytes), 1.15, 0}};
  for (const int64_t rows : {int64_t{64}, kMostRows}) {
    const size_t bytes = static_cast<size_t>(rows * kHidden) * 2;
    const std::string name = rows == 64 ? "918KB" : "3.67MB";
    cases.push_back({name, Transport::kRpc, rows, false, "echo of a message", message(bytes), 1.15, 0});
    cases.push_back({name + "-raw", Transport::kRpc, rows, false, "echo of bytes nobody looks at", echo(bytes), 1.15, 0});
    cases.push_back({name + "-in-place", Transport::kRpc, rows, true, "echo of a message", message(bytes), 1.15, 0});
    cases.push_back({name + "-defaults", Transport::kRpc, rows, false, "echo, glibc's defaults in the server", defaults(bytes), 1.15, 0});
    cases.push_back({name, Transport::kSharedMemory, rows, false, "header echo + two copies", header_and_copies(bytes), 1.2, 0});
    cases.push_back(
        {name + "-work", Transport::kSharedMemory, rows, false, "that, shared, around a copy", echo_and_work(bytes, true), 1.2, 0});
    cases.push_back({name + "-in-place", Transport::kSharedMemory, rows, true, "header echo", echo(kHeaderBytes), 1.2, 0});
    cases.push_back({name + "-in-place-work", Transport::kSharedMemory, rows, true, "header echo around a copy",
                     echo_and_work(bytes, false), 1.2, 0});
    cases.push_back({name + "-in-place", Transport::kRing, rows, true, "futex ping-pong", ping_pong, 1.5, 5});
    cases.push_back(
        {name + "-in-place-work", Transport::kRing, rows, true, "ping-pong around a copy", ping_pong_and_work(bytes), 1.5, 5});
  }
  cases.push_back({"1-row", Transport::kRing, 1, true, "futex ping-pong", ping_pong, 1.5, 5});
  cases.push_back({"1-row-looking", Transport::kRing, 1, true, "ping-pong that looks before it sleeps", looking, 1.5, 5});
  return cases;
}

void Print(const std::vector<Row>& rows) {
  std::printf("%-19s %-13s %9s %9s %9s %8s %8s %7s  %-36s %9s %6s %9s\n", "case", "transport", "bytes", "p50 us", "p99 us",
              "compute", "server", "engine", "bare thing", "bare us", "ratio", "wanted us");
  for (const Row& row : rows) {
    std::printf("%-19s %-13s %9lld %9.1f %9.1f %8.1f %8.1f %7.1f  %-36s %9.1f %6.2f %9.1f%s\n", row.what->name.c_str(),
                client::TransportName(row.what->transport), static_cast<long long>(row.what->rows * kHidden * 2), row.p50_us, row.p99_us,
                row.compute_us, row.server_us, row.engine_us, row.what->bare.c_str(), row.bare_us, row.net_us() / row.bare_us,
                row.wanted_us(),
                row.net_us() <= row.wanted_us() ? "" : "  missed");
  }
  std::printf("server: what it says of its time beside compute; engine: of the same call in process, beside compute\n"
              "ratio: (p50 - compute - engine) by the bare thing; wanted: the bar on that difference\n");
}

bool WriteJson(const std::vector<Row>& rows, const std::string& path) {
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rows) {
    list.push_back({{"bench", "rpc"}, {"shape", row.what->name}, {"scheme", "none"}, {"backend", "echo"},
                    {"transport", client::TransportName(row.what->transport)}, {"tokens", row.what->rows},
                    {"bytes", row.what->rows * kHidden * 2}, {"ms", row.p50_us / 1e3}, {"p50_us", row.p50_us}, {"p99_us", row.p99_us},
                    {"compute_us", row.compute_us}, {"server_us", row.server_us}, {"engine_us", row.engine_us},
                    {"ceiling", row.what->bare}, {"ceiling_us", row.bare_us}, {"fraction", row.bare_us / row.net_us()}, {"wanted_us", row.wanted_us()}});
  }
  std::ofstream file(path);
  file << list.dump(1) << "\n";
  return static_cast<bool>(file.flush());
}

// moed in a folder of its own, until it is ready.
absl::StatusOr<std::unique_ptr<Child>> StartMoed(const Options& options, const std::string& folder) {
  const std::string ready = folder + "/ready";
  std::unique_ptr<Child> moed = Child::Start({options.moed, "serve", "--bench-layer", std::to_string(kHidden), "--listen",
                                              "unix:" + folder + "/moed.sock", "--ready-file", ready, "--log-level", "warn"});
  const auto end = steady_clock::now() + std::chrono::seconds(30);
  while (moed != nullptr && moed->Running() && steady_clock::now() < end) {
    if (fs::exists(ready)) return moed;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return absl::UnavailableError(absl::StrCat("--moed: wanted a moed that becomes ready, got none from ", options.moed));
}

absl::Status Run(const Options& options, const std::string& folder) {
  absl::StatusOr<std::unique_ptr<Child>> moed = StartMoed(options, folder);
  if (!moed.ok()) return moed.status();
  absl::StatusOr<Bare> bare = Bare::Start(folder);
  if (!bare.ok()) return bare.status();
  absl::StatusOr<std::unique_ptr<InProcess>> in_process = InProcess::Make(kHidden, kMostRows);
  if (!in_process.ok()) return in_process.status();
  const std::vector<Case> cases = Cases(*bare);
  std::vector<Row> rows;
  for (const Case& one : cases) {
    if (absl::StrCat(one.name, "/", client::TransportName(one.transport)).find(options.filter) == std::string::npos) continue;
    absl::StatusOr<Row> row = Measure("unix:" + folder + "/moed.sock", one, in_process->get(), options.seconds);
    if (!row.ok()) return row.status();
    rows.push_back(*row);
  }
  if (rows.empty()) return absl::InvalidArgumentError("no row contains \"" + options.filter + "\"");
  Print(rows);
  if (!options.json.empty() && !WriteJson(rows, options.json)) return absl::UnavailableError("cannot write " + options.json);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  if (const std::optional<int> code = RunChild(argc, argv)) return *code;
  client::TuneAllocator();
  Options options;
  options.moed = (fs::read_symlink("/proc/self/exe").parent_path().parent_path() / "server/moed").string();
  CLI::App app("What a call costs beside its computing, over each transport, next to the bare things that it is made of.");
  app.add_option("FILTER", options.filter, "only rows whose CASE/TRANSPORT contains this");
  app.add_option("--json", options.json, "write the rows to this file");
  app.add_option("--moed", options.moed, "the server's program; default: the one built beside this");
  app.add_option("--seconds", options.seconds, "measured time of each row")->check(CLI::Range(0.1, 600.0));
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  std::string folder = (fs::temp_directory_path() / "moed-rpc-bench-XXXXXX").string();
  if (mkdtemp(folder.data()) == nullptr) return std::fprintf(stderr, "rpc_bench: no temporary folder\n"), 2;
  const absl::Status status = Run(options, folder);
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  if (status.ok()) return 0;
  std::fprintf(stderr, "rpc_bench: %s\n", status.ToString().c_str());
  return absl::IsInternal(status) ? 1 : 2;
}

}  // namespace
}  // namespace moed::bench

int main(int argc, char** argv) { return moed::bench::Main(argc, argv); }
