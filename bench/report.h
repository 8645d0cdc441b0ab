// Rows of a benchmark run: a table for people, JSON for machines.
#ifndef MOED_BENCH_REPORT_H_
#define MOED_BENCH_REPORT_H_

#include <string>
#include <vector>

namespace moed::bench {

struct Row {
  std::string bench;     // "cpu"
  std::string shape;     // "qwen3-30b"
  std::string scheme;
  std::string backend;
  int64_t tokens = 0;
  double ms = 0.0;       // median
  std::string ceiling;   // name of the ceiling: "read stream", "float FMA"
  double ceiling_value = 0.0;
  std::string ceiling_unit;
  double fraction = 0.0; // of that ceiling, measured in the same run
};

void PrintTable(const std::vector<Row>& rows);
// False, with a message on stderr, when the file cannot be written.
bool WriteJson(const std::vector<Row>& rows, const std::string& path);

}  // namespace moed::bench

#endif  // MOED_BENCH_REPORT_H_
