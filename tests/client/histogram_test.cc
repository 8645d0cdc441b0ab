#include "client/histogram.h"

#include <catch2/catch.hpp>

namespace moed::client {

TEST_CASE("Quantiles are never below the true value and at most 0.8 percent above it") {
  LatencyHistogram histogram;
  for (int64_t us = 1; us <= 10000; ++us) histogram.Add(us * 1000);
  CHECK(histogram.count() == 10000);
  for (double q : {0.001, 0.5, 0.9, 0.99, 0.999, 1.0}) {
    INFO("q = " << q);
    CHECK(histogram.QuantileMicros(q) >= q * 10000 * (1 - 1e-9));
    CHECK(histogram.QuantileMicros(q) <= q * 10000 * 1.008);
  }
}

TEST_CASE("The largest sample bounds every quantile") {
  LatencyHistogram histogram;
  histogram.Add(1'000'003);
  CHECK(histogram.QuantileMicros(0.5) == Approx(1000.003));
  CHECK(histogram.QuantileMicros(1) == Approx(1000.003));
}

TEST_CASE("Samples of any size have a bucket") {
  LatencyHistogram histogram;
  for (int64_t value : {int64_t{-5}, int64_t{0}, int64_t{127}, int64_t{128}, INT64_MAX}) histogram.Add(value);
  CHECK(histogram.count() == 5);
  CHECK(histogram.QuantileMicros(0.2) == 0);
  CHECK(histogram.QuantileMicros(0.6) == Approx(0.127));
  CHECK(histogram.QuantileMicros(0.8) == Approx(0.128));
}

TEST_CASE("Merging counts both sides, and no samples give zero") {
  LatencyHistogram fast;
  LatencyHistogram slow;
  CHECK(fast.QuantileMicros(0.99) == 0);
  for (int i = 0; i < 90; ++i) fast.Add(10'000);
  for (int i = 0; i < 10; ++i) slow.Add(5'000'000);
  fast.Merge(slow);
  CHECK(fast.count() == 100);
  CHECK(fast.QuantileMicros(0.5) == Approx(10).epsilon(0.01));
  CHECK(fast.QuantileMicros(0.95) == Approx(5000).epsilon(0.01));
}

}  // namespace moed::client
