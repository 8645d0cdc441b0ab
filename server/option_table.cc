// The options of serve: how each is stored, and the table of them all.
#include "server/option_table.h"

#include <charconv>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model_name.h"
#include "server/option_values.h"

namespace moed {
namespace {

using Kind = OptionSpec::Kind;

// The last component of a directory's name, also for "." and "models/tiny/".
std::string LastComponent(const std::string& path) {
  std::error_code error;
  std::filesystem::path full = std::filesystem::absolute(path, error).lexically_normal();
  if (!full.has_filename()) full = full.parent_path();  // a trailing slash leaves an empty last component
  return full.filename().string();
}

absl::Status AddModel(const std::string& text, ServeOptions* options) {
  ModelOption model;
  const size_t equals = text.find('=');
  const bool named = equals != std::string::npos && text.find('/') > equals;  // "/models/a=b" is a path
  model.path = named ? text.substr(equals + 1) : text;
  model.name = named ? text.substr(0, equals) : LastComponent(text);
  if (model.path.empty() || model.name.empty()) return WantedGot("[NAME=]PATH of a checkpoint directory", text);
  if (absl::Status status = CheckModelName(model.name); !status.ok()) return status;
  options->models.push_back(model);
  return absl::OkStatus();
}

absl::Status AddListen(const std::string& text, ServeOptions* options) {
  if (absl::Status status = CheckAddress(text); !status.ok()) return status;
  options->listen.push_back(text);
  return absl::OkStatus();
}

absl::Status SetAdminListen(const std::string& text, ServeOptions* options) {
  if (absl::Status status = CheckAddress(text); !status.ok()) return status;
  options->admin_listen = text;
  return absl::OkStatus();
}

absl::Status SetHealthListen(const std::string& text, ServeOptions* options) {
  if (absl::Status status = CheckAddress(text); !status.ok()) return status;
  options->health_listen = text;
  return absl::OkStatus();
}

absl::Status SetMetricsListen(const std::string& text, ServeOptions* options) {
  if (!CheckAddress(text).ok() || text.rfind("unix:", 0) == 0) return WantedGot("HOST:PORT with a port from 0 to 65535", text);
  options->metrics_listen = text;
  return absl::OkStatus();
}

absl::Status SetSessionSocket(const std::string& text, ServeOptions* options) {
  if (text.empty() || text.size() > kMaxUnixPath) {
    return WantedGot(absl::StrCat("auto, none, or the path of a socket of at most ", kMaxUnixPath, " bytes"), text);
  }
  options->session_socket = text;
  return absl::OkStatus();
}

absl::Status SetSessionMemory(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, std::numeric_limits<int64_t>::max(), &value);
  options->session_memory = static_cast<uint64_t>(value);
  return status;
}

absl::Status SetSessions(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, 1024, &value);
  options->sessions = static_cast<int>(value);
  return status;
}

absl::Status SetExperts(const std::string& text, ServeOptions* options) {
  const size_t colon = text.find(':');
  int64_t first = 0, end = 0;
  if (colon == std::string::npos || !ParseInteger(text.substr(0, colon), 0, 65534, &first).ok() ||
      !ParseInteger(text.substr(colon + 1), 1, 65535, &end).ok() || first >= end) {
    return WantedGot("A:B, the experts A to B - 1 with 0 <= A < B", text);
  }
  options->first_expert = static_cast<int>(first);
  options->end_expert = static_cast<int>(end);
  return absl::OkStatus();
}

absl::Status SetThreads(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 0, 1024, &value);
  options->threads = static_cast<int>(value);
  return status;
}

absl::Status SetQueue(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, 1'000'000, &value);
  options->queue = static_cast<int>(value);
  return status;
}

absl::Status SetBatchTokens(const std::string& text, ServeOptions* options) {
  return ParseInteger(text, 1, 1 << 20, &options->max_batch_tokens);
}

absl::Status SetBatchWait(const std::string& text, ServeOptions* options) {
  return ParseInteger(text, 0, 1'000'000, &options->batch_wait_us);
}

absl::Status SetQueueRows(const std::string& text, ServeOptions* options) {
  return ParseInteger(text, 1, int64_t{1} << 32, &options->queue_rows);
}

absl::Status SetLanes(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, kMaxLanes, &value);
  options->lanes = static_cast<int>(value);
  return status;
}

absl::Status SetGrace(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 0, 86'400, &value);
  options->grace = static_cast<int>(value);
  return status;
}

absl::Status SetRunLimit(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 0, 86'400, &value);
  options->run_limit = static_cast<int>(value);
  return status;
}

// Read and write for the owner at least: without them the server's own user could not connect.
absl::Status SetUnixMode(const std::string& text, ServeOptions* options) {
  constexpr int kOwner = 0600;
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 8);
  if (error != std::errc() || end != text.data() + text.size() || value < 0 || value > 0777 || (value & kOwner) != kOwner) {
    return WantedGot("an octal mode from 0600 to 0777 that has 0600", text);
  }
  options->unix_mode = value;
  return absl::OkStatus();
}

absl::Status SetRecordBytes(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, std::numeric_limits<int64_t>::max(), &value);
  options->record_bytes = static_cast<uint64_t>(value);
  return status;
}

absl::Status SetMemoryLimit(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, std::numeric_limits<int64_t>::max(), &value);
  options->memory_limit = static_cast<uint64_t>(value);
  return status;
}

}  // namespace

const std::vector<OptionSpec>& ServeOptionTable() {
  using Options = ServeOptions;
  using Text = std::string;
  static const std::vector<OptionSpec> table = {
      {"model", Kind::kList, "[NAME=]PATH", "a checkpoint directory to serve; NAME defaults to its last component", AddModel},
      {"listen", Kind::kList, "ADDR", "HOST:PORT or unix:PATH, port 0 picks one; default 127.0.0.1:50061", AddListen},
      {"health-listen", Kind::kText, "ADDR", "a second address that answers health checks only", SetHealthListen},
      {"admin-listen", Kind::kText, "ADDR",
       "where models can be loaded, swapped and unloaded; default: with the calls, if --admin-token-file is given, else nowhere",
       SetAdminListen},
      {"metrics-listen", Kind::kText, "ADDR", "HOST:PORT that answers GET /metrics, for Prometheus, in clear text",
       SetMetricsListen},
      {"expert-metrics", Kind::kSwitch, "", "with --metrics-listen: count the rows of each expert, too",
       [](const Text&, Options* o) { return o->expert_metrics = true, absl::OkStatus(); }},
      {"ready-file", Kind::kText, "FILE", "written when every layer is ready: {\"addresses\":[...],\"pid\":N}",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->ready_file); }},
      {"session-socket", Kind::kText, "PATH",
       "where clients of this host share memory: auto (default: beside the first unix: address, else /tmp/moed-PID.session), "
       "none, or a path",
       SetSessionSocket},
      {"session-memory", Kind::kNumber, "BYTES", "that the memory of all sessions may take together; default 4294967296",
       SetSessionMemory},
      {"sessions", Kind::kNumber, "N", "clients that may share memory at once; default 64", SetSessions},
      {"policy", Kind::kText, "P", "auto, require:NAME or prefer:NAME, then [,layers:A-B=P][,scheme:ELEMENT=P]; default auto",
       [](const Text& t, Options* o) { return NotEmpty("a policy", t, &o->policy); }},
      {"activations", Kind::kText, "A",
       "file: as the checkpoint says (default); none: not quantized; int8: one scale a token, where weights are int4, int8 or FP4",
       [](const Text& t, Options* o) { return ParseActivations(t, &o->activations); }},
      {"experts", Kind::kText, "A:B", "hold experts A to B - 1 only: the others contribute 0, the shared expert comes with A = 0",
       SetExperts},
      {"threads", Kind::kNumber, "N", "compute threads; default 0: as affinity mask and CPU quota allow", SetThreads},
      {"pin-threads", Kind::kSwitch, "", "bind each compute thread to one of the usable processors, in order",
       [](const Text&, Options* o) { return o->pin_threads = true, absl::OkStatus(); }},
      {"deterministic", Kind::kSwitch, "", "a row's result never depends on the other rows of a call",
       [](const Text&, Options* o) { return o->deterministic = true, absl::OkStatus(); }},
      {"max-tokens", Kind::kNumber, "N", "rows computed at once, larger calls go in chunks; default 8192",
       [](const Text& t, Options* o) { return ParseInteger(t, 1, 1 << 20, &o->max_tokens); }},
      {"max-batch-tokens", Kind::kNumber, "N",
       "rows of several calls computed together, and of a larger call between two turns of others; default 1024, for the latter "
       "--max-tokens where layers are on a GPU", SetBatchTokens},
      {"batch-wait-us", Kind::kNumber, "N",
       "how long a call waits for others to be computed with; default 0: no longer than the device is busy", SetBatchWait},
      {"memory-limit", Kind::kNumber, "BYTES", "that weights and workspace may take of the host's memory; default: no limit",
       SetMemoryLimit},
      {"gpu", Kind::kText, "G", "auto: layers that a GPU backend fits run on the GPU (default); none: as if there were no GPU",
       [](const Text& t, Options* o) { return ParseGpu(t, &o->gpu); }},
      {"lanes", Kind::kNumber, "N", "calls of layers on the GPU that run at once, each with workspace of its own; default 2",
       SetLanes},
      {"cpu-features", Kind::kText, "-F,-F", "processor features to treat as missing, such as -avx512f,-avx2",
       [](const Text& t, Options* o) { return ParseFeatureMask(t, &o->masked_features); }},
      {"queue", Kind::kNumber, "N", "calls that may wait for the device; default 256", SetQueue},
      {"queue-rows", Kind::kNumber, "N", "rows of calls that may wait for the device; default 131072", SetQueueRows},
      {"bench-layer", Kind::kNumber, "H",
       "serve a model 'bench' whose layer 0 gives back its input [M, H]: what a server costs, for ./dev bench rpc",
       [](const Text& t, Options* o) { return ParseInteger(t, 1, 1 << 20, &o->bench_hidden); }},
      {"grace", Kind::kNumber, "SECONDS", "that a drain may take, then what is left is cancelled; default 20", SetGrace},
      {"run-limit", Kind::kNumber, "SECONDS",
       "after which a run that has not ended makes health NOT_SERVING until it ends; default 600, 0: never", SetRunLimit},
      {"tls-cert", Kind::kText, "FILE", "PEM certificate chain: TLS on every HOST:PORT of --listen; read again when it changes",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->tls_cert); }},
      {"tls-key", Kind::kText, "FILE", "PEM private key of --tls-cert",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->tls_key); }},
      {"tls-client-ca", Kind::kText, "FILE", "PEM certificates, one of which must have signed the client's",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->tls_client_ca); }},
      {"token-file", Kind::kText, "FILE", "a token a line: calls need 'authorization: Bearer TOKEN'; read again when it changes",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->token_file); }},
      {"admin-token-file", Kind::kText, "FILE", "the same for calls that change the server",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->admin_token_file); }},
      {"allow-insecure", Kind::kSwitch, "", "let --listen without TLS reach beyond loopback",
       [](const Text&, Options* o) { return o->allow_insecure = true, absl::OkStatus(); }},
      {"unix-mode", Kind::kText, "MODE", "octal permissions of unix:PATH sockets; default 0600", SetUnixMode},
      {"client-rows", Kind::kNumber, "N", "rows that one client may have in flight; default 0: no limit",
       [](const Text& t, Options* o) { return ParseInteger(t, 0, int64_t{1} << 40, &o->client_rows); }},
      {"client-bytes", Kind::kNumber, "N", "bytes of requests that one client may have in flight; default 0: no limit",
       [](const Text& t, Options* o) { return ParseInteger(t, 0, int64_t{1} << 40, &o->client_bytes); }},
      {"channelz", Kind::kSwitch, "", "offer gRPC's channelz service, which tells about its connections",
       [](const Text&, Options* o) { return o->channelz = true, absl::OkStatus(); }},
      {"no-reflection", Kind::kSwitch, "", "do not offer gRPC server reflection",
       [](const Text&, Options* o) { return o->no_reflection = true, absl::OkStatus(); }},
      {"record", Kind::kText, "DIR", "an existing folder: some calls are recorded there for replay, with their hidden states",
       [](const Text& t, Options* o) { return NotEmpty("a folder", t, &o->record); }},
      {"record-rate", Kind::kFraction, "FRACTION", "with --record: so many of the calls, 0 to 1; default 0.001",
       [](const Text& t, Options* o) { return ParseFraction(t, &o->record_rate); }},
      {"record-bytes", Kind::kNumber, "BYTES", "with --record: recording ends when the folder has so many; default 1073741824",
       SetRecordBytes},
      {"record-rows", Kind::kNumber, "N", "with --record: calls of more rows are passed over; default 256",
       [](const Text& t, Options* o) { return ParseInteger(t, 1, 1 << 20, &o->record_rows); }},
      {"log-level", Kind::kText, "L", "trace, debug, info (default), warn, error or off",
       [](const Text& t, Options* o) { return OneOf({"trace", "debug", "info", "warn", "error", "off"}, t, &o->log_level); }},
      {"log-format", Kind::kText, "F", "text (default), or json: one object a line",
       [](const Text& t, Options* o) { return OneOf({"text", "json"}, t, &o->log_format); }},
  };
  return table;
}

const OptionSpec* FindOption(const std::string& name) {
  for (const OptionSpec& spec : ServeOptionTable()) {
    if (name == spec.name) return &spec;
  }
  return nullptr;
}

}  // namespace moed
