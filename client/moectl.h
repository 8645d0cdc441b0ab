// moectl's parts: what every command shares and the functions that add the commands to the command line. A command is added
// with its options and, when it is the one that was given, leaves its body in `run`; main runs it.
#ifndef MOED_CLIENT_MOECTL_H_
#define MOED_CLIENT_MOECTL_H_

#include <CLI/CLI.hpp>

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/moed_client.h"

namespace moed::client {

inline constexpr char kVersion[] = "0.1.0";

// Exit codes of every command.
inline constexpr int kExitOk = 0;
inline constexpr int kExitCheckFailed = 1;  // it ran and its check failed
inline constexpr int kExitSetUp = 2;        // usage, files, connection, or a call that the server refused

// Options that every command takes, before or after its name.
struct Globals {
  std::string server = "127.0.0.1:50061";
  std::string model;
  bool json = false;
  double timeout_s = 0;      // 0: the command's own default
  ClientOptions connection;  // TLS files and token

  // Deadline of a call of a command whose default is `default_s` seconds.
  CallOptions Call(double default_s = 60) const;
};

// JSON keeps the order in which keys are set.
using Json = nlohmann::ordered_json;

using Run = std::function<int()>;

void AddStatus(CLI::App& app, const Globals& globals, Run* run);
void AddExplain(CLI::App& app, const Globals& globals, Run* run);
void AddHealth(CLI::App& app, const Globals& globals, Run* run);
void AddSmoke(CLI::App& app, const Globals& globals, Run* run);
void AddForward(CLI::App& app, const Globals& globals, Run* run);
void AddBench(CLI::App& app, const Globals& globals, Run* run);
void AddDoctor(CLI::App& app, const Globals& globals, Run* run);
void AddReplay(CLI::App& app, const Globals& globals, Run* run);
// load, swap, unload and rollback.
void AddChanges(CLI::App& app, const Globals& globals, Run* run);

// Prints the error as the first line on stderr, further lines of its text indented, and returns kExitSetUp. Errors of a call
// start with their code.
int Fail(const absl::Status& status);

// Takes numbers from min to max; the error has both and the text that was given.
CLI::Validator Between(double min, double max);

// Takes the numbers that a layer can have.
CLI::Validator LayerNumber();

// Prints one document on stdout. Text that is no UTF-8 is repaired; NaN and infinity become null.
void PrintJson(const Json& document);

}  // namespace moed::client

#endif  // MOED_CLIENT_MOECTL_H_
