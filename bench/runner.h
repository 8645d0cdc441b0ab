// Runs cases of the CPU benchmark and makes their rows. One thread, which calls the worker pool.
#ifndef MOED_BENCH_RUNNER_H_
#define MOED_BENCH_RUNNER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/cases.h"
#include "bench/ceilings.h"
#include "bench/report.h"
#include "bench/timed_calls.h"
#include "kernels/moe_kernel.h"

namespace moed::bench {

struct RunOptions {
  std::vector<Shape> shapes;
  std::vector<int64_t> tokens;
  std::string filter;     // only cases whose SHAPE/SCHEME/BACKEND/TOKENS contains this
  int threads = 0;        // 0: all usable processors
  double min_time = 0.0;  // seconds a case, at least
};

class Runner {
 public:
  explicit Runner(const RunOptions& options);

  // The rows of all cases, empty when the filter leaves none. Layers are prepared one at a time; before and after every case
  // the ceilings are measured, and the median of all windows of the run is the denominator, since the speed of a machine drifts.
  // The error of a layer that cannot be prepared or called, with the case's name.
  absl::StatusOr<std::vector<Row>> Run();

  // B03: 64 rows of a layer of bf16 and int8 experts that are 176 wide and of one 192 wide, calls alternating: after three of
  // each the medians of 20. Rows without a ceiling, in pairs.
  absl::StatusOr<std::vector<Row>> RunPair();

 private:
  struct Case {
    Shape shape;
    NamedScheme scheme;
    const Backend* backend = nullptr;
    int64_t tokens = 0;
    // Of all cases that run on the same prepared layer.
    std::string layer() const { return std::string(shape.name) + "/" + scheme.name + "/" + backend->Name(); }
    std::string name() const { return layer() + "/" + std::to_string(tokens); }
  };

  std::vector<const Backend*> BackendsFor(const MoeDesc& desc) const;
  std::vector<Case> Cases() const;
  absl::Status PrepareFor(const Case& one, const MoeDesc& desc);
  absl::Status RunCase(const Case& one);
  absl::StatusOr<double> MedianSeconds(const Case& one, TimedCalls* calls);
  absl::Status RunOnePair(const Case& narrow, const Case& wide, std::vector<Row>* rows);
  Row MakeRow(const Case& one, const MoeDesc& desc, double seconds) const;

  const RunOptions options_;
  const DeviceInfo device_;
  WorkerPool pool_;
  Ceilings ceilings_;
  // Kept while the next case needs the same.
  std::unique_ptr<RepeatedExperts> experts_;
  std::string experts_key_;
  std::unique_ptr<PreparedMoe> prepared_;
  std::string prepared_key_;

  struct Measured {
    Row row;
    Ceiling ceiling;
    double work;  // bytes or operations of a call, as the ceiling counts
  };
  std::vector<Measured> measured_;
};

// The lines that compare each pair of RunPair's rows.
void PrintPairs(const std::vector<Row>& rows);

}  // namespace moed::bench

#endif  // MOED_BENCH_RUNNER_H_
