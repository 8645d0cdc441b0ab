// The command doctor: what is wrong with a set-up, and what to do about it.
#include <cstdio>
#include <vector>

#include "client/doctor_checks.h"
#include "client/doctor_facts.h"
#include "client/moectl.h"
#include "client/table.h"

namespace moed::client {
namespace {

constexpr size_t kWidest = 76;  // characters of a cell; the JSON has all

std::string Cut(const std::string& text) { return text.size() <= kWidest ? text : text.substr(0, kWidest - 3) + "..."; }

void PrintChecks(const std::vector<DoctorCheck>& checks, bool with_server) {
  Table table({"check", "result", "found", "wanted"});
  for (const DoctorCheck& check : checks) table.Add({check.name, VerdictName(check.verdict), Cut(check.found), check.wanted});
  std::printf("%s", table.Text().c_str());
  if (!with_server) std::printf("\nNo server answered: this is what this host alone can tell.\n");
  bool first = true;
  for (const DoctorCheck& check : checks) {
    if (check.verdict == Verdict::kOk) continue;
    std::printf("%s%s: %s: %s\n", first ? "\n" : "", VerdictName(check.verdict), check.name.c_str(), check.fix.c_str());
    first = false;
  }
}

Json ToJson(const std::vector<DoctorCheck>& checks) {
  Json rows = Json::array();
  for (const DoctorCheck& check : checks) {
    rows.push_back({{"check", check.name},
                    {"result", VerdictName(check.verdict)},
                    {"found", check.found},
                    {"wanted", check.wanted},
                    {"fix", check.fix.empty() ? Json() : Json(check.fix)}});
  }
  return rows;
}

int RunDoctor(const Globals& globals) {
  DoctorOptions options{.version = kVersion, .server = globals.server, .model = globals.model, .connection = globals.connection};
  options.short_call = globals.Call(5).timeout;
  options.self_check = globals.Call(120).timeout;
  const DoctorFacts facts = GatherFacts(options);
  const std::vector<DoctorCheck> checks = JudgeFacts(facts);
  const Verdict worst = Worst(checks);
  const bool with_server = facts.hello.has_value();
  if (globals.json) {
    PrintJson({{"result", VerdictName(worst)}, {"server", with_server}, {"checks", ToJson(checks)}});
  } else {
    PrintChecks(checks, with_server);
  }
  return worst == Verdict::kFail ? kExitCheckFailed : kExitOk;
}

}  // namespace

void AddDoctor(CLI::App& app, const Globals& globals, Run* run) {
  CLI::App* command =
      app.add_subcommand("doctor", "what is wrong with this host, the way to the server, and the server, and what to do");
  command->footer(
      "Examples:\n  moectl doctor\n  moectl --server unix:/run/moed/moed.sock doctor --json\n\nExit code 1 when a check fails; a "
      "warning is none. With --timeout for each call, the self-check of one layer included.");
  command->callback([&globals, run] { *run = [&globals] { return RunDoctor(globals); }; });
}

}  // namespace moed::client
