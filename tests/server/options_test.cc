// Options: every way to state them, and every way to state them wrongly.
#include <catch2/catch.hpp>

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "server/options.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;

absl::StatusOr<CommandLine> Parse(std::vector<std::string> arguments) { return ParseCommandLine(arguments); }

std::string ErrorOf(std::vector<std::string> arguments) {
  const absl::StatusOr<CommandLine> parsed = ParseCommandLine(arguments);
  return parsed.ok() ? "no error" : std::string(parsed.status().message());
}

// A configuration file for one test.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) : path_("/tmp/moed_options_test_XXXXXX") {
    close(mkstemp(path_.data()));
    std::ofstream(path_) << text;
  }
  ~ConfigFile() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

ServeOptions ServeOf(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "serve");
  const absl::StatusOr<CommandLine> parsed = ParseCommandLine(arguments);
  INFO(parsed.status().ToString());
  REQUIRE(parsed.ok());
  REQUIRE(parsed->command == Command::kServe);
  return parsed->serve;
}

std::string ConfigError(const std::string& text, std::vector<std::string> more = {}) {
  const ConfigFile file(text);
  more.insert(more.begin(), {"serve", "--config", file.path()});
  return ErrorOf(more);
}

}  // namespace

TEST_CASE("Defaults are those of the help text") {
  const ServeOptions options = ServeOf({"--model", "/models/tiny"});
  CHECK(options.models == std::vector<ModelOption>{{"tiny", "/models/tiny"}});
  CHECK(options.listen == std::vector<std::string>{"127.0.0.1:50061"});
  CHECK(options.policy == "auto");
  CHECK(options.activations == "file");
  CHECK(options.threads == 0);
  CHECK_FALSE(options.pin_threads);
  CHECK(options.max_tokens == 8192);
  CHECK(options.max_batch_tokens == 0);
  CHECK(options.batch_wait_us == 0);
  CHECK(options.queue == 256);
  CHECK(options.queue_rows == 131072);
  CHECK(options.memory_limit == 0);
  CHECK(options.gpu == "auto");
  CHECK(options.lanes == 2);
  CHECK(options.log_level == "info");
  CHECK_FALSE(options.deterministic);
  CHECK_FALSE(options.no_reflection);
  CHECK_FALSE(options.channelz);
  CHECK_FALSE(options.allow_insecure);
  CHECK(options.unix_mode == 0600);
  CHECK(options.client_rows == 0);
  CHECK(options.client_bytes == 0);
  CHECK(options.grace == 20);
  CHECK(options.run_limit == 600);
}

TEST_CASE("Every flag reaches its field") {
  const ServeOptions options = ServeOf(
      {"--model", "a=/m/one", "--model=b=/m/two", "--listen", "[::1]:0", "--listen", "unix:/run/moed.sock", "--policy",
       "require:cpu_generic", "--activations", "none", "--threads", "3", "--pin-threads", "--deterministic", "--max-tokens", "100",
       "--memory-limit", "123456789012", "--cpu-features", "-avx512f,-avx2", "--health-listen", "localhost:81",
       "--ready-file", "/run/ready", "--queue", "7", "--no-reflection", "--log-level", "debug", "--gpu", "none", "--lanes", "5",
       "--max-batch-tokens", "100", "--batch-wait-us", "250", "--queue-rows", "4000000000"});
  CHECK(options.models == std::vector<ModelOption>{{"a", "/m/one"}, {"b", "/m/two"}});
  CHECK(options.listen == std::vector<std::string>{"[::1]:0", "unix:/run/moed.sock"});
  CHECK(options.policy == "require:cpu_generic");
  CHECK(options.activations == "none");
  CHECK(options.threads == 3);
  CHECK(options.pin_threads);
  CHECK(options.deterministic);
  CHECK(options.max_tokens == 100);
  CHECK(options.memory_limit == 123456789012u);
  CHECK(options.masked_features == std::vector<std::string>{"avx512f", "avx2"});
  CHECK(options.health_listen == "localhost:81");
  CHECK(options.ready_file == "/run/ready");
  CHECK(options.max_batch_tokens == 100);
  CHECK(options.batch_wait_us == 250);
  CHECK(options.queue == 7);
  CHECK(options.queue_rows == 4000000000);
  CHECK(options.no_reflection);
  CHECK(options.log_level == "debug");
  CHECK(options.gpu == "none");
  CHECK(options.lanes == 5);
}

TEST_CASE("Flags and keys about who may call reach their fields") {
  const ServeOptions flags =
      ServeOf({"--model", "/m", "--tls-cert", "c.pem", "--tls-key", "k.pem", "--tls-client-ca", "ca.pem", "--token-file", "t",
               "--admin-token-file", "a", "--allow-insecure", "--unix-mode", "0660", "--client-rows", "5", "--client-bytes",
               "6000000000", "--grace", "3", "--channelz", "--run-limit", "0"});
  CHECK(flags.tls_cert == "c.pem");
  CHECK(flags.tls_key == "k.pem");
  CHECK(flags.tls_client_ca == "ca.pem");
  CHECK(flags.token_file == "t");
  CHECK(flags.admin_token_file == "a");
  CHECK(flags.allow_insecure);
  CHECK(flags.unix_mode == 0660);
  CHECK(flags.client_rows == 5);
  CHECK(flags.client_bytes == 6000000000);
  CHECK(flags.grace == 3);
  CHECK(flags.run_limit == 0);
  CHECK(flags.channelz);
  const ConfigFile file(R"({"model": "/m", "tls-cert": "c.pem", "tls-key": "k.pem", "tls-client-ca": "ca.pem", "token-file": "t",
                            "admin-token-file": "a", "allow-insecure": true, "unix-mode": "660", "client-rows": 5,
                            "client-bytes": 6000000000, "grace": 3, "channelz": true,
                            "run-limit": 0})");
  CHECK(ServeOf({"--config", file.path()}) == flags);
}

TEST_CASE("A configuration file takes the same options") {
  const ConfigFile file(R"({"model": ["a=/m/one", "/m/two/"], "listen": "127.0.0.1:0", "threads": 2, "deterministic": true,
                            "pin-threads": true, "no-reflection": false, "cpu-features": "-avx2", "memory-limit": 5000000000,
                            "queue": 9, "queue-rows": 11, "batch-wait-us": 3, "max-batch-tokens": 64, "gpu": "none", "lanes": 8})");
  const ServeOptions options = ServeOf({"--config", file.path()});
  CHECK(options.models == std::vector<ModelOption>{{"a", "/m/one"}, {"two", "/m/two/"}});
  CHECK(options.listen == std::vector<std::string>{"127.0.0.1:0"});
  CHECK(options.threads == 2);
  CHECK(options.pin_threads);
  CHECK(options.deterministic);
  CHECK_FALSE(options.no_reflection);
  CHECK(options.masked_features == std::vector<std::string>{"avx2"});
  CHECK(options.memory_limit == 5000000000u);
  CHECK(options.queue == 9);
  CHECK(options.queue_rows == 11);
  CHECK(options.batch_wait_us == 3);
  CHECK(options.max_batch_tokens == 64);
  CHECK(options.gpu == "none");
  CHECK(options.lanes == 8);
}

TEST_CASE("A model's name defaults to its directory's last component") {
  CHECK(ServeOf({"--model", "/models/tiny/"}).models[0].name == "tiny");
  CHECK(ServeOf({"--model", "models/./tiny"}).models[0].name == "tiny");
  CHECK(ServeOf({"--model", "/models/a=b"}).models[0] == ModelOption{"a=b", "/models/a=b"});
}

TEST_CASE("A range of experts is two numbers in order") {
  for (const char* text : {"4", "4:", ":4", "4:4", "5:4", "-1:4", "0:65536", "0:4:8", "a:b"}) {
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--experts", text}), Contains("wanted A:B"));
  }
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--experts", "4:8"}), Contains("no error"));
}

TEST_CASE("An unknown option is refused with the nearest one") {
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--thread", "2"}), Contains("'--thread'") && Contains("--threads"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--expert", "0:4"}), Contains("the nearest is --experts"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "stray"}), Contains("'stray'"));
  CHECK_THAT(ErrorOf({"--verbose", "serve", "--model", "/m"}), Contains("'--verbose'"));
  CHECK_THAT(ErrorOf({"server"}), Contains("'server'") && Contains("nearest is serve"));
  CHECK_THAT(ErrorOf({}), Contains("wanted a command"));
  CHECK_THAT(ErrorOf({""}), Contains("wanted a command"));
}

TEST_CASE("An unknown key of the file is refused with the nearest one") {
  CHECK_THAT(ConfigError(R"({"model": "/m", "max_tokens": 5})"), Contains("'max_tokens'") && Contains("'max-tokens'"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "config": "x"})"), Contains("'config'"));
}

TEST_CASE("A value that does not fit is refused with wanted and got") {
  const auto error = [](const std::string& flag, const std::string& value) {
    return ErrorOf({"serve", "--model", "/m", flag, value});
  };
  CHECK_THAT(error("--threads", "many"), Contains("--threads: wanted a whole number from 0 to 1024, got 'many'"));
  CHECK_THAT(error("--threads", "-1"), Contains("got '-1'"));
  CHECK_THAT(error("--threads", "2x"), Contains("got '2x'"));
  CHECK_THAT(error("--threads", "99999999999999999999"), Contains("99999999999999999999"));
  CHECK_THAT(error("--max-tokens", "0"), Contains("from 1 to 1048576, got '0'"));
  CHECK_THAT(error("--memory-limit", "1.5"), Contains("got '1.5'"));
  CHECK_THAT(error("--gpu", "all"), Contains("--gpu: wanted one of auto, none, got 'all'"));
  for (const char* lanes : {"0", "9"}) CHECK_THAT(error("--lanes", lanes), Contains("--lanes: wanted a whole number from 1 to 8"));
  for (const char* mode : {"", "600x", "0800", "-600", "01777", "0400", "0066", "rw"}) {
    CHECK_THAT(error("--unix-mode", mode), Contains("--unix-mode: wanted an octal mode from 0600 to 0777"));
  }
  for (const char* limit : {"-1", "1.5", "86401"}) CHECK_THAT(error("--run-limit", limit), Contains("from 0 to 86400"));
  for (const char* grace : {"-1", "1.5", "86401"}) CHECK_THAT(error("--grace", grace), Contains("from 0 to 86400"));
  CHECK_THAT(error("--client-rows", "-1"), Contains("--client-rows: wanted a whole number from 0"));
  CHECK_THAT(error("--client-bytes", "1G"), Contains("--client-bytes: wanted a whole number"));
  CHECK_THAT(error("--token-file", ""), Contains("--token-file: wanted a file name"));
  CHECK_THAT(error("--queue", "0"), Contains("--queue: wanted a whole number from 1"));
  CHECK_THAT(error("--queue-rows", "0"), Contains("--queue-rows: wanted a whole number from 1"));
  CHECK_THAT(error("--batch-wait-us", "1000001"), Contains("--batch-wait-us: wanted a whole number from 0 to 1000000"));
  CHECK_THAT(error("--max-batch-tokens", "0"), Contains("--max-batch-tokens: wanted a whole number from 1"));
  CHECK_THAT(error("--max-batch-tokens", "8193"), Contains("--max-batch-tokens: wanted at most --max-tokens, 8192, got 8193"));
  CHECK_THAT(error("--log-level", "loud"), Contains("trace, debug, info, warn, error, off, got 'loud'"));
  CHECK_THAT(error("--activations", "fp8"), Contains("file, none, int8, got 'fp8'"));
  CHECK_THAT(error("--cpu-features", "avx2"), Contains("-avx512f") && Contains("got 'avx2'"));
  CHECK_THAT(error("--cpu-features", "-avx2,-sse9"), Contains("got '-sse9'"));
  CHECK_THAT(error("--cpu-features", "-avx2,"), Contains("got ''"));
  CHECK_THAT(error("--policy", ""), Contains("--policy: wanted"));
  CHECK_THAT(error("--ready-file", "--deterministic"), Contains("--ready-file: wanted a value, got '--deterministic'"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--threads"}), Contains("--threads"));
}

TEST_CASE("serve, check, explain and the file take the same three choices of activations") {
  for (const std::string choice : {"file", "none", "int8"}) {
    CHECK(ServeOf({"--model", "/m", "--activations", choice}).activations == choice);
    const ConfigFile file(R"({"model": "/m", "activations": ")" + choice + "\"}");
    CHECK(ServeOf({"--config", file.path()}).activations == choice);
    CHECK(Parse({"check", "--config", file.path()})->serve.activations == choice);
    CHECK(Parse({"explain", "/m", "--activations", choice})->explain.activations == choice);
  }
  for (const std::string wrong : {"INT8", "int4", "fp8", "int8 "}) {
    const std::string want = "wanted one of file, none, int8, got '" + wrong + "'";
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--activations", wrong}), Contains("--activations: " + want));
    CHECK_THAT(ErrorOf({"explain", "/m", "--activations", wrong}), Contains("--activations: " + want));
    CHECK_THAT(ConfigError(R"({"model": "/m", "activations": ")" + wrong + "\"}"), Contains("activations: " + want));
  }
  CHECK_THAT(ErrorOf({"explain", "/m", "--activations", ""}), Contains("--activations: wanted a value, got ''"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "activations": 8})"), Contains("activations: wanted a string, got 8"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "activations": "int8"})", {"--activations", "none"}),
             Contains("activations conflicts with --activations") && Contains("'int8' in the file") && Contains("'none' on"));
}

TEST_CASE("An address that cannot be one is refused") {
  const std::string too_long = "unix:/" + std::string(107, 'x');
  for (const std::string& address : {std::string("50061"), std::string(":50061"), std::string("host:"), std::string("host:65536"),
                                     std::string("host:-1"), std::string("unix:"), std::string("dns:///host:1"),
                                     std::string("::1:50061"), too_long}) {
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--listen", address}), Contains("--listen: wanted") && Contains(address));
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--health-listen", address}), Contains("--health-listen: wanted"));
  }
  CHECK(ServeOf({"--model", "/m", "--listen", "unix:/" + std::string(106, 'x')}).listen.size() == 1);
}

TEST_CASE("A model option without a usable name is refused") {
  CHECK_THAT(ErrorOf({"serve"}), Contains("--model: wanted at least one"));
  CHECK_THAT(ErrorOf({"serve", "--model", "=path"}), Contains("[NAME=]PATH"));
  CHECK_THAT(ErrorOf({"serve", "--model", "name="}), Contains("[NAME=]PATH"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/"}), Contains("[NAME=]PATH"));
  CHECK_THAT(ErrorOf({"serve", "--model", "two words=/m"}), Contains("model name"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/one/tiny", "--model", "/two/tiny"}),
             Contains("'tiny'") && Contains("/one/tiny") && Contains("/two/tiny"));
}

TEST_CASE("An option with two values is refused, with one value twice it is not") {
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--threads", "1", "--threads", "2"}),
             Contains("--threads: wanted one value, got '1' and '2'"));
  CHECK(ServeOf({"--model", "/m", "--threads", "2", "--threads", "2"}).threads == 2);
}

TEST_CASE("Flag and file may repeat each other but not differ") {
  const std::string conflict = ConfigError(R"({"model": "/m", "threads": 4})", {"--threads", "3"});
  CHECK_THAT(conflict, Contains("threads conflicts with --threads") && Contains("'4' in the file") && Contains("'3' on the command line"));
  CHECK_THAT(ConfigError(R"({"model": "/m"})", {"--model", "/n"}), Contains("model conflicts with --model"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "deterministic": true})", {"--threads", "1025"}), Contains("--threads: wanted"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "deterministic": false})", {"--deterministic"}),
             Contains("deterministic conflicts with --deterministic") && Contains("'false' in the file"));
  const ConfigFile off(R"({"model": "/m", "deterministic": false})");
  CHECK(!ServeOf({"--config", off.path()}).deterministic);

  const ConfigFile file(R"({"model": "/m", "threads": 4, "deterministic": true})");
  const ServeOptions options = ServeOf({"--config", file.path(), "--threads", "04", "--deterministic", "--model", "/m"});
  CHECK(options.threads == 4);
  CHECK(options.models.size() == 1);
}

TEST_CASE("Metrics need an address that HTTP can have, and counting experts needs metrics") {
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--metrics-listen", "unix:/tmp/x"}), Contains("--metrics-listen: wanted HOST:PORT"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--metrics-listen", "frob"}), Contains("--metrics-listen: wanted HOST:PORT"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--expert-metrics"}), Contains("--expert-metrics: wanted --metrics-listen beside it"));
  const auto parsed = ParseCommandLine({"serve", "--model", "/m", "--metrics-listen", "[::]:9464", "--expert-metrics"});
  REQUIRE(parsed.ok());
  CHECK(parsed->serve.metrics_listen == "[::]:9464");
  CHECK(parsed->serve.expert_metrics);
}

TEST_CASE("Recording is off by default, and its options want a folder beside them and values in their ranges") {
  CHECK(ServeOf({"--model", "/m"}).record.empty());
  const ServeOptions options =
      ServeOf({"--model", "/m", "--record", "/r", "--record-rate", "0.25", "--record-bytes", "1000", "--record-rows", "8"});
  CHECK(options.record == "/r");
  CHECK(options.record_rate == 0.25);
  CHECK(options.record_bytes == 1000);
  CHECK(options.record_rows == 8);
  for (const char* rate : {"0", "1", "1e-6"}) {
    CHECK(ServeOf({"--model", "/m", "--record", "/r", "--record-rate", rate}).record == "/r");
  }
  for (const char* rate : {"1.5", "-0.1", "nan", "inf", "x", "0.5x"}) {
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--record", "/r", "--record-rate", rate}),
               Contains("--record-rate: wanted a number from 0 to 1, got '" + std::string(rate)));
  }
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--record", ""}), Contains("--record: wanted a folder"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--record", "/r", "--record-bytes", "0"}), Contains("--record-bytes: wanted"));
  CHECK_THAT(ErrorOf({"serve", "--model", "/m", "--record", "/r", "--record-rows", "0"}), Contains("--record-rows: wanted"));
  for (const char* name : {"--record-rate", "--record-bytes", "--record-rows"}) {
    CHECK_THAT(ErrorOf({"serve", "--model", "/m", name, "1"}), Contains(std::string(name) + ": wanted --record beside it"));
  }
  const ConfigFile file(R"({"model": "/m", "record": "/r", "record-rate": 0.125, "record-rows": 8})");
  CHECK(ServeOf({"--config", file.path()}).record_rate == 0.125);
  const ConfigFile whole(R"({"model": "/m", "record": "/r", "record-rate": 1})");
  CHECK(ServeOf({"--config", whole.path()}).record_rate == 1);
  CHECK_THAT(ConfigError(R"({"model": "/m", "record": "/r", "record-rate": "1"})"),
             Contains("record-rate: wanted a number, got the string"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "record-rate": 0.5})"), Contains("--record-rate: wanted --record beside it"));
}

TEST_CASE("Replay takes files and a checkpoint, and refuses what it does not know") {
  const auto parsed = ParseCommandLine({"replay", "a", "b", "--checkpoint", "/m", "--backends", "cpu_avx2,cpu_generic", "--bound",
                                        "0.01", "--layer", "3", "--against", "recording", "--repeat", "5", "--json"});
  INFO(parsed.status().ToString());
  REQUIRE(parsed.ok());
  REQUIRE(parsed->command == Command::kReplay);
  CHECK(parsed->replay.files == std::vector<std::string>{"a", "b"});
  CHECK(parsed->replay.checkpoint == "/m");
  CHECK(parsed->replay.backends == std::vector<std::string>{"cpu_avx2", "cpu_generic"});
  CHECK(parsed->replay.bound == 0.01);
  CHECK(parsed->replay.layer == 3);
  CHECK(parsed->replay.against == "recording");
  CHECK(parsed->replay.repeat == 5);
  CHECK(parsed->replay.json);
  CHECK(ParseCommandLine({"replay", "a", "--checkpoint", "/m"})->replay.backends == std::vector<std::string>{"auto"});
  CHECK_THAT(ErrorOf({"replay", "--checkpoint", "/m"}), Contains("replay: wanted recordings"));
  CHECK_THAT(ErrorOf({"replay", "a"}), Contains("replay: wanted --checkpoint"));
  CHECK_THAT(ErrorOf({"replay", "a", "--checkpoint", "/m", "--against", "x"}), Contains("--against: wanted reference or"));
  CHECK_THAT(ErrorOf({"replay", "a", "--checkpoint", "/m", "--backends", ","}), Contains("--backends: wanted names"));
  CHECK_THAT(ErrorOf({"replay", "a", "--checkpoint", "/m", "--bound", "2"}), Contains("--bound: wanted a number from 0 to 1"));
  CHECK_THAT(ErrorOf({"replay", "a", "--checkpoint", "/m", "--backend", "x"}), Contains("the nearest is --backends"));
}

TEST_CASE("A value of the wrong JSON type is refused with its key") {
  CHECK_THAT(ConfigError(R"({"threads": "4"})"), Contains("threads: wanted a whole number, got the string \"4\""));
  CHECK_THAT(ConfigError(R"({"threads": 1.5})"), Contains("threads: wanted a whole number, got 1.5"));
  CHECK_THAT(ConfigError(R"({"threads": -3, "model": "/m"})"), Contains("threads: wanted") && Contains("'-3'"));
  CHECK_THAT(ConfigError(R"({"threads": null})"), Contains("threads: wanted a whole number, got null"));
  CHECK_THAT(ConfigError(R"({"threads": [4]})"), Contains("threads: wanted a whole number, got a list"));
  CHECK_THAT(ConfigError(R"({"policy": {"a": 1}})"), Contains("policy: wanted a string, got an object"));
  CHECK_THAT(ConfigError(R"({"deterministic": 1})"), Contains("deterministic: wanted true or false, got 1"));
  CHECK_THAT(ConfigError(R"({"pin-threads": 2})"), Contains("pin-threads: wanted true or false, got 2"));
  CHECK_THAT(ConfigError(R"({"pin-threads": false, "model": "/m"})", {"--pin-threads"}), Contains("pin-threads conflicts with --pin-threads"));
  CHECK_THAT(ConfigError(R"({"model": [1]})"), Contains("model: wanted strings in the list, got 1"));
  CHECK_THAT(ConfigError(R"({"model": [["/m"]]})"), Contains("model: wanted strings in the list, got a list"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "threads": 5000})"), Contains("threads: wanted a whole number from 0 to 1024"));
}

TEST_CASE("A file that is not one object is refused with the position") {
  CHECK_THAT(ConfigError(""), Contains("syntax error at byte"));
  CHECK_THAT(ConfigError(R"({"model": "/m")"), Contains("syntax error at byte"));
  CHECK_THAT(ConfigError(R"({"model": "/m"} x)"), Contains("syntax error at byte"));
  CHECK_THAT(ConfigError("[1]"), Contains("wanted"));
  CHECK_THAT(ConfigError("7"), Contains("wanted an object of options, got 7"));
  CHECK_THAT(ConfigError("{\"model\": \"\xff\"}"), Contains("syntax error"));
  CHECK_THAT(ConfigError(R"({"threads": 1e999})"), Contains("wanted"));
  CHECK_THAT(ConfigError(R"({"model": "/m", "queue": 1, "queue": 1})"), Contains("queue: wanted each key once"));
  CHECK_THAT(ErrorOf({"serve", "--config", "/no/such/file.json"}), Contains("/no/such/file.json"));
  CHECK_THAT(ErrorOf({"serve", "--config", "/"}), Contains("wanted"));
}

TEST_CASE("explain, check and dequantize read their own options") {
  absl::StatusOr<CommandLine> explain = Parse({"explain", "/m", "--device", "h200", "--layer", "3", "--json"});
  REQUIRE(explain.ok());
  CHECK(explain->command == Command::kExplain);
  CHECK(explain->explain.path == "/m");
  CHECK(explain->explain.device == "h200");
  CHECK(explain->explain.layer == 3);
  CHECK(explain->explain.json);
  CHECK(explain->explain.max_tokens == 8192);
  CHECK(explain->explain.activations == "file");
  CHECK(explain->explain.gpu == "auto");
  CHECK(explain->explain.lanes == 2);
  CHECK(Parse({"explain", "/m", "--gpu", "none", "--lanes", "3"})->explain.gpu == "none");
  CHECK(Parse({"explain", "/m", "--gpu", "none", "--lanes", "3"})->explain.lanes == 3);
  CHECK_THAT(ErrorOf({"explain", "/m", "--gpu", "h200"}), Contains("--gpu: wanted one of auto, none, got 'h200'"));

  absl::StatusOr<CommandLine> dequantize = Parse({"dequantize", "/m", "out", "--dtype", "bf16", "--force"});
  REQUIRE(dequantize.ok());
  CHECK(dequantize->dequantize.bf16);
  CHECK(dequantize->dequantize.force);
  CHECK(dequantize->dequantize.out == "out");

  const ConfigFile file(R"({"model": "/m"})");
  absl::StatusOr<CommandLine> check = Parse({"check", "--config", file.path()});
  REQUIRE(check.ok());
  CHECK(check->command == Command::kCheck);
  CHECK(check->serve.models.size() == 1);

  CHECK_THAT(ErrorOf({"explain"}), Contains("PATH"));
  CHECK_THAT(ErrorOf({"explain", "/m", "--layer", "-1"}), Contains("--layer: wanted"));
  CHECK_THAT(ErrorOf({"explain", "/m", "--threads", "1"}), Contains("an option of explain"));
  CHECK_THAT(ErrorOf({"dequantize", "/m"}), Contains("PATH and OUT"));
  CHECK_THAT(ErrorOf({"dequantize", "/m", "o", "--dtype", "f16"}), Contains("wanted f32 or bf16, got 'f16'"));
}

TEST_CASE("Help has examples and the version is printed") {
  for (const std::string command : {"", "serve", "explain", "check", "dequantize"}) {
    std::vector<std::string> arguments = {"--help"};
    if (!command.empty()) arguments.insert(arguments.begin(), command);
    absl::StatusOr<CommandLine> help = Parse(arguments);
    REQUIRE(help.ok());
    CHECK(help->command == Command::kPrint);
    CHECK_THAT(help->text, Contains("Examples:") && Contains("moed " + command));
  }
  const std::string serve = Parse({"serve", "--help"})->text;
  for (const char* part : {"--max-tokens", "--ready-file", "int8", "--gpu", "--lanes"}) CHECK_THAT(serve, Contains(part));
  CHECK_THAT(Parse({"explain", "--help"})->text, Contains("--activations"));
  CHECK(Parse({"--version"})->text == "moed 0.1.0\n");
  CHECK(Parse({"--version"})->command == Command::kVersion);
}

TEST_CASE("Without the GPU a device has none of its properties, and auto leaves them") {
  DeviceInfo device;
  device.has_gpu = true;
  device.gpu_name = "NVIDIA H200";
  device.cuda_major = 9;
  device.gpu_free_bytes = 1000;
  MaskGpu("auto", &device);
  CHECK(device.has_gpu);
  CHECK(device.gpu_free_bytes == 1000);
  MaskGpu("none", &device);
  CHECK_FALSE(device.has_gpu);
  CHECK(device.gpu_name.empty());
  CHECK(device.cuda_major == 0);
  CHECK(device.gpu_free_bytes == 0);
}

TEST_CASE("A masked feature takes along what cannot exist without it") {
  IsaFlags isa;
  for (const IsaFlagName& flag : IsaFlagNames()) isa.*flag.flag = true;
  IsaFlags without_512 = isa;
  MaskFeatures({"avx512f"}, &without_512);
  CHECK_FALSE(without_512.avx512f);
  CHECK_FALSE(without_512.avx512vnni);
  CHECK_FALSE(without_512.avx512bf16);
  CHECK(without_512.avx2);
  CHECK(without_512.avxvnni);
  IsaFlags without_avx2 = isa;
  MaskFeatures({"avx2"}, &without_avx2);
  CHECK_FALSE(without_avx2.avx512f);
  CHECK_FALSE(without_avx2.avxvnni);
  CHECK(without_avx2.f16c);
  IsaFlags without_tiles = isa;
  MaskFeatures({"amx_tile"}, &without_tiles);
  CHECK_FALSE(without_tiles.amx_int8);
  CHECK(without_tiles.avx512f);
  IsaFlags without_vnni = isa;
  MaskFeatures({"avx512vnni"}, &without_vnni);
  CHECK_FALSE(without_vnni.avx512vnni);
  CHECK(without_vnni.avx512f);
}

}  // namespace moed
