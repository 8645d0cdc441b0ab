// Rows of a benchmark run: a table for people, JSON for machines.
#ifndef MOED_BENCH_REPORT_H_
#define MOED_BENCH_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moed::bench {

struct Row {
  std::string bench;  // "cpu", "cpu-pair", "gpu", "gpu-variant"
  std::string shape;  // "qwen3-30b"
  std::string scheme;
  std::string backend;
  int threads = 0;  // 0: not of the host's threads
  int64_t tokens = 0;
  double ms = 0.0;          // of a call, median
  double operations = 0.0;  // of a call, two per multiply-add
  // The ceiling that the row is compared with, as measured in the same run; without a value when it was not.
  std::string ceiling;
  std::string ceiling_unit;
  std::optional<double> ceiling_value;
  std::optional<double> fraction;
  // The fastest other program in the same cell, and its time; empty when none is known.
  std::string peer;
  double peer_ms = 0.0;
  std::optional<double> goal_ms;  // that a call should take
  // What the scheme or the call was changed to; empty: nothing was.
  std::string variant;
  std::optional<double> base_ratio;  // our time by that of the cell's base, as timed beside it

  double us_per_token() const { return tokens > 0 ? ms * 1e3 / static_cast<double>(tokens) : 0.0; }
  double gops() const { return ms > 0 ? operations / (ms * 1e6) : 0.0; }
  // The peer's time by ours: above 1 where we are faster; nothing without a peer.
  std::optional<double> peer_ratio() const;
};

// The geometric mean of the ratios to the peers, over the cells of a scheme on one backend.
struct PeerMean {
  std::string scheme;
  std::string backend;
  int cells = 0;
  double ratio = 0.0;
};
// One for each scheme and backend with a peer, in the order of the rows.
std::vector<PeerMean> PeerMeans(const std::vector<Row>& rows);

// Rows, and the means after them when there are peers.
void PrintTable(const std::vector<Row>& rows);
// False, with a message on stderr, when the file cannot be written. What a row does not have is left out.
bool WriteJson(const std::vector<Row>& rows, const std::string& path);

}  // namespace moed::bench

#endif  // MOED_BENCH_REPORT_H_
