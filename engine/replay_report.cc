#include "engine/replay_report.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace moed {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The smallest value that `share` of all do not exceed; 0 without any.
template <typename T>
T Quantile(std::vector<T> values, double share) {
  if (values.empty()) return 0;
  const double rank = std::ceil(share * static_cast<double>(values.size())) - 1;
  const size_t at = static_cast<size_t>(std::clamp(rank, 0.0, static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

// The first subject with times; null: none has any.
const ReplaySubject* TimeBase(const ReplayReport& report) {
  const auto timed = [](const ReplaySubject& subject) { return subject.timed_calls() > 0; };
  const auto found = std::find_if(report.subjects.begin(), report.subjects.end(), timed);
  return found == report.subjects.end() ? nullptr : &*found;
}

// JSON knows no infinity.
Json Number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

std::string CallText(const ReplayedCall& call) {
  std::string id = call.request_id.substr(0, 128);
  std::replace_if(id.begin(), id.end(), [](unsigned char c) { return c < 32 || c == 127; }, '?');
  return absl::StrCat("layer ", call.layer, "  request '", id, "'  ", call.file);
}

std::string SubjectLine(const ReplayReport& report, const ReplaySubject& subject, int width, int judge_width) {
  const std::optional<int64_t> equal = subject.equal_rows();
  const auto* base = TimeBase(report);
  std::string line = absl::StrFormat("%-*s  %-*s  %8d  %8s  %9.3g  %9.3g  %9.3g", width, subject.name(), judge_width,
                                     subject.judge(), subject.rows(), equal ? absl::StrCat(*equal) : "-", subject.MaxError(),
                                     subject.ErrorQuantile(0.99), subject.MeanError());
  if (subject.timed_calls() == 0) return line + "          -          -      -\n";
  return line + absl::StrFormat("  %9.1f  %9.1f  %5.2f\n", subject.TimeQuantile(0.5), subject.TimeQuantile(0.99),
                                subject.TimeRatio(*base));
}

std::string WorstText(const ReplaySubject& subject) {
  std::string text;
  if (subject.unjudged_rows() > 0) {
    absl::StrAppend(&text, subject.name(), ": ", subject.unjudged_rows(),
                    " rows hold NaN or Inf on both sides and are not judged\n");
  }
  if (subject.worst().empty()) return text;
  absl::StrAppend(&text, "worst rows of ", subject.name(), " against ", subject.judge(), ":\n");
  for (const WorstRow& worst : subject.worst()) {
    absl::StrAppend(&text, absl::StrFormat("  %9.3g  row %d  ", worst.error, worst.row), CallText(worst.call), "\n");
  }
  return text;
}

Json SubjectJson(const ReplayReport& report, const ReplaySubject& subject) {
  Json worst = Json::array();
  for (const WorstRow& row : subject.worst()) {
    worst.push_back({{"error", Number(row.error)}, {"request_id", row.call.request_id}, {"layer", row.call.layer}, {"row", row.row},
                     {"file", row.call.file}});
  }
  Json json = {{"name", subject.name()},
               {"against", subject.judge()},
               {"rows", subject.rows()},
               {"unjudged_rows", subject.unjudged_rows()},
               {"equal_rows", nullptr},
               {"max_error", Number(subject.MaxError())},
               {"p99_error", Number(subject.ErrorQuantile(0.99))},
               {"mean_error", Number(subject.MeanError())},
               {"worst", std::move(worst)},
               {"median_us", nullptr},
               {"p99_us", nullptr},
               {"time_ratio", nullptr}};
  if (subject.equal_rows()) json["equal_rows"] = *subject.equal_rows();
  if (subject.timed_calls() == 0) return json;
  json["median_us"] = subject.TimeQuantile(0.5);
  json["p99_us"] = subject.TimeQuantile(0.99);
  json["time_ratio"] = subject.TimeRatio(*TimeBase(report));
  return json;
}

}  // namespace

std::optional<double> RowError(std::span<const float> y, std::span<const float> ref) {
  double difference = 0, norm = 0;
  bool y_finite = true, ref_finite = true;
  for (size_t i = 0; i < ref.size(); ++i) {  // squares of floats neither overflow nor vanish in double
    const double d = static_cast<double>(y[i]) - ref[i];
    difference += d * d;
    norm += static_cast<double>(ref[i]) * ref[i];
    y_finite = y_finite && std::isfinite(y[i]);
    ref_finite = ref_finite && std::isfinite(ref[i]);
  }
  if (!y_finite && !ref_finite) return std::nullopt;
  if (!y_finite || !ref_finite) return kInfinity;
  if (norm == 0) return difference == 0 ? 0 : kInfinity;
  return std::sqrt(difference / norm);
}

ReplaySubject::ReplaySubject(std::string name, std::string judge, int worst)
    : name_(std::move(name)), judge_(std::move(judge)), kept_(static_cast<size_t>(std::max(worst, 0))) {}

void ReplaySubject::AddOutput(const ReplayedCall& call, std::span<const float> y, std::span<const float> ref, int64_t columns) {
  const size_t width = static_cast<size_t>(columns), rows = ref.size() / width;
  rows_ += static_cast<int64_t>(rows);
  for (size_t row = 0; row < rows; ++row) {
    const std::optional<double> error = RowError(y.subspan(row * width, width), ref.subspan(row * width, width));
    if (!error) continue;
    errors_.push_back(*error);
    if (*error > 0) Keep(*error, call, static_cast<int64_t>(row));
  }
}

// Rows of equal error stay in the order in which they came.
void ReplaySubject::Keep(double error, const ReplayedCall& call, int64_t row) {
  const auto larger = [](double value, const WorstRow& kept) { return value > kept.error; };
  const auto at = std::upper_bound(worst_.begin(), worst_.end(), error, larger);
  if (at == worst_.end() && worst_.size() == kept_) return;
  worst_.insert(at, {error, call, row});
  if (worst_.size() > kept_) worst_.pop_back();
}

void ReplaySubject::AddBits(std::span<const uint8_t> y, std::span<const uint8_t> recorded, size_t row_bytes) {
  compared_bits_ = true;
  for (size_t at = 0; at + row_bytes <= recorded.size(); at += row_bytes) {
    equal_rows_ += std::memcmp(y.data() + at, recorded.data() + at, row_bytes) == 0;
  }
}

double ReplaySubject::MaxError() const { return errors_.empty() ? 0 : *std::max_element(errors_.begin(), errors_.end()); }

double ReplaySubject::MeanError() const {
  double sum = 0;
  for (const double error : errors_) sum += error;
  return errors_.empty() ? 0 : sum / static_cast<double>(errors_.size());
}

double ReplaySubject::ErrorQuantile(double share) const { return Quantile(errors_, share); }

double ReplaySubject::TimeQuantile(double share) const { return static_cast<double>(Quantile(times_, share)) / 1000; }

double ReplaySubject::TimeRatio(const ReplaySubject& base) const {
  if (times_.size() != base.times_.size()) return 0;
  std::vector<double> ratios;
  for (size_t i = 0; i < times_.size(); ++i) {
    ratios.push_back(static_cast<double>(times_[i]) / static_cast<double>(std::max<int64_t>(base.times_[i], 1)));
  }
  return Quantile(std::move(ratios), 0.5);
}

bool ReplayReport::passed() const {
  const auto within = [this](const ReplaySubject& subject) { return !bound || subject.MaxError() <= *bound; };
  return std::all_of(subjects.begin(), subjects.end(), within);
}

std::string ReplayText(const ReplayReport& report) {
  size_t width = 8, judge_width = 9;
  for (const ReplaySubject& subject : report.subjects) {
    width = std::max(width, subject.name().size());
    judge_width = std::max(judge_width, subject.judge().size());
  }
  std::string text = absl::StrCat(report.calls, " calls of ", report.files, " files\n");
  for (const std::string& note : report.notes) absl::StrAppend(&text, "note: ", note, "\n");
  constexpr char kTitles[] = "    rows     equal  max error  p99 error mean error  median us     p99 us  ratio";
  absl::StrAppend(&text, absl::StrFormat("%-*s  %-*s  %s\n", static_cast<int>(width), "", static_cast<int>(judge_width), "against",
                                         kTitles));
  for (const ReplaySubject& subject : report.subjects) {
    absl::StrAppend(&text, SubjectLine(report, subject, static_cast<int>(width), static_cast<int>(judge_width)));
  }
  for (const ReplaySubject& subject : report.subjects) absl::StrAppend(&text, WorstText(subject));
  if (report.bound) absl::StrAppend(&text, report.passed() ? "passed" : "FAILED", absl::StrFormat(", bound %g\n", *report.bound));
  return text;
}

Json ReplayJson(const ReplayReport& report) {
  Json subjects = Json::array();
  for (const ReplaySubject& subject : report.subjects) subjects.push_back(SubjectJson(report, subject));
  Json json = {{"files", report.files}, {"calls", report.calls}, {"notes", report.notes}, {"bound", nullptr}};
  if (report.bound) json["bound"] = *report.bound;
  json["subjects"] = std::move(subjects);
  json["passed"] = report.passed();
  return json;
}

}  // namespace moed
