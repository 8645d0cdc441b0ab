// ForwardStream through a real server: answers as they finish with their requests' ids, errors that end one item only, a window that
// holds up who does not read, and streams that end, are cancelled or meet a drain.
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <atomic>
#include <chrono>
#include <csignal>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;
using Stream = grpc::ClientReaderWriter<v1::ForwardRequest, v1::ForwardResponse>;

constexpr int64_t kHidden = 256;
constexpr int kLayer = 2;

std::string Model() { return CheckedInModel("ct-w4a16-g32-sym").path; }

v1::ForwardRequest Request(int id, int64_t rows) {
  std::mt19937 random(static_cast<uint32_t>(id));
  std::normal_distribution<float> value;
  std::vector<float> x(static_cast<size_t>(rows * kHidden));
  for (float& v : x) v = value(random);
  v1::ForwardRequest request;
  request.set_layer(kLayer);
  request.set_request_id(std::to_string(id));
  request.mutable_hidden()->set_dtype(v1::DTYPE_F32);
  request.mutable_hidden()->add_shape(rows);
  request.mutable_hidden()->add_shape(kHidden);
  request.mutable_hidden()->set_data(x.data(), x.size() * sizeof(float));
  return request;
}

struct Served {
  explicit Served(const std::vector<std::string>& more = {}) {
    std::vector<std::string> options = {"--deterministic"};
    options.insert(options.end(), more.begin(), more.end());
    server = std::make_unique<RunningServer>(std::vector<std::string>{Model()}, options);
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(256 << 20);
    stub = v1::Moe::NewStub(grpc::CreateCustomChannel(server->tcp(), grpc::InsecureChannelCredentials(), arguments));
  }
  std::string Alone(const v1::ForwardRequest& request) {
    grpc::ClientContext context;
    v1::ForwardResponse response;
    REQUIRE(stub->Forward(&context, request, &response).ok());
    return response.output().data();
  }
  std::unique_ptr<RunningServer> server;
  std::unique_ptr<v1::Moe::Stub> stub;
};

}  // namespace

TEST_CASE("Every request of a stream is answered once, with its id and the bits that it gets alone") {
  Served served;
  constexpr int kCalls = 200;
  std::map<std::string, std::string> want;
  std::vector<v1::ForwardRequest> requests;
  for (int id = 0; id < kCalls; ++id) {
    requests.push_back(Request(id, id % 7 == 0 ? 300 : id % 5));
    if (id % 10 == 0) want[std::to_string(id)] = served.Alone(requests.back());
  }
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = served.stub->ForwardStream(&context);
  std::thread writer([&] {
    for (const v1::ForwardRequest& request : requests) CHECK(stream->Write(request));
    CHECK(stream->WritesDone());
  });
  std::map<std::string, int> seen;
  for (v1::ForwardResponse response; stream->Read(&response);) {
    ++seen[response.request_id()];
    CHECK_FALSE(response.has_status());
    const v1::ForwardRequest& request = requests[static_cast<size_t>(std::stoi(response.request_id()))];
    CHECK(response.output().shape(0) == request.hidden().shape(0));
    CHECK(response.output().data().size() == request.hidden().data().size());
    const auto wanted = want.find(response.request_id());
    if (wanted != want.end()) CHECK(response.output().data() == wanted->second);
  }
  writer.join();
  CHECK(stream->Finish().ok());
  CHECK(seen.size() == kCalls);
  for (const auto& [id, times] : seen) CHECK(times == 1);
}

TEST_CASE("What is wrong with a request is told in its answer, and the stream goes on") {
  Served served;
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = served.stub->ForwardStream(&context);
  v1::ForwardRequest bad_layer = Request(1, 2), bad_size = Request(2, 2), late = Request(3, 2);
  bad_layer.set_layer(77);
  bad_size.mutable_hidden()->set_shape(0, 3);
  late.set_timeout_us(1);
  v1::ForwardRequest good = Request(4, 2);
  const std::string want = served.Alone(good);
  std::map<std::string, v1::ForwardResponse> answers;
  for (const v1::ForwardRequest* request : {&bad_layer, &bad_size, &late, &good}) {
    REQUIRE(stream->Write(*request));
    v1::ForwardResponse response;
    REQUIRE(stream->Read(&response));
    answers[response.request_id()] = response;
  }
  CHECK(answers["1"].status().code() == static_cast<int>(grpc::StatusCode::NOT_FOUND));
  CHECK(answers["2"].status().code() == static_cast<int>(grpc::StatusCode::INVALID_ARGUMENT));
  CHECK_THAT(answers["2"].status().message(), Contains("3072 bytes"));
  CHECK(answers["3"].status().code() == static_cast<int>(grpc::StatusCode::DEADLINE_EXCEEDED));
  CHECK_FALSE(answers["4"].has_status());
  CHECK(answers["4"].output().data() == want);
  stream->WritesDone();
  v1::ForwardResponse none;
  CHECK_FALSE(stream->Read(&none));
  CHECK(stream->Finish().ok());
}

TEST_CASE("A stream that is not read holds up itself alone") {
  Served served;
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stuck = served.stub->ForwardStream(&context);
  std::atomic<int> written{0};
  std::thread writer([&] {
    while (written < 2000 && stuck->Write(Request(written, 300))) ++written;  // 300 KiB each way
  });
  int before = -1;
  REQUIRE(WaitFor([&] {  // until nothing more goes in
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    return written == std::exchange(before, written);
  }));
  CHECK(written < 2000);
  for (int id = 0; id < 20; ++id) served.Alone(Request(id, 3));
  context.TryCancel();
  writer.join();
  CHECK(stuck->Finish().error_code() == grpc::StatusCode::CANCELLED);
  for (int id = 0; id < 20; ++id) served.Alone(Request(id, 3));
}

TEST_CASE("Streams that are cancelled or broken leave nothing behind") {
  Served served;
  for (int round = 0; round < 20; ++round) {
    grpc::ClientContext context;
    const std::unique_ptr<Stream> stream = served.stub->ForwardStream(&context);
    for (int id = 0; id < round; ++id) stream->Write(Request(id, 100));
    context.TryCancel();
    v1::ForwardResponse response;
    while (stream->Read(&response)) {
    }
    CHECK(stream->Finish().error_code() == grpc::StatusCode::CANCELLED);
  }
  served.Alone(Request(1, 3));
  served.server->process().Signal(SIGTERM);
  CHECK(served.server->process().Wait(std::chrono::seconds(60)) == 0);
}

TEST_CASE("A drain answers what a stream has under way, refuses the rest, and ends") {
  Served served;
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = served.stub->ForwardStream(&context);
  for (int id = 0; id < 8; ++id) REQUIRE(stream->Write(Request(id, 300)));
  v1::ForwardResponse response;
  REQUIRE(stream->Read(&response));
  served.server->process().Signal(SIGTERM);
  int answered = 1, refused = 0;
  while (answered + refused < 8 && stream->Read(&response)) {
    ++(response.has_status() ? refused : answered);
    if (response.has_status()) CHECK(response.status().code() == static_cast<int>(grpc::StatusCode::UNAVAILABLE));
  }
  CHECK(answered + refused == 8);
  stream->WritesDone();
  CHECK(served.server->process().Wait(std::chrono::seconds(60)) == 0);
}

}  // namespace moed::testing
