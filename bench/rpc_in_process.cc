#include "bench/rpc_in_process.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace moed::bench {
namespace {

using std::chrono::steady_clock;

constexpr char kModel[] = "bench";

EngineOptions OneThread() {
  EngineOptions options;
  options.threads = 1;
  return options;
}

}  // namespace

InProcess::InProcess(int64_t hidden, int64_t max_rows)
    : hidden_(hidden), max_rows_(max_rows), engine_(OneThread(), {}), in_(static_cast<size_t>(max_rows * hidden), 1),
      out_(in_.size(), 2), ids_(static_cast<size_t>(max_rows), 0), weights_(ids_.size(), 1.0f) {}

absl::StatusOr<std::unique_ptr<InProcess>> InProcess::Make(int64_t hidden, int64_t max_rows) {
  std::unique_ptr<InProcess> made(new InProcess(hidden, max_rows));
  if (absl::Status status = made->engine_.PlanBench(kModel, hidden); !status.ok()) return status;
  if (absl::Status status = made->engine_.Load(kModel, {}); !status.ok()) return status;
  return made;
}

absl::StatusOr<double> InProcess::Call(int64_t rows) {
  if (rows > max_rows_) return absl::InvalidArgumentError(absl::StrCat("rows: wanted at most ", max_rows_, ", got ", rows));
  const size_t slots = static_cast<size_t>(rows);
  ForwardCall call;
  call.hidden = {in_.data(), DType::kBf16, rows, hidden_};
  call.routing = RoutingByIds{1, std::span(ids_).first(slots), std::span(weights_).first(slots)};
  ForwardInfo info;
  const auto begin = steady_clock::now();
  const absl::Status status = engine_.Forward(kModel, call, {out_.data(), DType::kBf16, rows, hidden_}, &info);
  const double micros = std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
  if (!status.ok()) return status;
  return micros - static_cast<double>(info.compute_us);
}

}  // namespace moed::bench
