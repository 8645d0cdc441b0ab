// Where metrics are collected: a real listener on loopback.
#include "server/metrics_listener.h"

#include <prometheus/metric_family.h>

#include <catch2/catch.hpp>

#include <memory>
#include <string>
#include <vector>

#include "tests/support/http_get.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using testing::HttpGet;
using testing::SendRaw;

struct OneGauge final : prometheus::Collectable {
  std::vector<prometheus::MetricFamily> Collect() const override {
    prometheus::ClientMetric series;
    series.gauge.value = 42;
    return {{"moed_answer", "help", prometheus::MetricType::Gauge, {series}}};
  }
};

}  // namespace

TEST_CASE("A port is picked, told, and answers GET /metrics until the listener goes") {
  auto listener = MetricsListener::Listen("--metrics-listen", "localhost:0", std::make_shared<OneGauge>());
  REQUIRE(listener.ok());
  const std::string address = (*listener)->address();
  CHECK_THAT(address, Catch::Matchers::StartsWith("localhost:"));
  CHECK(address != "localhost:0");
  const std::string answer = HttpGet(address, "/metrics");
  CHECK_THAT(answer, Contains("HTTP/1.1 200") && Contains("moed_answer 42"));
  CHECK_THAT(HttpGet(address, "/other"), Contains("HTTP/1.1 404"));
  listener->reset();
  CHECK(HttpGet(address, "/metrics").empty());
}

TEST_CASE("An address that cannot be bound is refused with option, address and reason") {
  auto first = MetricsListener::Listen("--metrics-listen", "127.0.0.1:0", std::make_shared<OneGauge>());
  REQUIRE(first.ok());
  const auto taken = MetricsListener::Listen("--metrics-listen", (*first)->address(), std::make_shared<OneGauge>());
  CHECK(absl::IsUnavailable(taken.status()));
  CHECK_THAT(std::string(taken.status().message()),
             Contains("--metrics-listen") && Contains((*first)->address()) && Contains("in use"));
  for (const std::string address : {"192.0.2.1:0", "no.such.host.invalid:0"}) {
    const auto refused = MetricsListener::Listen("--metrics-listen", address, std::make_shared<OneGauge>());
    CHECK(absl::IsUnavailable(refused.status()));
    CHECK_THAT(std::string(refused.status().message()), Contains(address));
  }
}

TEST_CASE("Garbage does not keep the next one from its metrics") {
  auto listener = MetricsListener::Listen("--metrics-listen", "127.0.0.1:0", std::make_shared<OneGauge>());
  REQUIRE(listener.ok());
  const std::string address = (*listener)->address();
  SendRaw(address, std::string(1000, '\xff') + "\r\n\r\n");
  SendRaw(address, "GET /" + std::string(100'000, 'a') + " HTTP/1.1\r\n\r\n");
  SendRaw(address, "POST /metrics HTTP/1.1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
  CHECK_THAT(HttpGet(address, "/metrics"), Contains("moed_answer 42"));
}

}  // namespace moed
