// The commands that look at a running server: status, explain, health and smoke.
#include <cstdio>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/moectl.h"
#include "client/table.h"

namespace moed::client {
namespace {

std::string OrDash(const std::string& text) { return text.empty() ? "-" : text; }

Json ToJson(const ModelStatus& model) {
  Json layers = Json::array();
  for (const LayerStatus& layer : model.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"state", LayerStateName(layer.state)},
                      {"scheme", layer.scheme},
                      {"executed_scheme", layer.executed_scheme},
                      {"backend", layer.backend},
                      {"bytes", layer.bytes},
                      {"file_bytes", layer.file_bytes},
                      {"numa_nodes", layer.numa_nodes},
                      {"note", layer.note}});
  }
  return {{"name", model.name},
          {"path", model.path},
          {"state", LayerStateName(model.state)},
          {"error", model.error},
          {"generation", model.generation},
          {"weights_hash", model.weights_hash},
          {"hidden", model.hidden},
          {"experts", model.num_experts},
          {"top_k", model.top_k},
          {"layers", std::move(layers)}};
}

Json ToJson(const HostStatus& host) {
  return {{"threads", host.threads},
          {"threads_limit", host.threads_limit},
          {"pinned", host.pinned},
          {"processors", host.processors},
          {"cpu_quota", host.cpu_quota > 0 ? Json(host.cpu_quota) : Json()},
          {"numa_nodes", host.numa_nodes},
          {"gpu", host.gpu.empty() ? Json() : Json(host.gpu)},
          {"gpu_free_bytes", host.gpu_free_bytes}};
}

Json ToJson(const QueueStatus& queue) {
  return {{"waiting", queue.waiting},     {"waiting_rows", queue.waiting_rows}, {"accepted", queue.accepted},
          {"refused", queue.refused},     {"expired", queue.expired},           {"cancelled", queue.cancelled},
          {"finished", queue.finished},   {"runs", queue.runs},                 {"rows", queue.rows},
          {"merged", queue.merged}};
}

void PrintQueue(const QueueStatus& queue) {
  const std::string text =
      absl::StrCat("queue: ", queue.waiting, " calls wait (", queue.waiting_rows, " rows); ", queue.accepted, " accepted, ",
                   queue.finished, " finished (", queue.merged, " with others), ", queue.refused, " refused, ", queue.expired,
                   " late, ", queue.cancelled, " cancelled; ", queue.rows, " rows in ", queue.runs, " runs");
  std::printf("%s\n", text.c_str());
}

void PrintStatus(const ServerStatus& status) {
  std::printf("moed %s\n", status.version.c_str());
  if (status.host.threads > 0) {
    std::printf("%d threads, limited by %s%s\n", status.host.threads, status.host.threads_limit.c_str(),
                status.host.pinned ? ", pinned" : "");
  }
  if (!status.host.gpu.empty()) {
    std::printf("GPU %s, %s free\n", status.host.gpu.c_str(), BytesText(static_cast<double>(status.host.gpu_free_bytes)).c_str());
  }
  PrintQueue(status.queue);
  for (const ModelStatus& model : status.models) {
    std::printf("\nmodel %s  %s  generation %llu  H=%lld E=%d k=%d  %s\n", model.name.c_str(), LayerStateName(model.state),
                static_cast<unsigned long long>(model.generation), static_cast<long long>(model.hidden), model.num_experts,
                model.top_k, model.path.c_str());
    if (!model.error.empty()) std::printf("  %s\n", model.error.c_str());
    if (!model.weights_hash.empty()) std::printf("  weights %s\n", model.weights_hash.c_str());
    Table table({">layer", "state", "backend", "scheme", "executed scheme", ">bytes", "note"});
    for (const LayerStatus& layer : model.layers) {
      table.Add({absl::StrCat(layer.layer), LayerStateName(layer.state), OrDash(layer.backend), OrDash(layer.scheme),
                 OrDash(layer.executed_scheme), BytesText(static_cast<double>(layer.bytes)), layer.note});
    }
    std::printf("%s", table.Text().c_str());
  }
}

int RunStatus(const Globals& globals) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<ServerStatus> status = (*client)->Status(globals.model, globals.Call());
  if (!status.ok()) return Fail(status.status());
  if (!globals.json) {
    PrintStatus(*status);
    return kExitOk;
  }
  Json models = Json::array();
  for (const ModelStatus& model : status->models) models.push_back(ToJson(model));
  PrintJson({{"version", status->version}, {"host", ToJson(status->host)}, {"queue", ToJson(status->queue)},
             {"models", std::move(models)}});
  return kExitOk;
}

Json ToJson(const LayerExplanation& layer) {
  Json backends = Json::array();
  for (const BackendVerdict& backend : layer.backends) {
    Json reasons = Json::array();
    for (const Reason& reason : backend.reasons) reasons.push_back({{"code", reason.code}, {"text", reason.text}});
    backends.push_back({{"name", backend.name}, {"ok", backend.ok}, {"reasons", std::move(reasons)}});
  }
  return {{"layer", layer.layer},
          {"scheme", layer.scheme},
          {"choice", layer.choice},
          {"bytes", layer.bytes},
          {"workspace_bytes", layer.workspace_bytes},
          {"backends", std::move(backends)},
          {"note", layer.note},
          {"shared_scheme", layer.shared_scheme},
          {"shared_choice", layer.shared_choice}};
}

void PrintExplanation(const Explanation& explanation) {
  std::printf("device: %s\n", explanation.device.c_str());
  for (const LayerExplanation& layer : explanation.layers) {
    std::printf("\nlayer %d: %s -> %s  (%s, workspace %s)\n", layer.layer, layer.scheme.c_str(),
                layer.choice.empty() ? "no backend" : layer.choice.c_str(),
                BytesText(static_cast<double>(layer.bytes)).c_str(),
                BytesText(static_cast<double>(layer.workspace_bytes)).c_str());
    if (!layer.note.empty()) std::printf("  %s\n", layer.note.c_str());
    if (!layer.shared_scheme.empty()) {
      std::printf("  shared expert: %s -> %s\n", layer.shared_scheme.c_str(), OrDash(layer.shared_choice).c_str());
    }
    for (const BackendVerdict& backend : layer.backends) {
      std::printf("  %-16s %s\n", backend.name.c_str(), backend.ok ? "ok" : "no");
      for (const Reason& reason : backend.reasons) std::printf("    %s: %s\n", reason.code.c_str(), reason.text.c_str());
    }
  }
  std::printf("\n%s\n",
              explanation.fits ? "every layer has a backend" : "NOT every layer has a backend, or memory is too small");
}

int RunExplain(const Globals& globals, std::optional<int32_t> layer) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<Explanation> explanation = (*client)->Explain(globals.model, layer, globals.Call());
  if (!explanation.ok()) return Fail(explanation.status());
  if (globals.json) {
    Json layers = Json::array();
    for (const LayerExplanation& each : explanation->layers) layers.push_back(ToJson(each));
    PrintJson({{"device", explanation->device}, {"layers", std::move(layers)}, {"fits", explanation->fits}});
  } else {
    PrintExplanation(*explanation);
  }
  return explanation->fits ? kExitOk : kExitCheckFailed;
}

int RunHealth(const Globals& globals, const std::string& service) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<Health> health = (*client)->CheckHealth(service, globals.Call());
  if (!health.ok()) return Fail(health.status());
  if (globals.json) {
    PrintJson({{"service", service}, {"status", HealthName(*health)}});
  } else {
    std::printf("%s\n", HealthName(*health));
  }
  return *health == Health::kServing ? kExitOk : kExitCheckFailed;
}

struct SmokeOptions {
  std::optional<int32_t> layer;
  int32_t tokens = 0;
  uint64_t seed = 0;
};

void PrintSmoke(const SelfCheckResult& result) {
  Table table({">layer", "backend", "scheme", ">tokens", ">max rel", ">bound", "result"});
  for (const SelfCheckRow& row : result.rows) {
    table.Add({absl::StrCat(row.layer), row.backend, row.scheme, absl::StrCat(row.tokens),
               absl::StrFormat("%.3g", row.max_rel), absl::StrFormat("%.3g", row.bound), row.passed ? "ok" : "FAILED"});
  }
  std::printf("%s%s\n", table.Text().c_str(), result.passed ? "passed" : "FAILED");
}

int RunSmoke(const Globals& globals, const SmokeOptions& options) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<SelfCheckResult> result =
      (*client)->SelfCheck(globals.model, options.layer, options.tokens, options.seed, globals.Call(600));
  if (!result.ok()) return Fail(result.status());
  if (globals.json) {
    Json rows = Json::array();
    for (const SelfCheckRow& row : result->rows) {
      rows.push_back({{"layer", row.layer},
                      {"backend", row.backend},
                      {"scheme", row.scheme},
                      {"tokens", row.tokens},
                      {"max_rel", row.max_rel},
                      {"bound", row.bound},
                      {"passed", row.passed}});
    }
    PrintJson({{"rows", std::move(rows)}, {"passed", result->passed}});
  } else {
    PrintSmoke(*result);
  }
  return result->passed ? kExitOk : kExitCheckFailed;
}

}  // namespace

void AddStatus(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("status", "models and layers of a running server, their states and backends");
  command->footer("Examples:\n  moectl status\n  moectl --server unix:/run/moed.sock status --json");
  command->callback([&globals, run] { *run = [&globals] { return RunStatus(globals); }; });
}

void AddExplain(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("explain", "per layer the chosen backend and, for each other one, why not");
  auto layer = std::make_shared<std::optional<int32_t>>();
  command->add_option("--layer", *layer, "only this layer")->check(LayerNumber());
  command->footer(
      "Examples:\n  moectl explain\n  moectl explain --layer 3 --json\n\nExit code 1 when a layer has no backend.");
  command->callback([&globals, run, layer] { *run = [&globals, layer] { return RunExplain(globals, *layer); }; });
}

void AddHealth(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("health", "grpc.health.v1 Check: exit code 0 when SERVING, 1 when not");
  auto service = std::make_shared<std::string>();
  command->add_option("--service", *service, "\"\" (the server), MODEL or MODEL/LAYER")->capture_default_str();
  command->footer("Examples:\n  moectl health\n  moectl health --service mixtral/3");
  command->callback([&globals, run, service] { *run = [&globals, service] { return RunHealth(globals, *service); }; });
}

void AddSmoke(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command = app.add_subcommand("smoke", "random tokens through every layer, compared with the server's reference");
  auto options = std::make_shared<SmokeOptions>();
  command->add_option("--layer", options->layer, "only this layer")->check(LayerNumber());
  command->add_option("--tokens", options->tokens, "rows per layer; default: the server's")->check(Between(1, 64));
  command->add_option("--seed", options->seed, "of the random rows")->capture_default_str();
  command->footer(
      "Examples:\n  moectl smoke\n  moectl smoke --layer 0 --tokens 64 --json\n\nExit code 1 when a layer fails.");
  command->callback([&globals, run, options] { *run = [&globals, options] { return RunSmoke(globals, *options); }; });
}

}  // namespace moed::client
