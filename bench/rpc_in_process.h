// The call of a program that has the engine in itself, without a server: what a ring's call is compared with.
//
// One thread uses an object.
#ifndef MOED_BENCH_RPC_IN_PROCESS_H_
#define MOED_BENCH_RPC_IN_PROCESS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/engine.h"

namespace moed::bench {

class InProcess {
 public:
  // The bench layer of `hidden` columns, for calls of at most `max_rows` rows.
  static absl::StatusOr<std::unique_ptr<InProcess>> Make(int64_t hidden, int64_t max_rows);

  // Microseconds of one call of `rows` rows (bf16, one expert a row), without the copy that the layer makes. Code and data of the
  // engine are where that copy has left them: behind one that is larger than a cache they come from memory, as a server's do.
  // INVALID_ARGUMENT for more rows than those.
  absl::StatusOr<double> Call(int64_t rows);

 private:
  InProcess(int64_t hidden, int64_t max_rows);

  const int64_t hidden_, max_rows_;
  Engine engine_;
  std::vector<uint16_t> in_, out_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace moed::bench

#endif  // MOED_BENCH_RPC_IN_PROCESS_H_
