// A real moed for a test: started on checkpoints with a TCP port that it picks and a UNIX socket, waited for until it is
// ready, killed at the end. And moectl processes against it. For one thread; the addresses may be used by any.
#ifndef MOED_TESTS_CLIENT_RUNNING_SERVER_H_
#define MOED_TESTS_CLIENT_RUNNING_SERVER_H_

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/support/process.h"

namespace moed::testing {

// The programs under test, below the working directory of `bazel test`.
inline constexpr char kMoed[] = "server/moed";
inline constexpr char kMoectl[] = "client/moectl";

// Whether there is something at `path`.
bool Exists(const std::string& path);
// Waits until `condition` holds; false when a minute passed first.
bool WaitFor(const std::function<bool()>& condition);

class RunningServer {
 public:
  // Serves `models` ("PATH" or "NAME=PATH") with `more` options. Fails the test when it does not become ready. `launcher` is
  // what runs the program, such as an emulator; it must keep the process id.
  explicit RunningServer(const std::vector<std::string>& models, const std::vector<std::string>& more = {},
                         const std::vector<std::string>& launcher = {});
  ~RunningServer();

  const std::string& tcp() const { return tcp_; }           // 127.0.0.1:PORT
  const std::string& unix_socket() const { return unix_; }  // unix:PATH
  std::string ready_file() const;                           // exists while the server is ready
  Process& process() { return *process_; }

  // Runs `moectl --server TCP arguments...` to its end.
  Finished Moectl(const std::vector<std::string>& arguments) const;
  // The same with --json; fails the test unless the exit code is `exit_code` and stdout is exactly one JSON document.
  nlohmann::json MoectlJson(const std::vector<std::string>& arguments, int exit_code = 0) const;

 private:
  void WaitUntilReady();

  std::string folder_;
  std::string tcp_;
  std::string unix_;
  std::unique_ptr<Process> process_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_CLIENT_RUNNING_SERVER_H_
