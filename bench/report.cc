#include "bench/report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

namespace moed::bench {
namespace {

// Columns that only some runs have.
struct Columns {
  bool peers = false, goals = false;
};

void PrintRow(const Row& row, const Columns& columns) {
  std::printf("%-17s %-23s %-14s %6ld %10.4f %9.1f %9.1f  %-11s ", row.shape.c_str(), row.scheme.c_str(), row.backend.c_str(),
              static_cast<long>(row.tokens), row.ms, row.us_per_token(), row.gops(), row.ceiling.c_str());
  if (row.ceiling_value && row.fraction) {
    std::printf("%9.1f %-6s %8.1f%%", *row.ceiling_value, row.ceiling_unit.c_str(), 100.0 * *row.fraction);
  } else {
    std::printf("%9s %-6s %9s", "-", "", "-");
  }
  if (row.peer_ratio()) {
    std::printf("  %-18s %10.4f %7.2fx", row.peer.c_str(), row.peer_ms, *row.peer_ratio());
  } else if (columns.peers) {
    std::printf("  %-18s %10s %8s", "-", "-", "-");
  }
  if (row.goal_ms) {
    std::printf(" %10.4f", *row.goal_ms);
  } else if (columns.goals) {
    std::printf(" %10s", "-");
  }
  std::printf("\n");
}

}  // namespace

std::optional<double> Row::peer_ratio() const {
  if (peer.empty() || !(ms > 0)) return std::nullopt;
  return peer_ms / ms;
}

std::vector<PeerMean> PeerMeans(const std::vector<Row>& rows) {
  std::vector<PeerMean> means;  // `ratio` holds the sum of logarithms until the end
  for (const Row& row : rows) {
    if (!row.peer_ratio()) continue;
    auto mean = std::find_if(means.begin(), means.end(), [&](const PeerMean& one) {
      return one.scheme == row.scheme && one.backend == row.backend;
    });
    if (mean == means.end()) mean = means.insert(means.end(), {row.scheme, row.backend, 0, 0.0});
    ++mean->cells;
    mean->ratio += std::log(*row.peer_ratio());
  }
  for (PeerMean& mean : means) mean.ratio = std::exp(mean.ratio / mean.cells);
  return means;
}

void PrintTable(const std::vector<Row>& rows) {
  const std::vector<PeerMean> means = PeerMeans(rows);
  std::printf("%-17s %-23s %-14s %6s %10s %9s %9s  %-11s %9s %-6s %9s", "shape", "scheme", "backend", "tokens", "ms", "us/token",
              "Gop/s", "ceiling", "measured", "", "fraction");
  const bool goals = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.goal_ms.has_value(); });
  const Columns columns = {!means.empty(), goals};
  if (columns.peers) std::printf("  %-18s %10s %8s", "peer", "peer ms", "ratio");
  if (columns.goals) std::printf(" %10s", "goal ms");
  std::printf("\n");
  for (const Row& row : rows) PrintRow(row, columns);
  if (means.empty()) return;
  std::printf("\n%-23s %-14s %6s %22s\n", "scheme", "backend", "cells", "peer's time by ours");
  for (const PeerMean& mean : means) {
    std::printf("%-23s %-14s %6d %21.2fx\n", mean.scheme.c_str(), mean.backend.c_str(), mean.cells, mean.ratio);
  }
}

bool WriteJson(const std::vector<Row>& rows, const std::string& path) {
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rows) {
    nlohmann::json object = {{"bench", row.bench},   {"shape", row.shape}, {"scheme", row.scheme}, {"backend", row.backend},
                             {"tokens", row.tokens}, {"ms", row.ms},       {"gops", row.gops()},   {"us_per_token", row.us_per_token()}};
    if (row.threads > 0) object["threads"] = row.threads;
    if (row.ceiling_value && row.fraction) {
      object.update({{"ceiling", row.ceiling}, {"ceiling_value", *row.ceiling_value}, {"ceiling_unit", row.ceiling_unit},
                     {"fraction", *row.fraction}});
    }
    if (row.peer_ratio()) object.update({{"peer", row.peer}, {"peer_ms", row.peer_ms}, {"peer_ratio", *row.peer_ratio()}});
    if (row.goal_ms) object["goal_ms"] = *row.goal_ms;
    if (!row.variant.empty()) object["variant"] = row.variant;
    if (row.base_ratio) object["base_ratio"] = *row.base_ratio;
    list.push_back(std::move(object));
  }
  std::ofstream file(path);
  file << list.dump(1) << "\n";
  file.close();
  if (file) return true;
  std::fprintf(stderr, "cannot write %s\n", path.c_str());
  return false;
}

}  // namespace moed::bench
