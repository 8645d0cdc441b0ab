// The command line: CLI11 splits it and prints the help; every value goes through the checks of the option table.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/option_table.h"
#include "server/options.h"
#include "server/version.h"

namespace moed {
namespace {

using Kind = OptionSpec::Kind;

constexpr char kMainExamples[] = R"(
Examples:
  moed serve --model /models/tiny --listen 127.0.0.1:50061
  moed explain /models/tiny --device h200 --json
  moed check --config moed.json
  moed dequantize /models/tiny experts.safetensors --dtype bf16
  moed replay recordings --checkpoint /models/tiny --backends cpu_avx2,cpu_generic

Exit codes: 0 ok, 1 a check failed, 2 usage or set-up.
'moed COMMAND --help' describes the options of a command.)";

constexpr char kServeExamples[] = R"(
Examples:
  moed serve --model /models/tiny
  moed serve --model a=/models/one --model b=/models/two --listen 127.0.0.1:50061 --listen unix:/run/moed.sock
  moed serve --model /models/tiny --listen 0.0.0.0:50061 --tls-cert server.pem --tls-key server.key --token-file tokens
  moed serve --config moed.json --ready-file /run/moed.ready
  moed serve --model /models/tiny --policy auto,layers:3-5=require:cpu_avx2 --cpu-features -avx512f

A configuration file holds the same options by the same names:
  {"model": ["tiny=/models/tiny"], "listen": "127.0.0.1:0", "threads": 8, "deterministic": true}

SIGTERM or SIGINT drains: health off, accepted calls finish (within --grace), exit 0. A second one ends at once with exit code 1.)";

constexpr char kExplainExamples[] = R"(
Examples:
  moed explain /models/tiny
  moed explain /models/tiny --device cpu-amx --layer 3
  moed explain /models/tiny --device cpu-avx512-vnni --activations int8
  moed explain /models/tiny --policy require:cpu_avx2 --json

Reads config and headers only. Exit code 1 when a layer has no backend or the whole does not fit into memory.)";

constexpr char kCheckExamples[] = R"(
Examples:
  moed check --config moed.json

Checks options, configuration, the models' headers and the choice of backends as serve does before it opens its port.)";

constexpr char kDequantizeExamples[] = R"(
Examples:
  moed dequantize /models/tiny experts.safetensors
  moed dequantize /models/tiny experts.safetensors --dtype bf16 --force

Writes every routed and shared expert as model.layers.L.mlp.experts.E.{gate,up,down}_proj.weight and
model.layers.L.mlp.shared_experts.{gate,up,down}_proj.weight. f32 is exact; bf16 rounds to nearest even.)";

constexpr char kReplayExamples[] = R"(
Examples:
  moed replay recordings --checkpoint /models/tiny
  moed replay recordings --checkpoint /models/tiny --backends cpu_amx,cpu_avx2 --bound 0.01 --json
  moed replay a.safetensors b.safetensors --checkpoint /models/tiny --layer 3 --against recording --repeat 20

Runs calls that 'moed serve --record' recorded, in this process, on each of the backends, and compares their outputs with those of
the reference, which dequantizes exactly and adds in double precision. The recorded outputs are compared, too. An error is that of a
row, ||y - ref|| / ||ref||. Exit code 1 when one is above --bound.)";

// What the user wrote, per option name, before any check.
using RawValues = std::map<std::string, std::vector<std::string>>;

CLI::Option* AddOption(CLI::App* app, const OptionSpec& spec, RawValues* raw) {
  const std::string flag = absl::StrCat("--", spec.name);
  if (spec.kind == Kind::kSwitch) {
    std::vector<std::string>* values = &(*raw)[spec.name];
    return app->add_flag_callback(flag, [values] { *values = {"true"}; }, spec.help);
  }
  // Repetitions are collected here and judged by ApplyOption.
  return app->add_option(flag, (*raw)[spec.name], spec.help)->type_name(spec.value)->take_all()->allow_extra_args(false);
}

void AddServeOptions(CLI::App* app, RawValues* raw) {
  for (const OptionSpec& spec : ServeOptionTable()) AddOption(app, spec, raw);
  AddOption(app, {"config", Kind::kText, "FILE", "a JSON file with the same options", nullptr}, raw);
}

// Options of the other commands as table rows, so that they share parsing, help and errors.
constexpr OptionSpec kExplainOptions[] = {
    {"device", Kind::kText, "D", "this (default), a built-in name, or a JSON file", nullptr},
    {"policy", Kind::kText, "P", "as for serve; default auto", nullptr},
    {"activations", Kind::kText, "A", "file (default), none or int8, as for serve", nullptr},
    {"layer", Kind::kNumber, "N", "only this layer", nullptr},
    {"max-tokens", Kind::kNumber, "N", "as for serve; decides the workspace; default 8192", nullptr},
    {"lanes", Kind::kNumber, "N", "as for serve; decides the workspace on the GPU; default 2", nullptr},
    {"cpu-features", Kind::kText, "-F,-F", "processor features to treat as missing", nullptr},
    {"gpu", Kind::kText, "G", "auto (default), or none: as if the device had no GPU", nullptr},
    {"json", Kind::kSwitch, "", "one JSON document on stdout", nullptr},
};
constexpr OptionSpec kDequantizeOptions[] = {
    {"dtype", Kind::kText, "D", "f32 (default, exact) or bf16", nullptr},
    {"force", Kind::kSwitch, "", "replace an existing OUT", nullptr},
};

constexpr OptionSpec kReplayOptions[] = {
    {"checkpoint", Kind::kText, "PATH", "the checkpoint directory", nullptr},
    {"backends", Kind::kText, "B,B", "names of backends, or auto, the one that serve would take (default)", nullptr},
    {"against", Kind::kText, "R", "reference (default), or recording: the recorded outputs are right", nullptr},
    {"bound", Kind::kFraction, "X", "the largest error of a row that passes, 0 to 1", nullptr},
    {"model", Kind::kText, "NAME", "only calls of this model, where recordings are of several", nullptr},
    {"layer", Kind::kNumber, "N", "only calls of this layer", nullptr},
    {"repeat", Kind::kNumber, "N", "runs of each call, all timed; default 1", nullptr},
    {"worst", Kind::kNumber, "N", "rows of the largest errors that are named; default 5", nullptr},
    {"threads", Kind::kNumber, "N", "as for serve", nullptr},
    {"gpu", Kind::kText, "G", "auto (default) or none, as for serve", nullptr},
    {"cpu-features", Kind::kText, "-F,-F", "processor features to treat as missing", nullptr},
    {"activations", Kind::kText, "A", "file, none or int8, as for serve; default: as recorded", nullptr},
    {"deterministic", Kind::kSwitch, "", "as for serve; default: as recorded", nullptr},
    {"json", Kind::kSwitch, "", "one JSON document on stdout", nullptr},
};

absl::Status Named(const std::string& name, const absl::Status& status) {
  return status.ok() ? status : absl::Status(status.code(), absl::StrCat("--", name, ": ", status.message()));
}

// A single-valued option: its text, or `fallback` when it was not given.
absl::StatusOr<std::string> Single(const RawValues& raw, const std::string& name, const std::string& fallback) {
  const std::vector<std::string>& values = raw.at(name);
  for (const std::string& value : values) {
    if (value == values.front()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, ": wanted one value, got '", values.front(), "' and '", value, "'"));
  }
  return values.empty() ? fallback : values.front();
}

// The options of one command that does not use the serve table.
struct Reader {
  const RawValues& raw;
  absl::Status status;

  std::string Text(const std::string& name, const std::string& fallback) {
    absl::StatusOr<std::string> value = Single(raw, name, fallback);
    if (value.ok() && !value->empty()) return *value;
    if (status.ok()) status = value.ok() ? absl::InvalidArgumentError(absl::StrCat("--", name, ": wanted a value, got ''"))
                                         : value.status();
    return fallback;
  }
  int64_t Number(const std::string& name, int64_t low, int64_t high, int64_t fallback) {
    if (raw.at(name).empty()) return fallback;
    int64_t value = fallback;
    absl::Status parsed = ParseInteger(Text(name, "0"), low, high, &value);
    if (status.ok()) status = Named(name, parsed);
    return value;
  }
  bool Switch(const std::string& name) const { return !raw.at(name).empty(); }
};

absl::Status FillServe(const RawValues& raw, ServeOptions* out) {
  std::vector<GivenOption> given;
  for (const OptionSpec& spec : ServeOptionTable()) {
    if (!raw.at(spec.name).empty()) given.push_back({spec.name, raw.at(spec.name)});
  }
  absl::StatusOr<std::string> config = Single(raw, "config", "");
  if (!config.ok()) return config.status();
  std::vector<GivenOption> from_file;
  if (!raw.at("config").empty()) {
    absl::StatusOr<std::vector<GivenOption>> read = ReadConfigFile(*config);
    if (!read.ok()) return read.status();
    from_file = *std::move(read);
  }
  absl::StatusOr<ServeOptions> merged = MergeOptions(given, from_file, *config);
  if (!merged.ok()) return merged.status();
  *out = *std::move(merged);
  return absl::OkStatus();
}

absl::Status FillExplain(const RawValues& raw, ExplainOptions* out) {
  Reader reader{raw, {}};
  out->device = reader.Text("device", "this");
  out->policy = reader.Text("policy", "auto");
  out->layer = static_cast<int>(reader.Number("layer", 0, 1'000'000, -1));
  out->max_tokens = reader.Number("max-tokens", 1, 1 << 20, out->max_tokens);
  out->lanes = static_cast<int>(reader.Number("lanes", 1, kMaxLanes, out->lanes));
  out->json = reader.Switch("json");
  absl::Status activations = ParseActivations(reader.Text("activations", "file"), &out->activations);
  if (reader.status.ok()) reader.status = Named("activations", activations);
  absl::Status gpu = ParseGpu(reader.Text("gpu", "auto"), &out->gpu);
  if (reader.status.ok()) reader.status = Named("gpu", gpu);
  if (!raw.at("cpu-features").empty()) {
    absl::Status parsed = ParseFeatureMask(reader.Text("cpu-features", ""), &out->masked_features);
    if (reader.status.ok()) reader.status = Named("cpu-features", parsed);
  }
  return reader.status;
}

absl::Status FillDequantize(const RawValues& raw, DequantizeOptions* out) {
  Reader reader{raw, {}};
  const std::string dtype = reader.Text("dtype", "f32");
  out->bf16 = dtype == "bf16";
  out->force = reader.Switch("force");
  if (reader.status.ok() && dtype != "f32" && dtype != "bf16") {
    reader.status = absl::InvalidArgumentError(absl::StrCat("--dtype: wanted f32 or bf16, got '", dtype, "'"));
  }
  return reader.status;
}

// The parts of `text` between commas; none is empty.
std::vector<std::string> Listed(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end > begin) parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

absl::Status FillReplay(const RawValues& raw, ReplayOptions* out) {
  Reader reader{raw, {}};
  const auto take = [&reader](const char* name, const absl::Status& status) {
    if (reader.status.ok()) reader.status = Named(name, status);
  };
  if (!raw.at("checkpoint").empty()) out->checkpoint = reader.Text("checkpoint", "");
  out->backends = Listed(reader.Text("backends", "auto"));
  out->against = reader.Text("against", "reference");
  if (!raw.at("model").empty()) out->model = reader.Text("model", "");
  out->layer = static_cast<int>(reader.Number("layer", 0, 1'000'000, -1));
  out->repeat = static_cast<int>(reader.Number("repeat", 1, 1'000'000, out->repeat));
  out->worst = static_cast<int>(reader.Number("worst", 0, 1'000'000, out->worst));
  out->threads = static_cast<int>(reader.Number("threads", 0, 1024, 0));
  out->deterministic = reader.Switch("deterministic");
  out->json = reader.Switch("json");
  take("gpu", ParseGpu(reader.Text("gpu", "auto"), &out->gpu));
  if (!raw.at("bound").empty()) take("bound", ParseFraction(reader.Text("bound", ""), &out->bound));
  if (!raw.at("activations").empty()) take("activations", ParseActivations(reader.Text("activations", ""), &out->activations));
  if (!raw.at("cpu-features").empty()) {
    take("cpu-features", ParseFeatureMask(reader.Text("cpu-features", ""), &out->masked_features));
  }
  if (out->against != "reference" && out->against != "recording") {
    take("against", absl::InvalidArgumentError(absl::StrCat("wanted reference or recording, got '", out->against, "'")));
  }
  if (out->backends.empty()) take("backends", absl::InvalidArgumentError("wanted names of backends, got none"));
  if (reader.status.ok() && out->checkpoint.empty()) {
    return absl::InvalidArgumentError("replay: wanted --checkpoint PATH of a checkpoint directory, got none");
  }
  return reader.status;
}

// The first argument that nothing claimed, as an error with the nearest valid name.
absl::Status Unclaimed(const std::string& argument, const CLI::App& app) {
  if (argument.empty() || argument.front() != '-') {
    return absl::InvalidArgumentError(absl::StrCat("wanted no further argument, got '", argument, "'"));
  }
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    if (option->nonpositional()) names.push_back(absl::StrCat("--", option->get_lnames().front()));
  }
  const std::string flag = argument.substr(0, argument.find('='));
  const std::string command = app.get_name().empty() ? "moed" : app.get_name();
  return absl::InvalidArgumentError(
      absl::StrCat("wanted an option of ", command, ", got '", flag, "'; the nearest is ", NearestName(flag, names)));
}

// A value that is itself an option means that its value was forgotten.
absl::Status CheckValues(const RawValues& raw) {
  for (const auto& [name, values] : raw) {
    for (const std::string& value : values) {
      if (value.rfind("--", 0) != 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("--", name, ": wanted a value, got '", value, "'"));
    }
  }
  return absl::OkStatus();
}

// The grammar: one CLI11 application with its sub-commands, writing into `raw` and the path fields.
struct Grammar {
  CLI::App app{"moed serves the mixture-of-experts layers of a language model over gRPC."};
  std::map<std::string, RawValues> raw;  // by command
  std::string explain_path, dequantize_path, dequantize_out;
  std::vector<std::string> replay_files;

  CLI::App* Add(const std::string& name, const char* about, const char* examples) {
    CLI::App* command = app.add_subcommand(name, about)->allow_extras();
    command->footer(examples);
    command->set_help_flag("--help", "this text");
    return command;
  }

  Grammar() {
    app.name("moed");
    app.allow_extras();
    app.require_subcommand(0, 1);
    app.footer(kMainExamples);
    app.set_help_flag("--help", "this text");
    app.set_version_flag("--version", absl::StrCat("moed ", kVersion), "print the version");
    AddServeOptions(Add("serve", "serve checkpoints until SIGTERM", kServeExamples), &raw["serve"]);
    AddServeOptions(Add("check", "validate options and models, exit 0 or 2", kCheckExamples), &raw["check"]);
    CLI::App* explain = Add("explain", "which backend runs each layer, and why not the others", kExplainExamples);
    for (const OptionSpec& spec : kExplainOptions) AddOption(explain, spec, &raw["explain"]);
    explain->add_option("PATH", explain_path, "the checkpoint directory");
    CLI::App* dequantize = Add("dequantize", "write the experts unquantized into one safetensors file", kDequantizeExamples);
    for (const OptionSpec& spec : kDequantizeOptions) AddOption(dequantize, spec, &raw["dequantize"]);
    dequantize->add_option("PATH", dequantize_path, "the checkpoint directory");
    dequantize->add_option("OUT", dequantize_out, "the file to write");
    CLI::App* replay = Add("replay", "run recorded calls on several backends and compare", kReplayExamples);
    for (const OptionSpec& spec : kReplayOptions) AddOption(replay, spec, &raw["replay"]);
    replay->add_option("FILE", replay_files, "recordings, or folders of them");
  }
};

absl::Status Fill(const std::string& name, const Grammar& grammar, CommandLine* out) {
  const RawValues& raw = grammar.raw.at(name);
  if (name == "serve" || name == "check") {
    out->command = name == "serve" ? Command::kServe : Command::kCheck;
    return FillServe(raw, &out->serve);
  }
  if (name == "explain") {
    if (grammar.explain_path.empty()) return absl::InvalidArgumentError("explain: wanted PATH of a checkpoint directory, got none");
    out->command = Command::kExplain;
    out->explain.path = grammar.explain_path;
    return FillExplain(raw, &out->explain);
  }
  if (name == "replay") {
    if (grammar.replay_files.empty()) return absl::InvalidArgumentError("replay: wanted recordings or folders of them, got none");
    out->command = Command::kReplay;
    out->replay.files = grammar.replay_files;
    return FillReplay(raw, &out->replay);
  }
  if (grammar.dequantize_path.empty() || grammar.dequantize_out.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("dequantize: wanted PATH and OUT, got ",
                                                   grammar.dequantize_path.empty() ? "neither" : "PATH only"));
  }
  out->command = Command::kDequantize;
  out->dequantize.path = grammar.dequantize_path;
  out->dequantize.out = grammar.dequantize_out;
  return FillDequantize(raw, &out->dequantize);
}

absl::Status NoCommand(const Grammar& grammar) {
  const std::vector<std::string> extras = grammar.app.remaining();
  const std::string wanted = "wanted a command: serve, explain, check, dequantize or replay";
  if (extras.empty()) return absl::InvalidArgumentError(absl::StrCat(wanted, ", got none\nsee moed --help"));
  if (extras.front().rfind('-', 0) == 0) return Unclaimed(extras.front(), grammar.app);
  const std::string nearest = NearestName(extras.front(), {"serve", "explain", "check", "dequantize", "replay"});
  return absl::InvalidArgumentError(absl::StrCat(wanted, ", got '", extras.front(), "'; the nearest is ", nearest));
}

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(const std::vector<std::string>& arguments) {
  Grammar grammar;
  std::vector<const char*> argv = {"moed"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  CommandLine out;
  try {  // CLI11 reports by exceptions; they end here
    grammar.app.parse(static_cast<int>(argv.size()), argv.data());
  } catch (const CLI::CallForVersion& version) {
    out.command = Command::kVersion;
    out.text = absl::StrCat(version.what(), "\n");
    return out;
  } catch (const CLI::CallForHelp&) {
    out.text = grammar.app.help();
    return out;
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(error.what());
  }
  if (grammar.app.get_subcommands().empty()) return NoCommand(grammar);
  const CLI::App* command = grammar.app.get_subcommands().front();
  // Extras of the command come in order; those before the command belong to the program.
  for (const CLI::App* app : {static_cast<const CLI::App*>(&grammar.app), command}) {
    const std::vector<std::string> extras = app->remaining();
    if (!extras.empty()) return Unclaimed(extras.front(), *app);
  }
  if (absl::Status status = CheckValues(grammar.raw.at(command->get_name())); !status.ok()) return status;
  if (absl::Status status = Fill(command->get_name(), grammar, &out); !status.ok()) return status;
  return out;
}

}  // namespace moed
