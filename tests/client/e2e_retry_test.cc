// What a client that is refused for lack of room learns, over each transport: when to try again.
#include <catch2/catch.hpp>
#include <grpcpp/grpcpp.h>
#include <signal.h>

#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "client/moed_client.h"
#include "proto/moe/v1/moe.grpc.pb.h"
#include "tests/client/running_server.h"
#include "tests/client/slow_model.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

namespace v1 = moe::v1;
using client::MoeClient;
using client::Transport;

constexpr int64_t kHidden = 1024;  // of the slow model

std::unique_ptr<MoeClient> Connect(const std::string& address, Transport transport) {
  auto client = MoeClient::Connect(address, {.own_connection = true, .transport = transport});
  REQUIRE(client.ok());
  return *std::move(client);
}

// The answer to a stream's one item of one row.
v1::ForwardResponse OneItem(const std::string& address) {
  const auto stub = v1::Moe::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  const auto stream = stub->ForwardStream(&context);
  v1::ForwardRequest request;
  request.mutable_hidden()->set_dtype(v1::DTYPE_F32);
  request.mutable_hidden()->add_shape(1);
  request.mutable_hidden()->add_shape(kHidden);
  request.mutable_hidden()->set_data(std::string(kHidden * sizeof(float), '\0'));
  v1::ForwardResponse response;
  CHECK(stream->Write(request));
  CHECK(stream->Read(&response));
  CHECK(stream->WritesDone());
  CHECK(stream->Finish().ok());
  return response;
}

}  // namespace

TEST_CASE("A full queue tells messages, sessions, rings and items of streams when to try again; what cannot help tells nothing") {
  TempDir dir;
  WriteSlowModel(dir.path());
  std::vector<std::string> options = SlowModelOptions();
  options.insert(options.end(), {"--queue", "1"});
  RunningServer server({"m=" + dir.path()}, options);
  const auto client = Connect(server.unix_socket(), Transport::kRpc), other = Connect(server.unix_socket(), Transport::kRpc);
  const auto third = Connect(server.unix_socket(), Transport::kRpc);
  const auto call = [](MoeClient* to, int64_t rows) { return ForwardZeros(*to, rows, std::chrono::minutes(10)); };
  const auto waiting = [&](int calls, uint64_t accepted) {
    return WaitFor([&, calls, accepted] {
      const auto status = third->Status();
      return status.ok() && status->queue.accepted == accepted && status->queue.waiting == calls;
    });
  };
  // Far longer than this test, and in pieces, which take turns: one of the two always waits.
  auto first = std::async(std::launch::async, call, client.get(), 20000);
  REQUIRE(waiting(0, 1));
  auto second = std::async(std::launch::async, call, other.get(), 20000);
  REQUIRE(waiting(1, 2));
  for (const Transport transport : {Transport::kRpc, Transport::kSharedMemory, Transport::kRing}) {
    INFO(client::TransportName(transport));
    const absl::Status refused = call(Connect(server.unix_socket(), transport).get(), 1);
    CHECK(absl::IsResourceExhausted(refused));
    const auto wait = client::RetryAfter(refused);
    REQUIRE(wait);
    CHECK(*wait >= std::chrono::milliseconds(1));
    CHECK(*wait <= std::chrono::minutes(1));
  }
  const v1::ForwardResponse item = OneItem(server.tcp());
  CHECK(item.status().code() == static_cast<int>(absl::StatusCode::kResourceExhausted));
  CHECK(item.status().retry_us() >= 1000);

  client::ForwardCall wrong;
  wrong.model = "nobody";
  CHECK_FALSE(client::RetryAfter(third->Forward(wrong).status()));
  CHECK_FALSE(client::RetryAfter(absl::OkStatus()));
  server.process().Signal(SIGKILL);
  CHECK(absl::IsUnavailable(first.get()));
  CHECK(absl::IsUnavailable(second.get()));
}

}  // namespace moed::testing
