// A moed process outside of a test: started, waited for, asked by the kernel's own numbers, and stopped. One thread.
#ifndef MOED_TESTS_SOAK_SOAK_SERVER_H_
#define MOED_TESTS_SOAK_SOAK_SERVER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/support/process.h"

namespace moed::testing {

// What the kernel tells of a process.
struct ProcessNumbers {
  int64_t anonymous_bytes = 0;  // resident and nobody else's: neither files nor memory of sessions
  int64_t resident_bytes = 0;
  int files = 0;  // open descriptors
  int mappings = 0;
  int sessions = 0;  // mappings of sessions' memory
};
// Zeros when there is no such process.
ProcessNumbers NumbersOf(pid_t pid);

class SoakServer {
 public:
  // Starts `moed serve` on `models` ("NAME=PATH") with `more` options and its sockets in `folder`, whose path must be short, and
  // waits until it is ready. INTERNAL with what it printed when it does not become ready.
  static absl::StatusOr<std::unique_ptr<SoakServer>> Start(const std::string& moed, const std::string& folder,
                                                           const std::vector<std::string>& models,
                                                           const std::vector<std::string>& more);

  const std::string& tcp() const { return tcp_; }
  std::string unix_socket() const { return "unix:" + folder_ + "/moed.sock"; }
  std::string admin() const { return "unix:" + folder_ + "/admin.sock"; }
  pid_t pid() const { return process_->pid(); }
  bool Running() { return process_->Running(); }
  std::string Errors() const { return process_->Stderr(); }

  // SIGTERM, and the exit code; -1 when it does not end within a minute.
  int Stop();

 private:
  SoakServer() = default;

  std::string folder_, tcp_;
  std::unique_ptr<Process> process_;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_SOAK_SERVER_H_
