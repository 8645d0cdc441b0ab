// Child processes for tests: start a program, read what it prints, signal it, wait for it within a limit.
//
// A child is killed when its Process goes away and when the test dies, so nothing outlives a test. Its output goes to
// unlinked files, so a child that prints much never blocks on a full pipe. Not thread-safe: one thread per Process.
#ifndef MOED_TESTS_SUPPORT_PROCESS_H_
#define MOED_TESTS_SUPPORT_PROCESS_H_

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace moed::testing {

class Process {
 public:
  // Starts arguments[0] (a path, or a name on PATH) with the environment of the test plus `environment` ("NAME=VALUE"
  // each). Null when that fails; a program that cannot be executed exits 127 with the reason on its stderr.
  static std::unique_ptr<Process> Start(const std::vector<std::string>& arguments,
                                        const std::vector<std::string>& environment = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }
  void Signal(int signal);
  // The exit code, or 128 + the signal that ended it; nothing when it still runs after `limit`.
  std::optional<int> Wait(std::chrono::milliseconds limit);
  bool Running() { return !Wait(std::chrono::milliseconds(0)).has_value(); }
  // All that it has printed so far.
  std::string Stdout() const;
  std::string Stderr() const;

 private:
  Process(pid_t pid, int out, int err) : pid_(pid), out_(out), err_(err) {}

  pid_t pid_;
  int out_;
  int err_;
  std::optional<int> exit_code_;
};

struct Finished {
  int exit_code = -1;  // -1: it could not be started, or was killed at the limit
  std::string out;
  std::string err;

  // The first line on stderr.
  std::string FirstError() const { return err.substr(0, err.find('\n')); }
};

// Runs a program to its end; `limit` is a hang guard.
Finished RunToEnd(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {},
                  std::chrono::milliseconds limit = std::chrono::minutes(3));

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_PROCESS_H_
