// The command forward: one real call with tensors from a file, its answer shown, compared and written.
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/compare.h"
#include "client/moectl.h"
#include "client/tensor_file.h"
#include "engine/safetensors.h"

namespace moed::client {
namespace {

struct ForwardOptions {
  int32_t layer = 0;
  std::string input;
  std::string hidden;
  std::string ids;
  std::string weights;
  std::string logits;
  bool routed_only = false;
  std::string expect;
  std::optional<double> max_rel;
  std::string expect_ids;
  std::vector<int64_t> skip_rows;
  std::string output;
  std::string dtype;
};

// The tensors that the command line names, loaded; those that it does not name stay empty.
struct Inputs {
  FloatMatrix hidden;
  Matrix<int32_t> ids;
  Matrix<float> weights;
  Matrix<float> logits;
  FloatMatrix expect;
  Matrix<int32_t> expect_ids;
};

// Moves the value of `loaded` into `target`, or returns its error.
template <typename T>
absl::Status Take(absl::StatusOr<T> loaded, T* target) {
  if (loaded.ok()) *target = *std::move(loaded);
  return loaded.status();
}

absl::Status CheckColumns(const std::string& name, MatrixShape shape) {
  if (shape.columns > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tensor \"", name, "\": wanted at least one column, got shape [", shape.rows, ", 0]"));
}

absl::Status LoadInputs(const ForwardOptions& options, Inputs* in) {
  const absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(options.input);
  if (!file.ok()) return file.status();
  absl::Status status = Take(LoadFloats(**file, "--hidden", options.hidden, {-1, -1}), &in->hidden);
  const int64_t rows = in->hidden.shape.rows;
  if (status.ok() && !options.ids.empty()) status = Take(LoadI32(**file, "--ids", options.ids, {rows, -1}), &in->ids);
  if (status.ok() && !options.weights.empty()) {
    status = Take(LoadF32(**file, "--weights", options.weights, {rows, in->ids.shape.columns}), &in->weights);
  }
  if (status.ok() && !options.logits.empty())
    status = Take(LoadF32(**file, "--logits", options.logits, {rows, -1}), &in->logits);
  if (status.ok() && !options.expect.empty()) {
    status = Take(LoadFloats(**file, "--expect", options.expect, in->hidden.shape), &in->expect);
  }
  if (status.ok() && !options.expect_ids.empty()) {
    status = Take(LoadI32(**file, "--expect-ids", options.expect_ids, {rows, -1}), &in->expect_ids);
  }
  // Without columns a tensor would mean "the server routes" on the wire.
  if (status.ok() && !options.ids.empty()) status = CheckColumns(options.ids, in->ids.shape);
  if (status.ok() && !options.logits.empty()) status = CheckColumns(options.logits, in->logits.shape);
  for (int64_t row : options.skip_rows) {
    if (status.ok() && (row < 0 || row >= rows)) {
      status = absl::InvalidArgumentError(
          absl::StrCat("--skip-rows: wanted rows of \"", options.hidden, "\", 0 to ", rows - 1, ", got ", row));
    }
  }
  return status;
}

ForwardCall MakeCall(const Globals& globals, const ForwardOptions& options, const Inputs& in) {
  ForwardCall call;
  call.model = globals.model;
  call.layer = options.layer;
  call.hidden = {in.hidden.dtype, in.hidden.shape.rows, in.hidden.shape.columns, in.hidden.bytes};
  call.top_k = in.ids.shape.columns;
  call.ids = in.ids.values;
  call.weights = in.weights.values;
  call.num_experts = in.logits.shape.columns;
  call.router_logits = in.logits.values;
  if (options.dtype == "f32") call.output_dtype = DType::kF32;
  if (options.dtype == "bf16") call.output_dtype = DType::kBf16;
  if (options.dtype == "f16") call.output_dtype = DType::kF16;
  call.routed_only = options.routed_only;
  call.return_routing = !options.expect_ids.empty() || !options.output.empty();
  return call;
}

StDtype FileDtype(DType dtype) {
  return dtype == DType::kF32 ? StDtype::kF32 : dtype == DType::kBf16 ? StDtype::kBf16 : StDtype::kF16;
}

std::span<const uint8_t> Bytes(const void* data, size_t size) { return {static_cast<const uint8_t*>(data), size}; }

// "output" [M, H] in the answer's dtype, "topk_ids" and "topk_weights" [M, k].
absl::Status WriteOutput(const std::string& path, const ForwardResult& result) {
  const std::vector<SafetensorsWriter::Tensor> tensors = {
      {"output", FileDtype(result.dtype), {result.rows, result.columns}},
      {"topk_ids", StDtype::kI32, {result.rows, result.top_k}},
      {"topk_weights", StDtype::kF32, {result.rows, result.top_k}},
  };
  auto writer = SafetensorsWriter::Create(path, tensors);
  if (!writer.ok()) return writer.status();
  absl::Status status = (*writer)->Append(Bytes(result.data.data(), result.data.size()));
  if (status.ok()) status = (*writer)->Append(Bytes(result.ids.data(), result.ids.size() * sizeof(int32_t)));
  if (status.ok()) status = (*writer)->Append(Bytes(result.weights.data(), result.weights.size() * sizeof(float)));
  return status.ok() ? (*writer)->Finish() : status;
}

// What the answer's comparisons said; absent where none was asked for.
struct Verdicts {
  std::optional<Comparison> values;
  std::optional<RoutingComparison> routing;
  bool passed = true;
};

absl::StatusOr<Verdicts> Judge(const ForwardOptions& options, const Inputs& in, const ForwardResult& result) {
  Verdicts verdicts;
  if (!options.expect.empty()) {
    verdicts.values = CompareRows(result.Floats(), ToFloats(in.expect.dtype, in.expect.bytes), result.rows, result.columns,
                                  options.skip_rows);
    const double max_rel = verdicts.values->max_rel;
    if (!std::isfinite(max_rel) || (options.max_rel.has_value() && max_rel > *options.max_rel)) verdicts.passed = false;
  }
  if (!options.expect_ids.empty()) {
    if (in.expect_ids.shape.columns != result.top_k) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", options.expect_ids, "\" (--expect-ids) in ", options.input,
                                                     ": wanted ", result.top_k, " columns, as the server's k, got ",
                                                     in.expect_ids.shape.columns));
    }
    verdicts.routing = CompareRouting(result.ids, in.expect_ids.values, result.rows, result.top_k, options.skip_rows);
    if (!verdicts.routing->different.empty()) verdicts.passed = false;
  }
  return verdicts;
}

Json ToJson(const ForwardResult& result, const Verdicts& verdicts) {
  Json json = {{"rows", result.rows},
               {"columns", result.columns},
               {"dtype", DTypeName(result.dtype)},
               {"backend", result.backend},
               {"scheme", result.scheme},
               {"generation", result.generation},
               {"times_us",
                {{"receive", result.timing.receive_us},
                 {"queue", result.timing.queue_us},
                 {"compute", result.timing.compute_us},
                 {"send", result.timing.send_us}}},
               {"batch_rows", result.timing.batch_rows},
               {"max_rel", nullptr}};
  if (verdicts.values.has_value()) {
    json["max_rel"] = verdicts.values->max_rel;
    json["worst_row"] = verdicts.values->worst_row;
    json["compared_rows"] = verdicts.values->compared;
    json["exempt_rows"] = verdicts.values->exempt;
  }
  if (verdicts.routing.has_value()) {
    json["different_routing_rows"] = verdicts.routing->different;
    json["compared_routing_rows"] = verdicts.routing->compared;
    json["exempt_routing_rows"] = verdicts.routing->exempt;
  }
  json["passed"] = verdicts.passed;
  return json;
}

void Print(const ForwardOptions& options, const ForwardResult& result, const Verdicts& verdicts) {
  const auto number = [](int64_t n) { return static_cast<long long>(n); };
  std::printf("rows %lld x %lld %s  backend %s  scheme %s  generation %llu\n", number(result.rows), number(result.columns),
              DTypeName(result.dtype), result.backend.c_str(), result.scheme.c_str(),
              static_cast<unsigned long long>(result.generation));
  std::printf("server: receive %lld us, queue %lld us, compute %lld us, send %lld us\n", number(result.timing.receive_us),
              number(result.timing.queue_us), number(result.timing.compute_us), number(result.timing.send_us));
  if (const auto& values = verdicts.values) {
    std::printf("%s: largest relative error of a row %.4g (row %lld)", options.expect.c_str(), values->max_rel,
                number(values->worst_row));
    if (options.max_rel.has_value()) std::printf(", allowed %.4g", *options.max_rel);
    std::printf("; %lld rows compared, %lld exempt\n", number(values->compared), number(values->exempt));
  }
  if (const auto& routing = verdicts.routing) {
    std::printf("%s: %zu rows routed otherwise", options.expect_ids.c_str(), routing->different.size());
    if (!routing->different.empty()) std::printf(" (first: row %lld)", number(routing->different.front()));
    std::printf("; %lld rows compared, %lld exempt\n", number(routing->compared), number(routing->exempt));
  }
  if (verdicts.values.has_value() || verdicts.routing.has_value())
    std::printf("%s\n", verdicts.passed ? "passed" : "FAILED");
}

int RunForward(const Globals& globals, const ForwardOptions& options) {
  Inputs inputs;
  if (absl::Status status = LoadInputs(options, &inputs); !status.ok()) return Fail(status);
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<ForwardResult> result = (*client)->Forward(MakeCall(globals, options, inputs), globals.Call());
  if (!result.ok()) return Fail(result.status());
  const absl::StatusOr<Verdicts> verdicts = Judge(options, inputs, *result);
  if (!verdicts.ok()) return Fail(verdicts.status());
  if (!options.output.empty()) {
    if (absl::Status status = WriteOutput(options.output, *result); !status.ok()) return Fail(status);
  }
  if (globals.json) {
    PrintJson(ToJson(*result, *verdicts));
  } else {
    Print(options, *result, *verdicts);
  }
  return verdicts->passed ? kExitOk : kExitCheckFailed;
}

constexpr char kExamples[] = R"(Examples:
  moectl forward --layer 0 --input g.safetensors --hidden 0.x --ids 0.topk_ids --weights 0.topk_weights \
      --routed-only --dtype f32 --expect 0.y --max-rel 1e-4
  moectl forward --layer 0 --input g.safetensors --hidden 0.x --logits 0.router_logits --output out.safetensors
  moectl forward --layer 0 --input g.safetensors --hidden 0.x --expect-ids 0.topk_ids --skip-rows 3,17 --json

Relative error of a row: ||y - expected|| / ||expected||. A zero row demands exact zeros; NaN and Inf fail.
JSON: max_rel is null without --expect, and when a row has a NaN or an Inf.
Exit code 1 when a comparison fails.)";

}  // namespace

void AddForward(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("forward", "one forward of one layer with tensors from a safetensors file");
  auto options = std::make_shared<ForwardOptions>();
  command->add_option("--layer", options->layer, "the layer's number, as in the checkpoint")
      ->required()
      ->check(LayerNumber());
  command->add_option("--input", options->input, "safetensors file with the tensors named below")->required();
  command->add_option("--hidden", options->hidden, "hidden states [M, H], f32, bf16 or f16")->required();
  CLI::Option* ids = command->add_option("--ids", options->ids, "expert ids [M, k], i32; -1 is no expert");
  CLI::Option* weights = command->add_option("--weights", options->weights, "final weights [M, k], f32");
  CLI::Option* logits =
      command->add_option("--logits", options->logits, "router logits [M, E], f32, after the router's bias");
  ids->needs(weights)->excludes(logits);
  weights->needs(ids)->excludes(logits);
  command->add_flag("--routed-only", options->routed_only, "leave out the shared expert");
  CLI::Option* expect = command->add_option("--expect", options->expect, "expected output [M, H], f32, bf16 or f16");
  command->add_option("--max-rel", options->max_rel, "largest relative error that passes")
      ->needs(expect)
      ->check(Between(0, 1e9));
  CLI::Option* expect_ids =
      command->add_option("--expect-ids", options->expect_ids, "expected routing [M, k], i32, compared as sets per row");
  CLI::Option* skip = command->add_option("--skip-rows", options->skip_rows, "rows that comparisons leave out, I,J,...");
  skip->delimiter(',')->allow_extra_args(false);
  command->add_option("--output", options->output, "file to write: output, topk_ids, topk_weights");
  command->add_option("--dtype", options->dtype, "the output's type; default: that of --hidden")
      ->check(CLI::IsMember({"f32", "bf16", "f16"}));
  command->footer(kExamples);
  command->callback([&globals, run, options, skip, expect, expect_ids] {
    if (skip->count() > 0 && expect->count() + expect_ids->count() == 0) {
      throw CLI::RequiresError("--skip-rows", "--expect or --expect-ids");
    }
    *run = [&globals, options] { return RunForward(globals, *options); };
  });
}

}  // namespace moed::client
