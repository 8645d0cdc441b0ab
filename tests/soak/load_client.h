// One client process of the measurements of overload and of deaths: calls of one size, either the next one when the last was
// answered, or at random times of a given rate, whatever comes of them. Prints one line for each window of time, so that a process
// which is killed has told the ones before: "LOAD ok=N refused=N untold=N late=N other=N p50_us=X p99_us=X", latencies those of
// good answers; with `list` they are in a line "TIMES X X ..." before it, in microseconds.
//
// Threads: RunLoadClient starts and joins its own.
#ifndef MOED_TESTS_SOAK_LOAD_CLIENT_H_
#define MOED_TESTS_SOAK_LOAD_CLIENT_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "client/moed_client.h"

namespace moed::testing {

struct LoadClientOptions {
  std::string server;
  int32_t layer = 0;
  int64_t rows = 8;
  int64_t hidden = 0;   // H
  int concurrency = 1;  // calls under way, when `rate` is 0
  double rate = 0;      // calls a second, at random times; 0: each when another was answered
  int deadline_ms = 60'000;
  double window_s = 5;
  int windows = 1;
  uint32_t seed = 1;
  // By what the calls travel. kRpc is gRPC alone, with as many calls under way as come; the others are calls of the client library
  // by `concurrency` threads, which share the rate: a call that is due while all of them wait begins late, and its time counts from
  // when it was due.
  client::Transport transport = client::Transport::kRpc;
  bool list = false;  // print each time
  // Stop the process (SIGSTOP) once it has its connection, until somebody continues it: what it takes to start is then before.
  bool stopped = false;
};

// INVALID_ARGUMENT with the option, what was wanted and what was got; UNAVAILABLE when the transport cannot be had.
absl::Status RunLoadClient(const LoadClientOptions& options);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_LOAD_CLIENT_H_
