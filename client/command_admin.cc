// The commands load, swap, unload and rollback: changes of what a server serves, while it serves.
#include <cstdio>
#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/moectl.h"
#include "client/table.h"

namespace moed::client {
namespace {

constexpr double kDefaultSeconds = 3600;  // loading a large model takes minutes

struct ChangeOptions {
  std::string name, path;
  bool keep = false;
};

using Change = std::function<absl::StatusOr<ServerStatus>(MoeClient&, const ChangeOptions&, const CallOptions&)>;

int RunChange(const Globals& globals, const ChangeOptions& options, const Change& change) {
  auto client = MoeClient::Connect(globals.server, globals.connection);
  if (!client.ok()) return Fail(client.status());
  const absl::StatusOr<ServerStatus> status = change(**client, options, globals.Call(kDefaultSeconds));
  if (!status.ok()) return Fail(status.status());
  if (globals.json) {
    Json models = Json::array();
    for (const ModelStatus& model : status->models) {
      models.push_back({{"name", model.name}, {"path", model.path}, {"state", LayerStateName(model.state)}, {"generation", model.generation}});
    }
    PrintJson({{"models", std::move(models)}});
    return kExitOk;
  }
  Table table({"model", "state", ">generation", ">layers", "path"});
  for (const ModelStatus& model : status->models) {
    table.Add({model.name, LayerStateName(model.state), absl::StrCat(model.generation), absl::StrCat(model.layers.size()), model.path});
  }
  std::printf("%s", table.Text().c_str());
  return kExitOk;
}

constexpr char kExamples[] = R"(Examples:
  moectl --server unix:/run/moed/admin.sock load big /models/big
  moectl --server unix:/run/moed/admin.sock swap big /models/big-v2 --keep-previous
  moectl --server unix:/run/moed/admin.sock rollback big
  moectl --server unix:/run/moed/admin.sock unload big

The server is one with --admin-listen ADDR, or with --admin-token-file. Paths are on its machine. Each command returns when the change
is made; interrupted before, it leaves the server as it was.)";

void Add(CLI::App& app, const Globals& globals, Run* run, const char* name, const char* about, bool with_path, bool with_keep,
         Change change) {
  CLI::App* command = app.add_subcommand(name, about);
  auto options = std::make_shared<ChangeOptions>();
  command->add_option("NAME", options->name, "the model's name")->required();
  if (with_path) command->add_option("PATH", options->path, "the checkpoint's folder, on the server's machine")->required();
  if (with_keep) command->add_flag("--keep-previous", options->keep, "keep the old weights in memory, for a rollback at once");
  command->footer(kExamples);
  command->callback([&globals, run, options, change = std::move(change)] {
    *run = [&globals, options, change] { return RunChange(globals, *options, change); };
  });
}

}  // namespace

void AddChanges(CLI::App& app, const Globals& globals, Run* run) {
  Add(app, globals, run, "load", "serve one more model", true, false, [](MoeClient& client, const auto& options, const auto& call) {
    return client.LoadModel(options.name, options.path, call);
  });
  Add(app, globals, run, "swap", "replace a model's weights while it is served", true, true,
      [](MoeClient& client, const auto& options, const auto& call) {
        return client.SwapModel(options.name, options.path, options.keep, call);
      });
  Add(app, globals, run, "unload", "serve a model no longer", false, false,
      [](MoeClient& client, const auto& options, const auto& call) { return client.UnloadModel(options.name, call); });
  Add(app, globals, run, "rollback", "take back the last swap of a model", false, false,
      [](MoeClient& client, const auto& options, const auto& call) { return client.RollbackModel(options.name, call); });
}

}  // namespace moed::client
