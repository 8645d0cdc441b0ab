// What replays of recorded calls say: for each way of running them errors per row against a judge, worst rows, and latency.
//
// A subject is what is compared: a backend, a server, or the recording itself. Not thread-safe. A leaf, shared by `moed replay` and
// `moectl replay`, so that their figures mean the same.
#ifndef MOED_ENGINE_REPLAY_REPORT_H_
#define MOED_ENGINE_REPLAY_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace moed {

// ||y - ref|| / ||ref|| in double. A reference of zeros demands exact zeros: 0, else infinity; infinity as well when exactly one of
// them holds a NaN or an Inf. Nothing when both do: such rows have no error.
std::optional<double> RowError(std::span<const float> y, std::span<const float> ref);

// A call as reports name it.
struct ReplayedCall {
  std::string file;
  std::string request_id;
  int layer = 0;
};

struct WorstRow {
  double error = 0;
  ReplayedCall call;
  int64_t row = 0;  // of the output
};

class ReplaySubject {
 public:
  // `judge`: what it is compared with, in words. Of the worst rows, `worst` are kept.
  ReplaySubject(std::string name, std::string judge, int worst);

  // The outputs of one call and of the judge, [rows, columns] each.
  void AddOutput(const ReplayedCall& call, std::span<const float> y, std::span<const float> ref, int64_t columns);
  // The same outputs as bytes, of rows of `row_bytes`: how many rows are equal to the bit. For subjects that are compared with the
  // recording, whatever their judge.
  void AddBits(std::span<const uint8_t> y, std::span<const uint8_t> recorded, size_t row_bytes);
  // Time of one call. Every subject that is timed must get the same calls in the same order.
  void AddNanoseconds(int64_t nanoseconds) { times_.push_back(nanoseconds); }

  const std::string& name() const { return name_; }
  const std::string& judge() const { return judge_; }
  int64_t rows() const { return rows_; }                  // of all outputs
  int64_t unjudged_rows() const { return rows_ - static_cast<int64_t>(errors_.size()); }  // with no finite values on either side
  std::optional<int64_t> equal_rows() const { return compared_bits_ ? std::optional(equal_rows_) : std::nullopt; }
  const std::vector<WorstRow>& worst() const { return worst_; }  // largest error first, rows without error left out
  // Over the judged rows; 0 without any. `share` from 0 to 1: the smallest error that so many rows do not exceed.
  double MaxError() const;
  double MeanError() const;
  double ErrorQuantile(double share) const;
  // In microseconds; 0 without calls.
  double TimeQuantile(double share) const;
  // The median over calls of the time by that of `base`; 0 where they were not timed alike.
  double TimeRatio(const ReplaySubject& base) const;
  int64_t timed_calls() const { return static_cast<int64_t>(times_.size()); }

 private:
  void Keep(double error, const ReplayedCall& call, int64_t row);

  std::string name_, judge_;
  size_t kept_;  // of worst_, at most
  int64_t rows_ = 0;
  std::vector<double> errors_;
  std::vector<WorstRow> worst_;
  bool compared_bits_ = false;
  int64_t equal_rows_ = 0;
  std::vector<int64_t> times_;
};

struct ReplayReport {
  int64_t files = 0;
  int64_t calls = 0;
  std::vector<std::string> notes;  // what a reader should know, such as another scheme than the recorded one
  std::optional<double> bound;     // of the largest error of a row of each subject
  std::vector<ReplaySubject> subjects;  // times are given by that of the first that was timed

  // No error above the bound.
  bool passed() const;
};

// For people; and with keys that are a contract (docs/operations.md), infinity as null.
std::string ReplayText(const ReplayReport& report);
nlohmann::ordered_json ReplayJson(const ReplayReport& report);

}  // namespace moed

#endif  // MOED_ENGINE_REPLAY_REPORT_H_
