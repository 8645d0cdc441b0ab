// A closed-loop load generator for one layer: each worker has a connection of its own and sends its next request when the
// last one was answered. Threads: RunLoad starts and joins its own; while they run, workers share nothing that changes.
#ifndef MOED_CLIENT_LOAD_H_
#define MOED_CLIENT_LOAD_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "client/histogram.h"
#include "client/moed_client.h"

namespace moed::client {

struct LoadOptions {
  std::string server;
  ClientOptions connection;  // own_connection counts as set
  std::string model;
  int32_t layer = 0;
  int64_t tokens = 1;       // M of each request
  int64_t concurrency = 1;  // workers
  double seconds = 1;       // measured time, after one request per worker that is not measured
  DType dtype = DType::kBf16;
  bool random_ids = false;  // send random routing instead of leaving it to the server's gate
  uint64_t seed = 1;
  Transport transport = Transport::kAuto;
  CallOptions call;
  int64_t hidden = 0;  // H, E and k of the model
  int64_t num_experts = 0;
  int64_t top_k = 0;
};

struct LoadResult {
  int64_t calls = 0;   // answered with OK
  int64_t errors = 0;  // answered otherwise
  std::string first_error;
  double seconds = 0;          // measured
  LatencyHistogram latency;    // of OK calls, as the caller sees it
  LatencyHistogram server;     // the server's own part of it
  LatencyHistogram transport;  // the rest
  Timing sum;                  // of the server's times, and of batch_rows, over all OK calls
};

// Runs the load. An error of a worker's first request is returned and nothing is measured; later ones are counted.
absl::StatusOr<LoadResult> RunLoad(const LoadOptions& options);

}  // namespace moed::client

#endif  // MOED_CLIENT_LOAD_H_
