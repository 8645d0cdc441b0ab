// The figures of a replay: errors per row, which rows are the worst, times and their ratio, and both forms of the report.
#include "engine/replay_report.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace moed {
namespace {

using Catch::Matchers::Contains;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A subject with one column, whose rows have these errors against ones.
ReplaySubject WithErrors(const std::vector<float>& errors, int worst = 3) {
  ReplaySubject subject("s", "reference", worst);
  const std::vector<float> ones(errors.size(), 1.0f);
  std::vector<float> y;
  for (const float error : errors) y.push_back(1.0f + error);
  subject.AddOutput({"f.safetensors", "id", 4}, y, ones, 1);
  return subject;
}

}  // namespace

TEST_CASE("The error of a row is relative, a zero row demands zeros, and a NaN on one side is infinite") {
  const std::vector<float> zero = {0, 0}, y = {3, 5}, ref = {3, 4}, bad = {kNan, 1}, tiny = {0, 1e-30f};
  CHECK(RowError(y, ref) == Approx(0.2));
  CHECK(RowError(ref, ref) == 0.0);
  CHECK(RowError(zero, zero) == 0.0);
  CHECK(RowError(tiny, zero) == kInfinity);
  CHECK(RowError(bad, ref) == kInfinity);
  CHECK(RowError(ref, bad) == kInfinity);
  CHECK_FALSE(RowError(bad, bad).has_value());
}

TEST_CASE("Largest, mean and p99 error are over all rows of all calls, and the worst rows come first") {
  ReplaySubject subject = WithErrors({0.0f, 0.25f, 0.5f, 0.0f});
  subject.AddOutput({"g.safetensors", "other", 5}, std::vector<float>{2.0f, 1.125f}, std::vector<float>{1.0f, 1.0f}, 1);
  CHECK(subject.rows() == 6);
  CHECK(subject.MaxError() == 1.0);
  CHECK(subject.MeanError() == Approx((0.25 + 0.5 + 1.0 + 0.125) / 6));
  CHECK(subject.ErrorQuantile(0.5) == 0.125);
  CHECK(subject.ErrorQuantile(0.99) == 1.0);
  REQUIRE(subject.worst().size() == 3);
  CHECK(subject.worst()[0].call.request_id == "other");
  CHECK(subject.worst()[0].call.layer == 5);
  CHECK(subject.worst()[0].row == 0);
  CHECK(subject.worst()[1].error == 0.5);
  CHECK(subject.worst()[1].row == 2);
  CHECK(subject.worst()[2].error == 0.25);
}

TEST_CASE("p99 leaves out the worst of a hundred rows and no more") {
  std::vector<float> errors(100, 0.125f);
  errors[7] = 1.0f;
  CHECK(WithErrors(errors).ErrorQuantile(0.99) == 0.125);
  errors[8] = 0.5f;
  CHECK(WithErrors(errors).ErrorQuantile(0.99) == 0.5);
}

TEST_CASE("Rows without finite values on both sides are not judged, and are told") {
  ReplaySubject subject("s", "reference", 3);
  subject.AddOutput({}, std::vector<float>{kNan, 1.0f}, std::vector<float>{kNan, 1.0f}, 1);
  CHECK(subject.rows() == 2);
  CHECK(subject.unjudged_rows() == 1);
  CHECK(subject.MaxError() == 0);
  ReplayReport report;
  report.subjects = {subject};
  CHECK_THAT(ReplayText(report), Contains("1 rows hold NaN or Inf on both sides"));
}

TEST_CASE("Rows that are equal to the bit are counted") {
  ReplaySubject subject("s", "reference", 3);
  CHECK_FALSE(subject.equal_rows().has_value());
  const std::vector<uint8_t> recorded = {1, 2, 3, 4, 5, 6}, y = {1, 2, 3, 5, 5, 6};
  subject.AddBits(y, recorded, 2);
  CHECK(subject.equal_rows() == 2);
}

TEST_CASE("Times have quantiles, and a ratio that is the median over calls") {
  ReplaySubject base("a", "r", 0), other("b", "r", 0), untimed("c", "r", 0);
  for (const int64_t time : {1000, 2000, 4000}) base.AddNanoseconds(time);
  for (const int64_t time : {3000, 4000, 40000}) other.AddNanoseconds(time);
  CHECK(base.TimeQuantile(0.5) == 2.0);
  CHECK(base.TimeQuantile(0.99) == 4.0);
  CHECK(other.TimeRatio(base) == 3.0);
  CHECK(base.TimeRatio(base) == 1.0);
  CHECK(untimed.TimeRatio(base) == 0.0);
}

TEST_CASE("A report passes when no subject has an error above the bound, and infinity passes none") {
  ReplayReport report;
  report.subjects = {WithErrors({0.0f, 0.25f})};
  CHECK(report.passed());
  report.bound = 0.25;
  CHECK(report.passed());
  report.bound = 0.125;
  CHECK_FALSE(report.passed());
  CHECK_THAT(ReplayText(report), Contains("FAILED, bound 0.125"));
  report.bound = 1e9;
  report.subjects = {WithErrors({kNan})};
  CHECK_FALSE(report.passed());
  CHECK(ReplayJson(report)["subjects"][0]["max_error"].is_null());
}

TEST_CASE("Text and JSON of a report name subject, call, layer and row of the worst; control characters are shown as ?") {
  ReplayReport report;
  report.files = 2, report.calls = 3;
  report.notes = {"a note"};
  ReplaySubject subject("cpu_avx2", "reference", 1);
  subject.AddOutput({"f.safetensors", "a\nb", 4}, std::vector<float>{1.5f, 1.0f}, std::vector<float>{1.0f, 1.0f}, 1);
  subject.AddNanoseconds(1500);
  report.subjects = {subject};
  const std::string text = ReplayText(report);
  CHECK_THAT(text, Contains("3 calls of 2 files") && Contains("note: a note"));
  CHECK_THAT(text, Contains("worst rows of cpu_avx2 against reference"));
  CHECK_THAT(text, Contains("0.5  row 0  layer 4  request 'a?b'  f.safetensors"));
  const auto json = ReplayJson(report);
  CHECK(json["calls"] == 3);
  CHECK(json["passed"] == true);
  const auto& first = json["subjects"][0];
  CHECK(first["name"] == "cpu_avx2");
  CHECK(first["rows"] == 2);
  CHECK(first["equal_rows"].is_null());
  CHECK(first["max_error"] == 0.5);
  CHECK(first["worst"][0]["request_id"] == "a\nb");
  CHECK(first["worst"][0]["row"] == 0);
  CHECK(first["median_us"] == 1.5);
  CHECK(first["time_ratio"] == 1.0);
}

}  // namespace moed
