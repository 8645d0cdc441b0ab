#include "bench/report.h"

#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

namespace moed::bench {

void PrintTable(const std::vector<Row>& rows) {
  std::printf("%-12s %-34s %-12s %7s %10s  %-12s %14s %9s\n", "shape", "scheme", "backend", "tokens", "ms", "ceiling", "measured",
              "fraction");
  for (const Row& row : rows) {
    std::printf("%-12s %-34s %-12s %7ld %10.3f  %-12s %7.1f %-6s %8.1f%%\n", row.shape.c_str(), row.scheme.c_str(),
                row.backend.c_str(), static_cast<long>(row.tokens), row.ms, row.ceiling.c_str(), row.ceiling_value,
                row.ceiling_unit.c_str(), 100.0 * row.fraction);
  }
}

bool WriteJson(const std::vector<Row>& rows, const std::string& path) {
  nlohmann::json list = nlohmann::json::array();
  for (const Row& row : rows) {
    list.push_back({{"bench", row.bench}, {"shape", row.shape}, {"scheme", row.scheme}, {"backend", row.backend},
                    {"tokens", row.tokens}, {"ms", row.ms}, {"ceiling", row.ceiling}, {"ceiling_value", row.ceiling_value},
                    {"ceiling_unit", row.ceiling_unit}, {"fraction", row.fraction}});
  }
  std::ofstream file(path);
  file << list.dump(1) << "\n";
  file.close();
  if (file) return true;
  std::fprintf(stderr, "cannot write %s\n", path.c_str());
  return false;
}

}  // namespace moed::bench
