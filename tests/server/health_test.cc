// Health over a real listener: never SERVING too early, watches see every change, and end.
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <thread>

#include "server/health.h"

namespace moed {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;

// A listener with health for "" and "tiny", and a client of it.
struct Listener {
  HealthService service{{"", "tiny"}};
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<Health::Stub> stub;

  Listener() {
    int port = 0;
    grpc::ServerBuilder builder;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
    REQUIRE(server != nullptr);
    stub = Health::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  }

  grpc::Status Check(const std::string& name, HealthCheckResponse* response) {
    grpc::ClientContext context;
    HealthCheckRequest request;
    request.set_service(name);
    return stub->Check(&context, request, response);
  }
  HealthCheckResponse::ServingStatus StatusOf(const std::string& name) {
    HealthCheckResponse response;
    REQUIRE(Check(name, &response).ok());
    return response.status();
  }
};

absl::Status Nothing() { return absl::OkStatus(); }

}  // namespace

TEST_CASE("Health is NOT_SERVING from construction, then what it was set to, and NOT_FOUND for unknown names") {
  Listener listener;
  for (const char* name : {"", "tiny"}) {
    CHECK(listener.StatusOf(name) == HealthCheckResponse::NOT_SERVING);
    REQUIRE(listener.service.ServeAfter(Nothing).ok());
    CHECK(listener.StatusOf(name) == HealthCheckResponse::SERVING);
    listener.service.StopServing();
    CHECK(listener.StatusOf(name) == HealthCheckResponse::NOT_SERVING);
  }
  HealthCheckResponse response;
  CHECK(listener.Check("frob", &response).error_code() == grpc::StatusCode::NOT_FOUND);
}

TEST_CASE("An announcement that fails leaves health NOT_SERVING") {
  Listener listener;
  CHECK(!listener.service.ServeAfter([] { return absl::UnavailableError("no"); }).ok());
  CHECK(listener.StatusOf("") == HealthCheckResponse::NOT_SERVING);
}

TEST_CASE("A watch sees the status at once and every change, and ends when watches end") {
  Listener listener;
  grpc::ClientContext context, unknown_context;
  HealthCheckRequest request;
  request.set_service("tiny");
  const auto watch = listener.stub->Watch(&context, request);
  HealthCheckResponse seen;
  REQUIRE(watch->Read(&seen));
  CHECK(seen.status() == HealthCheckResponse::NOT_SERVING);
  REQUIRE(listener.service.ServeAfter(Nothing).ok());
  REQUIRE(watch->Read(&seen));
  CHECK(seen.status() == HealthCheckResponse::SERVING);
  listener.service.StopServing();
  REQUIRE(watch->Read(&seen));
  CHECK(seen.status() == HealthCheckResponse::NOT_SERVING);

  request.set_service("frob");
  const auto unknown = listener.stub->Watch(&unknown_context, request);
  REQUIRE(unknown->Read(&seen));
  CHECK(seen.status() == HealthCheckResponse::SERVICE_UNKNOWN);

  listener.service.EndWatches();
  CHECK(!watch->Read(&seen));
  CHECK(watch->Finish().error_code() == grpc::StatusCode::UNAVAILABLE);
  CHECK(!unknown->Read(&seen));
  CHECK(unknown->Finish().error_code() == grpc::StatusCode::UNAVAILABLE);
  listener.server->Shutdown();  // without a deadline: hangs if a watch were left
}

TEST_CASE("A watch that its client cancels does not hold up the end") {
  Listener listener;
  {
    grpc::ClientContext context;
    const auto watch = listener.stub->Watch(&context, HealthCheckRequest());
    HealthCheckResponse seen;
    REQUIRE(watch->Read(&seen));
    context.TryCancel();
    CHECK(watch->Finish().error_code() == grpc::StatusCode::CANCELLED);
  }
  REQUIRE(listener.service.ServeAfter(Nothing).ok());
  listener.server->Shutdown();
  SUCCEED();
}

}  // namespace moed
