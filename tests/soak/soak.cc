// The program behind `./dev soak`: a soak (soak_life.h), a measurement of overload (overload.h), of clients that die (kill_load.h)
// or of swaps (swap_load.h), or one of their client processes (soak_client.h, load_client.h).
// Exit code: 0 all went well, 1 not so, 2 usage or set-up.
#include <grpc/support/log.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <map>
#include <string>

#include "client/moed_client.h"
#include "tests/soak/kill_load.h"
#include "tests/soak/load_client.h"
#include "tests/soak/overload.h"
#include "tests/soak/soak_client.h"
#include "tests/soak/soak_life.h"
#include "tests/soak/swap_load.h"

namespace {

int Ended(const absl::StatusOr<bool>& good) {
  if (good.ok()) return *good ? 0 : 1;
  std::fprintf(stderr, "soak: %s\n", good.status().ToString().c_str());
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  moed::client::TuneAllocator();
  gpr_set_log_function([](gpr_log_func_args*) {});
  CLI::App app("soaks a moed process", "soak");
  app.require_subcommand(1);
  moed::testing::SoakOptions soak;
  soak.program = std::filesystem::read_symlink("/proc/self/exe").string();
  moed::testing::SoakClientOptions client;

  CLI::App* run = app.add_subcommand("run", "the soak");
  run->add_option("--moed", soak.moed, "the program moed")->required();
  run->add_option("--data", soak.data, "the folder of checkpoints")->required();
  run->add_option("--seconds", soak.seconds, "after the warm-up")->check(CLI::Range(5.0, 1e7));
  run->add_option("--processes", soak.processes, "clients at a time")->check(CLI::Range(1, 16));
  run->add_option("--threads", soak.threads, "of each client")->check(CLI::Range(1, 16));
  run->add_option("--seed", soak.seed, "of everything random");

  moed::testing::OverloadOptions overload;
  overload.program = soak.program;
  CLI::App* flood = app.add_subcommand("overload", "more calls than the server can compute");
  flood->add_option("--moed", overload.moed, "the program moed")->required();
  flood->add_option("--data", overload.data, "the folder of checkpoints")->required();
  flood->add_option("--window", overload.window_s, "seconds of each measurement")->check(CLI::Range(1.0, 3600.0));
  flood->add_option("--only", overload.filter, "only the kinds of calls whose names contain this");

  moed::testing::KillLoadOptions kill;
  kill.program = soak.program;
  CLI::App* kills = app.add_subcommand("kill", "what the death of a client costs the others");
  kills->add_option("--moed", kill.moed, "the program moed")->required();
  kills->add_option("--data", kill.data, "the folder of checkpoints")->required();
  kills->add_option("--window", kill.window_s, "seconds of each measurement")->check(CLI::Range(1.0, 3600.0));
  kills->add_option("--rounds", kill.rounds, "of measurements")->check(CLI::Range(1, 1000));
  kills->add_option("--only", kill.filter, "only the kinds of calls whose names contain this");

  moed::testing::SwapLoadOptions swap;
  CLI::App* swaps = app.add_subcommand("swap", "what changes of weights cost the calls beside them");
  swaps->add_option("--moed", swap.moed, "the program moed")->required();
  swaps->add_option("--seconds", swap.seconds, "of calls")->check(CLI::Range(5.0, 1e7));

  moed::testing::LoadClientOptions load;
  const std::map<std::string, moed::client::Transport> transports = {{"rpc", moed::client::Transport::kRpc},
                                                                     {"shared-memory", moed::client::Transport::kSharedMemory},
                                                                     {"ring", moed::client::Transport::kRing}};
  CLI::App* loads = app.add_subcommand("load", "one of the clients of overload and kill");
  loads->add_option("--server", load.server)->required();
  loads->add_option("--layer", load.layer);
  loads->add_option("--rows", load.rows);
  loads->add_option("--hidden", load.hidden)->required();
  loads->add_option("--concurrency", load.concurrency);
  loads->add_option("--rate", load.rate);
  loads->add_option("--deadline-ms", load.deadline_ms);
  loads->add_option("--window", load.window_s);
  loads->add_option("--windows", load.windows);
  loads->add_option("--seed", load.seed);
  loads->add_option("--transport", load.transport)->transform(CLI::CheckedTransformer(transports));
  loads->add_flag("--list", load.list);
  loads->add_flag("--stopped", load.stopped);

  CLI::App* one = app.add_subcommand("client", "one of its clients");
  one->add_option("--tcp", client.tcp)->required();
  one->add_option("--unix", client.unix_socket)->required();
  one->add_option("--answers", client.answers)->required();
  one->add_option("--seed", client.seed);
  one->add_option("--threads", client.threads);
  one->add_option("--seconds", client.seconds);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (run->parsed()) return Ended(RunSoak(soak));
  if (flood->parsed()) return Ended(RunOverload(overload));
  if (kills->parsed()) return Ended(RunKillLoad(kill));
  if (swaps->parsed()) return Ended(RunSwapLoad(swap));
  const absl::Status status = loads->parsed() ? RunLoadClient(load) : RunSoakClient(client);
  return Ended(status.ok() ? absl::StatusOr<bool>(true) : status);
}
