// The judge of moectl has to fail what is wrong before its passes mean anything.
#include "client/compare.h"

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <vector>

namespace moed::client {
namespace {

const float kNan = std::numeric_limits<float>::quiet_NaN();
const float kInf = std::numeric_limits<float>::infinity();

double Rel(std::vector<float> y, std::vector<float> ref) { return RelativeError(y, ref); }

}  // namespace

TEST_CASE("The relative error is the norm of the difference over the norm of the reference") {
  CHECK(Rel({3, 4}, {3, 4}) == 0);
  CHECK(Rel({3, 4.5f}, {3, 4}) == Approx(0.1));
  CHECK(Rel({0, 0}, {3, 4}) == Approx(1));
  CHECK(Rel({6, 8}, {3, 4}) == Approx(1));
  CHECK(Rel({-3, -4}, {3, 4}) == Approx(2));
}

TEST_CASE("A zero reference row demands exact zeros") {
  CHECK(Rel({0, -0.0f}, {0, 0}) == 0);
  CHECK(std::isinf(Rel({0, 1e-45f}, {0, 0})));
}

TEST_CASE("NaN and Inf on either side pass no bound") {
  CHECK(std::isinf(Rel({kNan, 1}, {1, 1})));
  CHECK(std::isinf(Rel({1, 1}, {kNan, 1})));
  CHECK(std::isinf(Rel({kNan, 1}, {kNan, 1})));
  CHECK(std::isinf(Rel({kInf, 1}, {kInf, 1})));
  CHECK(std::isinf(Rel({1, 1}, {kInf, 1})));
  CHECK(std::isinf(Rel({kNan, 0}, {0, 0})));
}

TEST_CASE("Values whose squares leave the float range are compared all the same") {
  CHECK(Rel({3e38f, 0}, {2e38f, 0}) == Approx(0.5));
  CHECK(Rel({3e-38f, 0}, {2e-38f, 0}) == Approx(0.5));
  CHECK(Rel({3e-45f, 0}, {1.5e-45f, 0}) == Approx(1));
}

TEST_CASE("The worst row is named and rows are judged one by one") {
  const std::vector<float> ref = {1, 0, 100, 0, 1, 0};
  const std::vector<float> y = {1.01f, 0, 101, 0, 1.02f, 0};  // the second row's error is the largest in absolute terms
  const Comparison all = CompareRows(y, ref, 3, 2, {});
  CHECK(all.max_rel == Approx(0.02).epsilon(1e-5));
  CHECK(all.worst_row == 2);
  CHECK(all.compared == 3);
  CHECK(all.exempt == 0);
}

TEST_CASE("A NaN row is the worst row and its neighbours do not hide it") {
  const std::vector<float> ref = {1, 1, 1, 1};
  const Comparison result = CompareRows(std::vector<float>{5, kNan, 7, 9}, ref, 4, 1, {});
  CHECK(std::isinf(result.max_rel));
  CHECK(result.worst_row == 1);
}

TEST_CASE("Exempt rows are left out and counted once") {
  const std::vector<float> ref = {1, 1, 1};
  const std::vector<float> y = {1, 9, 1};
  const std::vector<int64_t> skip = {1, 1, 7, -1};
  const Comparison result = CompareRows(y, ref, 3, 1, skip);
  CHECK(result.max_rel == 0);
  CHECK(result.compared == 2);
  CHECK(result.exempt == 1);
  CHECK(result.worst_row == 0);
}

TEST_CASE("Without rows nothing is compared and nothing is wrong") {
  const Comparison none = CompareRows({}, {}, 0, 256, {});
  CHECK(none.max_rel == 0);
  CHECK(none.worst_row == -1);
  CHECK(none.compared == 0);
  CHECK(CompareRouting({}, {}, 0, 4, {}).different.empty());
}

TEST_CASE("Routing is compared as sets with multiplicity, row by row") {
  const std::vector<int32_t> ref = {0, 1, 2, 3, 4, 4, 5, 6};
  const std::vector<int32_t> got = {1, 0, 2, 4, 4, 5, 6, 5};
  const RoutingComparison result = CompareRouting(got, ref, 4, 2, {});
  CHECK(result.different == std::vector<int64_t>{1, 2});
  CHECK(result.compared == 4);
  const std::vector<int64_t> skip = {2};
  const RoutingComparison fewer = CompareRouting(got, ref, 4, 2, skip);
  CHECK(fewer.different == std::vector<int64_t>{1});
  CHECK(fewer.exempt == 1);
}

}  // namespace moed::client
