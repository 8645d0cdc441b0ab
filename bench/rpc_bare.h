// What the transports of moed are compared with: the bare things, measured beside them in the same run.
//
// Each server is a process of its own, a child that runs this program again (see RunChild), and is killed with its object. One
// thread uses an object at a time.
#ifndef MOED_BENCH_RPC_BARE_H_
#define MOED_BENCH_RPC_BARE_H_

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed::bench {

// A process that is killed with the object.
class Child {
 public:
  // Null when it cannot be started.
  static std::unique_ptr<Child> Start(const std::vector<std::string>& arguments);
  ~Child();
  bool Running();

 private:
  explicit Child(pid_t pid) : pid_(pid) {}
  pid_t pid_;
};

// A gRPC server that sends back what it gets, and a client with one call under way.
class Echo {
 public:
  // At the unix socket `path`. `tuned`: both processes keep large blocks, as moed and its client do; else glibc's defaults hold in
  // the server. UNAVAILABLE when it does not answer within ten seconds.
  static absl::StatusOr<std::unique_ptr<Echo>> Start(const std::string& path, bool tuned);
  ~Echo();
  // `bytes` there and back, which nobody looks at on either side; microseconds.
  absl::StatusOr<double> Call(size_t bytes);
  // The same as the bytes of a message, which both sides make and parse as generated code does.
  absl::StatusOr<double> CallMessage(size_t bytes);
  // A short message each way, between which the server copies `bytes`, at most kMostWork, from one place of memory that both
  // processes share to another, as the bench layer does; microseconds without that copy. What remains is what the call costs where
  // processors have slept, and caches have been emptied, for as long as a layer takes. `copies`: before it the client copies as
  // many bytes to the first place, and after it from the second, as a client of a session does whose tensors are elsewhere.
  absl::StatusOr<double> CallWork(size_t bytes, bool copies);
  static constexpr size_t kMostWork = size_t{4} << 20;

 private:
  struct Impl;
  explicit Echo(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Two processes that wake each other by a word of shared memory.
class PingPong {
 public:
  // `spin_us`: how long each looks before it sleeps in the kernel; 0: it sleeps at once.
  static absl::StatusOr<std::unique_ptr<PingPong>> Start(int spin_us);
  ~PingPong();
  // There and back; microseconds.
  double Call();
  // The same with a copy of `bytes` on the other side before it answers; microseconds without that copy.
  double CallWork(size_t bytes);

 private:
  struct Impl;
  explicit PingPong(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Microseconds of one memcpy of `bytes` between two blocks that stay the same.
double CopyMicros(size_t bytes);

// When the arguments ask for the other end of one of the above: runs it to its end and returns the exit code.
std::optional<int> RunChild(int argc, char** argv);

}  // namespace moed::bench

#endif  // MOED_BENCH_RPC_BARE_H_
