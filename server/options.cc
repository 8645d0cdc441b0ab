// Option values: how each is checked, the table of them all, and the merge of command line and file.
#include "server/options.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/model_name.h"
#include "server/option_table.h"

namespace moed {
namespace {

using Kind = OptionSpec::Kind;

constexpr size_t kMaxUnixPath = 107;  // sockaddr_un::sun_path less its terminating zero
constexpr char kDefaultListen[] = "127.0.0.1:50061";

absl::Status WantedGot(const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat("wanted ", wanted, ", got '", got, "'"));
}

std::string Join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) absl::StrAppend(&text, text.empty() ? "" : separator, part);
  return text;
}

absl::Status OneOf(const std::vector<std::string>& allowed, const std::string& text, std::string* out) {
  if (std::find(allowed.begin(), allowed.end(), text) == allowed.end()) {
    return WantedGot(absl::StrCat("one of ", Join(allowed, ", ")), text);
  }
  *out = text;
  return absl::OkStatus();
}

absl::Status NotEmpty(const std::string& wanted, const std::string& text, std::string* out) {
  if (text.empty()) return WantedGot(wanted, text);
  *out = text;
  return absl::OkStatus();
}

absl::Status CheckAddress(const std::string& text) {
  const std::string wanted = "HOST:PORT with a port from 0 to 65535, or unix:PATH";
  if (text.rfind("unix:", 0) == 0) {
    const size_t length = text.size() - 5;
    if (length == 0) return WantedGot(wanted, text);
    if (length <= kMaxUnixPath) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("wanted a socket path of at most ", kMaxUnixPath, " bytes, got ", length,
                                                   " bytes: '", text, "'"));
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0) return WantedGot(wanted, text);
  const std::string host = text.substr(0, colon);
  const bool bracketed = host.front() == '[' && host.back() == ']' && host.size() > 2;
  const bool plain = host.find_first_of(":/[] ") == std::string::npos;
  int64_t port = 0;
  if (!(bracketed || plain) || !ParseInteger(text.substr(colon + 1), 0, 65535, &port).ok()) return WantedGot(wanted, text);
  return absl::OkStatus();
}

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

// INVALID_ARGUMENT when an option about recording was given and no folder for it.
absl::Status CheckRecordOptions(const ServeOptions& options, const std::vector<GivenOption>& from_command_line,
                                const std::vector<GivenOption>& from_file) {
  if (!options.record.empty()) return absl::OkStatus();
  for (const std::vector<GivenOption>* source : {&from_command_line, &from_file}) {
    for (const GivenOption& given : *source) {
      if (given.name.rfind("record-", 0) != 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("--", given.name, ": wanted --record beside it, got none"));
    }
  }
  return absl::OkStatus();
}

absl::Status SetMemoryLimit(const std::string& text, ServeOptions* options) {
  int64_t value = 0;
  absl::Status status = ParseInteger(text, 1, std::numeric_limits<int64_t>::max(), &value);
  options->memory_limit = static_cast<uint64_t>(value);
  return status;
}

}  // namespace

absl::Status ParseInteger(const std::string& text, int64_t low, int64_t high, int64_t* out) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < low || value > high) {
    return WantedGot(absl::StrCat("a whole number from ", low, " to ", high), text);
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status ParseFraction(const std::string& text, double* out) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0 && value <= 1)) {
    return WantedGot("a number from 0 to 1", text);
  }
  *out = value;
  return absl::OkStatus();
}

absl::Status ParseActivations(const std::string& text, std::string* out) { return OneOf({"file", "none", "int8"}, text, out); }

absl::Status ParseGpu(const std::string& text, std::string* out) { return OneOf({"auto", "none"}, text, out); }

absl::Status ParseFeatureMask(const std::string& text, std::vector<std::string>* names) {
  std::vector<std::string> valid;
  for (const IsaFlagName& flag : IsaFlagNames()) valid.push_back(absl::StrCat("-", flag.name));
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::string item;
    if (!OneOf(valid, text.substr(begin, end - begin), &item).ok()) {
      return absl::InvalidArgumentError(absl::StrCat("wanted -FEATURE[,-FEATURE...] with features among ", Join(valid, ", "),
                                                     ", got '", text.substr(begin, end - begin), "'"));
    }
    names->push_back(item.substr(1));
    begin = end + 1;
  }
  return absl::OkStatus();
}

const std::vector<OptionSpec>& ServeOptionTable() {
  using Options = ServeOptions;
  using Text = std::string;
  static const std::vector<OptionSpec> table = {
      {"model", Kind::kList, "[NAME=]PATH", "a checkpoint directory to serve; NAME defaults to its last component", AddModel},
      {"listen", Kind::kList, "ADDR", "HOST:PORT or unix:PATH, port 0 picks one; default 127.0.0.1:50061", AddListen},
      {"health-listen", Kind::kText, "ADDR", "a second address that answers health checks only", SetHealthListen},
      {"admin-listen", Kind::kText, "ADDR", "where models can be loaded, swapped and unloaded; default: with the calls, if --admin-token-file is given, else nowhere",
       SetAdminListen},
      {"metrics-listen", Kind::kText, "ADDR", "HOST:PORT that answers GET /metrics, for Prometheus, in clear text", SetMetricsListen},
      {"expert-metrics", Kind::kSwitch, "", "with --metrics-listen: count the rows of each expert, too",
       [](const Text&, Options* o) { return o->expert_metrics = true, absl::OkStatus(); }},
      {"ready-file", Kind::kText, "FILE", "written when every layer is ready: {\"addresses\":[...],\"pid\":N}",
       [](const Text& t, Options* o) { return NotEmpty("a file name", t, &o->ready_file); }},
      {"session-socket", Kind::kText, "PATH",
       "where clients of this host share memory: auto (default: beside the first unix: address, else /tmp/moed-PID.session), none, or a "
       "path",
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
      {"bench-layer", Kind::kNumber, "H", "serve a model 'bench' whose layer 0 gives back its input [M, H]: what a server costs, for ./dev bench rpc",
       [](const Text& t, Options* o) { return ParseInteger(t, 1, 1 << 20, &o->bench_hidden); }},
      {"grace", Kind::kNumber, "SECONDS", "that a drain may take, then what is left is cancelled; default 20", SetGrace},
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

absl::Status ApplyOption(const OptionSpec& spec, const std::string& source, const std::vector<std::string>& values,
                         ServeOptions* options) {
  const auto fail = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(source, ": ", status.message()));
  };
  if (spec.kind != Kind::kList) {
    for (const std::string& value : values) {
      if (value == values.front()) continue;
      return fail(WantedGot("one value", absl::StrCat(values.front(), "' and '", value)));
    }
    return values.empty() ? absl::OkStatus() : fail(spec.set(values.front(), options));
  }
  for (const std::string& value : values) {
    if (absl::Status status = spec.set(value, options); !status.ok()) return fail(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<ServeOptions> MergeOptions(const std::vector<GivenOption>& from_command_line,
                                          const std::vector<GivenOption>& from_file, const std::string& file_name) {
  ServeOptions options;
  for (const GivenOption& given : from_command_line) {
    absl::Status status = ApplyOption(*FindOption(given.name), absl::StrCat("--", given.name), given.values, &options);
    if (!status.ok()) return status;
  }
  for (const GivenOption& given : from_file) {
    const OptionSpec& spec = *FindOption(given.name);
    const std::string source = absl::StrCat(file_name, ": ", given.name);
    const auto same = std::find_if(from_command_line.begin(), from_command_line.end(),
                                   [&](const GivenOption& other) { return other.name == given.name; });
    const bool off = spec.kind == Kind::kSwitch && given.values.front() == "false";
    if (same == from_command_line.end()) {
      if (off) continue;  // as if it were not there
      if (absl::Status status = ApplyOption(spec, source, given.values, &options); !status.ok()) return status;
      continue;
    }
    // Compared by meaning, not by spelling: each applied to defaults.
    ServeOptions one, other;
    if (absl::Status status = ApplyOption(spec, source, given.values, &one); !status.ok()) return status;
    if (absl::Status status = ApplyOption(spec, source, same->values, &other); !status.ok()) return status;
    if (one == other && !off) continue;
    return absl::InvalidArgumentError(absl::StrCat(source, " conflicts with --", given.name, ": wanted one value, got '",
                                                   Join(given.values, " "), "' in the file and '", Join(same->values, " "),
                                                   "' on the command line"));
  }
  if (options.max_batch_tokens > options.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("--max-batch-tokens: wanted at most --max-tokens, ", options.max_tokens,
                                                   ", got ", options.max_batch_tokens));
  }
  if (options.listen.empty()) options.listen.push_back(kDefaultListen);
  if (options.models.empty() && options.bench_hidden == 0) {
    return absl::InvalidArgumentError("--model: wanted at least one [NAME=]PATH of a checkpoint directory, got none");
  }
  if (options.expert_metrics && options.metrics_listen.empty()) {
    return absl::InvalidArgumentError("--expert-metrics: wanted --metrics-listen beside it, got none");
  }
  if (absl::Status status = CheckRecordOptions(options, from_command_line, from_file); !status.ok()) return status;
  for (size_t i = 0; i < options.models.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (options.models[i].name != options.models[j].name) continue;
      return absl::InvalidArgumentError(absl::StrCat("--model: wanted one name per model (NAME=PATH), got '",
                                                     options.models[i].name, "' for ", options.models[j].path, " and ",
                                                     options.models[i].path));
    }
  }
  return options;
}

void MaskFeatures(const std::vector<std::string>& names, IsaFlags* isa) {
  const auto falls_with = [](const std::string& flag, const std::string& masked) {
    const bool is_avx512 = flag.rfind("avx512", 0) == 0;
    if (flag == masked) return true;
    if (masked == "avx2") return is_avx512 || flag == "avxvnni";
    if (masked == "avx512f") return is_avx512;
    return masked == "amx_tile" && flag.rfind("amx_", 0) == 0;
  };
  for (const IsaFlagName& flag : IsaFlagNames()) {
    for (const std::string& masked : names) {
      if (falls_with(flag.name, masked)) isa->*flag.flag = false;
    }
  }
}

void MaskGpu(const std::string& choice, DeviceInfo* device) {
  if (choice != "none") return;
  device->has_gpu = false;
  device->gpu_name.clear();
  device->gpu_absence = "--gpu none";
  device->cuda_major = device->cuda_minor = device->gpu_multiprocessors = 0;
  device->gpu_free_bytes = 0;
}

std::string NearestName(const std::string& name, const std::vector<std::string>& candidates) {
  const auto distance = [](const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= b.size(); ++j) {
        const size_t above = row[j];
        row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
        diagonal = above;
      }
    }
    return row[b.size()];
  };
  const std::string key = name.substr(0, 64);  // no option is longer; bounds the work on absurd input
  std::string best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const size_t d = distance(key, candidate);
    if (d < best_distance) best = candidate, best_distance = d;
  }
  return best;
}

}  // namespace moed
