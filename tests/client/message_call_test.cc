// Messages that the C++ client writes and reads by hand: the requests are what generated code reads, and of an answer it takes what
// generated code would, however the bytes are ordered and cut.
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"

namespace moed::client {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;

constexpr int64_t kRows = 3, kHidden = 8;

// A server that keeps the bytes of each request and sends back bytes of the test's choice, in slices of `cut` bytes.
struct Puppet final : grpc::CallbackGenericService {
  struct Reactor final : grpc::ServerGenericBidiReactor {
    explicit Reactor(Puppet* puppet) : puppet(puppet) { StartRead(&buffer); }
    void OnReadDone(bool) override {
      std::vector<grpc::Slice> slices;
      if (!buffer.Dump(&slices).ok()) return Finish(grpc::Status(grpc::StatusCode::INTERNAL, "no bytes"));
      std::lock_guard<std::mutex> lock(puppet->mutex);
      puppet->received.clear();
      for (const grpc::Slice& slice : slices) puppet->received.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
      slices.clear();
      for (size_t at = 0; at < puppet->answer.size(); at += puppet->cut) {
        slices.emplace_back(puppet->answer.substr(at, puppet->cut));
      }
      buffer = grpc::ByteBuffer(slices.data(), slices.size());
      StartWriteAndFinish(&buffer, grpc::WriteOptions(), grpc::Status::OK);
    }
    void OnDone() override { delete this; }
    Puppet* const puppet;
    grpc::ByteBuffer buffer;
  };
  grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext*) override { return new Reactor(this); }

  Puppet() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterCallbackGenericService(this);
    server = builder.BuildAndStart();
    client = *MoeClient::Connect("127.0.0.1:" + std::to_string(port), {.transport = Transport::kRpc});
  }
  ~Puppet() {
    client.reset();
    server->Shutdown();
  }

  std::mutex mutex;
  std::string received, answer;
  size_t cut = 1 << 20;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<MoeClient> client;
};

struct Call {
  Call() {
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<uint8_t>(i * 7);
    call.model = "m";
    call.layer = 4;
    call.hidden = {DType::kBf16, kRows, kHidden, bytes};
    call.top_k = 2;
    call.ids = ids, call.weights = weights;
    call.return_routing = true;
    call.request_id = "an id";
  }
  Call(const Call&) = delete;
  std::vector<uint8_t> bytes = std::vector<uint8_t>(kRows * kHidden * 2);
  std::vector<int32_t> ids = {0, 1, 2, 3, -1, 5};
  std::vector<float> weights = {1, 2, 3, 4, 5, 6};
  ForwardCall call;
};

std::string Data(size_t bytes = kRows * kHidden * 2) {
  std::string data(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(i * 11 + 3);
  return data;
}

void Fill(v1::DType dtype, int64_t cols, const std::string& data, v1::Tensor* tensor) {
  tensor->set_dtype(dtype);
  tensor->add_shape(kRows);
  tensor->add_shape(cols);
  tensor->set_data(data);
}

v1::ForwardResponse Good() {
  v1::ForwardResponse response;
  Fill(v1::DTYPE_BF16, kHidden, Data(), response.mutable_output());
  response.set_backend("b");
  response.set_scheme("s");
  response.set_generation(uint64_t{1} << 60);
  response.mutable_timing()->set_compute_us(12);
  Fill(v1::DTYPE_I32, 2, std::string(24, '\1'), response.mutable_routing()->mutable_ids());
  Fill(v1::DTYPE_F32, 2, std::string(24, '\2'), response.mutable_routing()->mutable_weights());
  return response;
}

// Its bytes with the output last, or its data first within it.
std::string Reordered(v1::ForwardResponse response) {
  v1::Tensor tensor = response.output();
  response.clear_output();
  v1::Tensor data;
  data.set_data(tensor.data());
  tensor.clear_data();
  const std::string body = data.SerializeAsString() + tensor.SerializeAsString();
  return response.SerializeAsString() + std::string({'\x0a', static_cast<char>(body.size())}) + body;
}

}  // namespace

TEST_CASE("A request is what generated code reads, with or without an owner of its hidden states") {
  Puppet puppet;
  puppet.answer = Good().SerializeAsString();
  Call call;
  std::string first;
  for (const bool owned : {false, true}) {
    if (owned) call.call.hidden_owner = std::shared_ptr<const void>(&call, [](const void*) {});
    REQUIRE(puppet.client->Forward(call.call).ok());
    v1::ForwardRequest request;
    REQUIRE(request.ParseFromString(puppet.received));
    CHECK((request.model() == "m" && request.layer() == 4 && request.request_id() == "an id" && request.return_routing()));
    CHECK(request.hidden().dtype() == v1::DTYPE_BF16);
    CHECK((request.hidden().shape(0) == kRows && request.hidden().shape(1) == kHidden));
    CHECK(request.hidden().data() == std::string(call.bytes.begin(), call.bytes.end()));
    CHECK(std::memcmp(request.top_k().ids().data().data(), call.ids.data(), 24) == 0);
    if (!owned) first = puppet.received;
  }
  CHECK(puppet.received == first);
}

TEST_CASE("An owner is let go when the call is over") {
  Puppet puppet;
  puppet.answer = Good().SerializeAsString();
  Call call;
  const auto owner = std::make_shared<int>(0);
  call.call.hidden_owner = owner;
  REQUIRE(puppet.client->Forward(call.call).ok());
  call.call.hidden_owner.reset();
  puppet.server->Shutdown();  // after which the transport holds nothing
  for (int i = 0; owner.use_count() > 1 && i < 2000; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(owner.use_count() == 1);
}

TEST_CASE("An answer is read whatever the order of its fields, and wherever it is cut") {
  Puppet puppet;
  Call call;
  for (const std::string& bytes : {Good().SerializeAsString(), Reordered(Good())}) {
    for (const size_t cut : {size_t{1}, size_t{7}, size_t{1} << 20}) {
      puppet.answer = bytes, puppet.cut = cut;
      const auto result = puppet.client->Forward(call.call);
      INFO(result.status().ToString());
      REQUIRE(result.ok());
      CHECK(result->data == Data());
      CHECK((result->backend == "b" && result->scheme == "s" && result->generation == uint64_t{1} << 60));
      CHECK(result->timing.compute_us == 12);
      CHECK((result->top_k == 2 && result->ids[5] == 0x01010101));
      std::vector<uint8_t> output(Data().size());
      const auto into = puppet.client->ForwardInto(call.call, output);
      REQUIRE(into.ok());
      CHECK(into->data.empty());
      CHECK(std::string(output.begin(), output.end()) == Data());
    }
  }
}

TEST_CASE("Fields of a newer server are passed over") {
  Puppet puppet;
  Call call;
  // Field 100 as a number, a fixed word of each size, and bytes; the same within the output.
  const std::string more = std::string("\xa0\x06\x05" "\xa5\x06" "abcd" "\xa1\x06" "abcdefgh" "\xa2\x06\x03" "xyz", 25);
  v1::ForwardResponse good = Good();
  const std::string body = more + good.output().SerializeAsString();
  good.clear_output();
  puppet.answer = more + std::string({'\x0a', static_cast<char>(body.size())}) + body + good.SerializeAsString() + more;
  const auto result = puppet.client->Forward(call.call);
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->data == Data());
}

TEST_CASE("Answers that are not what was asked for are INTERNAL, with what is wrong") {
  Puppet puppet;
  Call call;
  const auto error = [&](const std::string& bytes) {
    puppet.answer = bytes;
    const absl::Status status = puppet.client->Forward(call.call).status();
    CHECK(status.code() == absl::StatusCode::kInternal);
    std::vector<uint8_t> output(Data().size());
    CHECK(puppet.client->ForwardInto(call.call, output).status() == status);
    return std::string(status.message());
  };
  const auto with = [&](const std::function<void(v1::ForwardResponse*)>& change) {
    v1::ForwardResponse response = Good();
    change(&response);
    return error(response.SerializeAsString());
  };
  CHECK_THAT(with([](auto* r) { r->mutable_output()->set_dtype(v1::DTYPE_F32); }), Contains("output") && Contains("DTYPE_F32"));
  CHECK_THAT(with([](auto* r) { r->mutable_output()->set_shape(1, 9); }), Contains("[3, 8]"));
  CHECK_THAT(with([](auto* r) { r->mutable_output()->set_data(Data(46)); }), Contains("46 bytes"));
  CHECK_THAT(with([](auto* r) { r->mutable_output()->clear_data(); }), Contains("0 bytes"));
  CHECK_THAT(with([](auto* r) { r->clear_output(); }), Contains("output"));
  CHECK_THAT(with([](auto* r) { r->clear_routing(); }), Contains("ids"));
  CHECK_THAT(error("garbage"), Contains("7 bytes are no ForwardResponse"));
  CHECK_THAT(error("\x0b"), Contains("no ForwardResponse"));  // a group
  const std::string good = Good().SerializeAsString();
  for (size_t length = 1; length < good.size(); ++length) error(good.substr(0, length));
}

}  // namespace moed::client
