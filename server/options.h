// What a run of moed is told to do: plain values, parsed from the command line and from a configuration file.
//
// Every option of `serve` is stated once, in one table (options.cc); the table feeds the command line, the help text and
// the keys of `--config FILE.json`, so the three cannot differ. Nothing is guessed: an unknown name, a value that does
// not fit and one option with two different values are errors that name the option, what was wanted and what was got.
// No file but the configuration file is read here; models, devices and policies are looked at later.
//
//   auto command = ParseCommandLine({"serve", "--model", "/models/tiny", "--listen", "127.0.0.1:0"});
//   // command->serve.models[0] == {"tiny", "/models/tiny"}
#ifndef MOED_SERVER_OPTIONS_H_
#define MOED_SERVER_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device_info.h"

namespace moed {

// A checkpoint to serve. Names are unique within a server and have no '/', since MODEL/L names a layer in health checks.
struct ModelOption {
  std::string name;
  std::string path;
  bool operator==(const ModelOption&) const = default;
};

inline constexpr int kMaxLanes = 8;
// The name under which --bench-layer is served.
inline constexpr char kBenchModel[] = "bench";

struct ServeOptions {
  // What is served and where.
  std::vector<ModelOption> models;
  int64_t bench_hidden = 0;         // H of a layer that gives back its input; 0: none
  std::vector<std::string> listen;  // HOST:PORT or unix:PATH; never empty after parsing (default 127.0.0.1:50061)
  std::string health_listen;        // empty: health on the main addresses only
  std::string admin_listen;         // empty: on the main addresses with admin tokens, else nowhere
  std::string metrics_listen;       // HOST:PORT; empty: no metrics
  bool expert_metrics = false;      // rows of each expert, too
  std::string ready_file;           // empty: none
  std::string session_socket = "auto";  // where clients of this host share memory: a path, auto, or none
  uint64_t session_memory = uint64_t{4} << 30;  // bytes of all sessions together
  int sessions = 64;                // that may be open at once
  bool no_reflection = false;
  bool channelz = false;            // gRPC's own view of its connections, on the main addresses
  std::string log_level = "info";   // trace, debug, info, warn, error, off
  std::string log_format = "text";  // text or json

  // What is recorded of calls (recorder.h).
  std::string record;               // a folder; empty: nothing
  double record_rate = 0.001;       // 0 to 1
  uint64_t record_bytes = uint64_t{1} << 30;  // of the folder
  int64_t record_rows = 256;        // of one call

  // Who may call. Paths; empty: none. What only the files and the addresses can show is checked in security.h.
  std::string tls_cert, tls_key;    // both or neither: TLS on every HOST:PORT of `listen`
  std::string tls_client_ca;        // clients must show a certificate that it signed
  std::string token_file;           // of calls that compute or report
  std::string admin_token_file;     // of calls that change the server
  bool allow_insecure = false;      // clear text may listen beyond loopback
  int unix_mode = 0600;             // of the sockets of unix:PATH

  // How much, and for how long.
  int64_t client_rows = 0;          // of one client in flight; 0: no limit
  int64_t client_bytes = 0;         // the same for the bytes of its requests
  int grace = 20;                   // seconds that a drain may take
  int run_limit = 600;              // seconds after which a run counts as hanging; 0: none does

  // What decides results and backends.
  std::string policy = "auto";      // the text form of engine/oracle.h; checked when the engine is set up
  std::string activations = "file"; // file, none or int8
  bool deterministic = false;
  int first_expert = 0;             // experts [first_expert, end_expert) are held; end_expert 0: all
  int end_expert = 0;
  std::vector<std::string> masked_features;  // names of IsaFlagNames() that count as missing
  uint64_t memory_limit = 0;        // bytes of the host's memory; 0: no limit of moed's own
  std::string gpu = "auto";         // auto, or none: as if the machine had no GPU

  // What decides speed only.
  int threads = 0;                  // 0: as many as usable processors and the CPU quota keep busy
  bool pin_threads = false;         // each compute thread on a processor of its own
  int64_t max_tokens = 8192;        // rows computed at once
  int64_t max_batch_tokens = 0;     // rows of several calls computed together, at most max_tokens; 0: 1024, see the option's help
  int64_t batch_wait_us = 0;        // that a call may wait for others to be computed with
  int queue = 256;                  // calls that may wait for the device
  int64_t queue_rows = 131072;      // of theirs that may wait
  int lanes = 2;                    // calls of layers on the GPU that run at once

  bool operator==(const ServeOptions&) const = default;
};

struct ExplainOptions {
  std::string path;
  std::string device = "this";  // "this", a built-in name, or a JSON file
  std::string policy = "auto";
  std::string activations = "file";  // file, none or int8
  std::vector<std::string> masked_features;
  std::string gpu = "auto";     // auto or none
  int layer = -1;               // -1: every MoE layer
  int64_t max_tokens = 8192;
  int lanes = 2;
  bool json = false;
};

struct DequantizeOptions {
  std::string path;
  std::string out;
  bool bf16 = false;   // else f32
  bool force = false;  // replace an existing `out`
};

struct ReplayOptions {
  std::vector<std::string> files;       // recordings, or folders of them
  std::string checkpoint;
  std::vector<std::string> backends = {"auto"};  // names of backends, or auto
  std::string against = "reference";    // reference or recording
  std::string model;                    // of the recordings; empty: they are of one
  int layer = -1;                       // -1: every recorded one
  int threads = 0;
  std::string gpu = "auto";             // auto or none
  std::vector<std::string> masked_features;
  std::string activations;              // file, none or int8; empty: as recorded
  bool deterministic = false;           // also where recordings are not
  double bound = -1;                    // of the error of a row; below 0: none
  int repeat = 1;                       // runs of each call
  int worst = 5;                        // rows that are named
  bool json = false;
};

enum class Command {
  kPrint,    // print `text` and succeed: --help
  kVersion,  // the same, then a line about the build: --version
  kServe,
  kExplain,
  kCheck,  // uses `serve`
  kDequantize,
  kReplay,
};

struct CommandLine {
  Command command = Command::kPrint;
  std::string text;
  ServeOptions serve;
  ExplainOptions explain;
  DequantizeOptions dequantize;
  ReplayOptions replay;
};

// Parses the arguments after the program's name, and the configuration file that they name. INVALID_ARGUMENT: the first
// line of the message is the error, further lines are details. NOT_FOUND: no such configuration file.
absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments);

// Clears the named flags, and those that do not exist without them (avx512f takes every avx512 flag along, avx2 those and
// avxvnni, amx_tile the AMX ones), so that the result is a machine that could exist. Names must be valid.
void MaskFeatures(const std::vector<std::string>& names, IsaFlags* isa);

// Takes the GPU from `device` when `choice` is none; auto leaves it.
void MaskGpu(const std::string& choice, DeviceInfo* device);

// The candidate that takes the fewest single-character edits to become `name`. Empty when there is no candidate.
std::string NearestName(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace moed

#endif  // MOED_SERVER_OPTIONS_H_
