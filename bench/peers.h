// Times of other programs in the same cells, measured on the same machine with as many threads, for comparison.
//
// A file is a JSON list of objects {"shape", "scheme", "tokens", "peer", "ms"} and nothing else: shapes and schemes by the
// benchmark's own names, so that how a foreign type maps to a scheme is decided by who wrote the file; ms is the median of a
// call. Of several peers in a cell the fastest counts.
#ifndef MOED_BENCH_PEERS_H_
#define MOED_BENCH_PEERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/report.h"

namespace moed::bench {

struct PeerTime {
  std::string shape, scheme;
  int64_t tokens = 0;
  std::string peer;
  double ms = 0.0;
};

// INVALID_ARGUMENT for text that is no such list, with the entry's place in it, the key, what was wanted and got; a shape or a
// scheme that the benchmark does not have is one of these.
absl::StatusOr<std::vector<PeerTime>> ParsePeers(const std::string& text);
// ParsePeers of a file's text; errors name the file, NOT_FOUND when it cannot be read.
absl::StatusOr<std::vector<PeerTime>> ReadPeers(const std::string& path);

// Sets peer and peer_ms of the rows whose cell is among `peers`.
void AddPeers(const std::vector<PeerTime>& peers, std::vector<Row>* rows);

}  // namespace moed::bench

#endif  // MOED_BENCH_PEERS_H_
