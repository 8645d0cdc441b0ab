// Calls against a real moed: element types, sizes from nothing to many MiB, and calls that must be refused without harm.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "client/compare.h"
#include "client/moed_client.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

using client::DType;

// Layer 1 of the deepseek checkpoint as a caller sees it: golden inputs, routing and output.
struct Golden {
  GoldenModel model = CheckedInModel("ct-w4a16-g32-sym");
  int layer = 1;
  int64_t rows = 48;
  int64_t hidden = 256;
  int64_t top_k = 4;
  int64_t experts = 16;
  std::vector<float> x = ReadGolden(model.GoldenFile(), "1.x").values;
  std::vector<float> y = ReadGolden(model.GoldenFile(), "1.y").values;
  std::vector<float> weights = ReadGolden(model.GoldenFile(), "1.topk_weights").values;
  std::vector<int32_t> ids;

  Golden() {
    for (float id : ReadGolden(model.GoldenFile(), "1.topk_ids").values) ids.push_back(static_cast<int32_t>(id));
  }
};

// A forward with the golden routing, `repeat` times the golden rows. Its spans point into itself: not to be moved.
struct Call {
  std::vector<uint8_t> bytes;
  std::vector<int32_t> ids;
  std::vector<float> weights;
  client::ForwardCall call;

  Call(const Golden& golden, DType dtype, int64_t repeat = 1) {
    const std::vector<uint8_t> once = client::FromFloats(dtype, golden.x);
    for (int64_t i = 0; i < repeat; ++i) {
      bytes.insert(bytes.end(), once.begin(), once.end());
      ids.insert(ids.end(), golden.ids.begin(), golden.ids.end());
      weights.insert(weights.end(), golden.weights.begin(), golden.weights.end());
    }
    call.layer = golden.layer;
    call.hidden = {dtype, repeat * golden.rows, golden.hidden, bytes};
    call.top_k = golden.top_k;
    call.ids = ids;
    call.weights = weights;
    call.routed_only = true;
  }
  Call(const Call&) = delete;
};

std::unique_ptr<client::MoeClient> Connect(const std::string& address) {
  auto client = client::MoeClient::Connect(address);
  REQUIRE(client.ok());
  return *std::move(client);
}

// Fails unless the answer is the golden output, `repeat` times.
void CheckGolden(const Golden& golden, const absl::StatusOr<client::ForwardResult>& answer, int64_t repeat = 1) {
  INFO(answer.status().ToString());
  REQUIRE(answer.ok());
  REQUIRE(answer->rows == golden.rows * repeat);
  const std::vector<float> y = answer->Floats();
  for (int64_t i = 0; i < repeat; ++i) {
    const std::span<const float> part(y.data() + i * golden.y.size(), golden.y.size());
    const client::Comparison comparison = client::CompareRows(part, golden.y, golden.rows, golden.hidden, {});
    if (comparison.max_rel > 0.01) FAIL("row " << comparison.worst_row << " of copy " << i << ": " << comparison.max_rel);
  }
  SUCCEED();
}

// One bad change to a good call and what must come of it.
struct BadCall {
  const char* what;
  absl::StatusCode code;
  std::vector<std::string> in_text;
  std::function<void(Call*)> change;
};

std::vector<BadCall> BadRoutings() {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  return {
      {"id E", invalid, {"16", "5", "2"}, [](Call* c) { c->ids[5 * 4 + 2] = 16; }},
      {"id -2", invalid, {"-2", "7", "1"}, [](Call* c) { c->ids[7 * 4 + 1] = -2; }},
      {"id 2^31-1", invalid, {"2147483647"}, [](Call* c) { c->ids[0] = std::numeric_limits<int32_t>::max(); }},
  };
}

std::vector<BadCall> BadCalls() {
  const auto invalid = absl::StatusCode::kInvalidArgument;
  const auto not_found = absl::StatusCode::kNotFound;
  std::vector<BadCall> calls = {
      {"a layer that is dense", not_found, {"0"}, [](Call* c) { c->call.layer = 0; }},
      {"a layer beyond the model", not_found, {"99"}, [](Call* c) { c->call.layer = 99; }},
      {"a negative layer", not_found, {"-1"}, [](Call* c) { c->call.layer = -1; }},
      {"an unknown model", not_found, {"frob"}, [](Call* c) { c->call.model = "frob"; }},
      {"twice the hidden size",
       invalid,
       {"256", "512"},
       [](Call* c) {
         c->call.hidden.rows = 24;
         c->call.hidden.columns = 512;
         c->call.ids = c->call.ids.first(24 * 4);
         c->call.weights = c->call.weights.first(24 * 4);
       }},
      {"one element too many per row",
       invalid,
       {"256", "257"},
       [](Call* c) {
         c->bytes.resize(48 * 257 * 2);
         c->call.hidden.columns = 257;
         c->call.hidden.data = c->bytes;
       }},
      {"a request id that is too long",
       invalid,
       {"128", "129"},
       [](Call* c) { c->call.request_id = std::string(129, 'a'); }},
  };
  for (BadCall& bad : BadRoutings()) calls.push_back(std::move(bad));
  return calls;
}

// Sends `bytes` as the body of a method of moe.v1 and returns the call's status.
grpc::Status SendRaw(grpc::GenericStub* stub, const std::string& bytes, const std::string& method = "Forward") {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::Slice slice(bytes);
  const grpc::ByteBuffer request(&slice, 1);
  grpc::ByteBuffer response;
  std::promise<grpc::Status> done;
  stub->UnaryCall(&context, "/moe.v1.Moe/" + method, grpc::StubOptions(), &request, &response,
                  [&done](grpc::Status status) { done.set_value(std::move(status)); });
  return done.get_future().get();
}

}  // namespace

TEST_CASE("Every pair of input and output types gives the golden output, over TCP and a UNIX socket") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  for (const std::string& address : {server.tcp(), server.unix_socket()}) {
    const auto client = Connect(address);
    for (DType in : {DType::kF32, DType::kBf16, DType::kF16}) {
      for (DType out : {DType::kF32, DType::kBf16, DType::kF16}) {
        INFO(address << " " << client::DTypeName(in) << " -> " << client::DTypeName(out));
        Call call(golden, in);
        call.call.output_dtype = out;
        const auto answer = client->Forward(call.call);
        CheckGolden(golden, answer);
        CHECK(answer->data.size() == golden.y.size() * client::ElementBytes(out));
      }
    }
  }
}

TEST_CASE("Without an output type the answer has the input's type") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.tcp());
  for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
    const Call call(golden, dtype);
    const auto answer = client->Forward(call.call);
    CheckGolden(golden, answer);
    CHECK(answer->dtype == dtype);
  }
}

TEST_CASE("The answer repeats the caller's routing when asked for it") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  Call call(golden, DType::kF32);
  call.call.return_routing = true;
  const auto answer = Connect(server.tcp())->Forward(call.call);
  CheckGolden(golden, answer);
  CHECK(answer->top_k == golden.top_k);
  CHECK(answer->ids == golden.ids);
  CHECK(answer->weights == golden.weights);
}

TEST_CASE("No rows are OK and give no rows, and the next call is right") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.tcp());
  for (bool by_ids : {true, false}) {
    client::ForwardCall empty;
    empty.layer = golden.layer;
    empty.hidden = {DType::kBf16, 0, golden.hidden, {}};
    if (by_ids) empty.top_k = golden.top_k;
    const auto answer = client->Forward(empty);
    INFO(answer.status().ToString());
    REQUIRE(answer.ok());
    CHECK(answer->rows == 0);
    CHECK(answer->data.empty());
  }
  CheckGolden(golden, client->Forward(Call(golden, DType::kF32).call));
}

TEST_CASE("An id of -1 contributes nothing and its weight is ignored, even NaN") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.tcp());
  Call none(golden, DType::kF32);
  for (int32_t& id : none.ids) id = -1;
  for (float& weight : none.weights) weight = std::numeric_limits<float>::quiet_NaN();
  const auto zero = client->Forward(none.call);
  REQUIRE(zero.ok());
  for (float value : zero->Floats()) REQUIRE(value == 0);
  Call first(golden, DType::kF32);   // slot 0 of each row alone ...
  Call second(golden, DType::kF32);  // ... and the other slots: both together are the whole
  for (size_t i = 0; i < first.ids.size(); ++i) (i % 4 == 0 ? second : first).ids[i] = -1;
  const auto one = client->Forward(first.call);
  const auto rest = client->Forward(second.call);
  REQUIRE(one.ok());
  REQUIRE(rest.ok());
  std::vector<float> sum = one->Floats();
  const std::vector<float> other = rest->Floats();
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
  CHECK(client::CompareRows(sum, golden.y, golden.rows, golden.hidden, {}).max_rel <= 0.01);
}

TEST_CASE("Bad calls get the right code and numbers, and the next call is right") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.unix_socket());
  for (const BadCall& bad : BadCalls()) {
    Call call(golden, DType::kBf16);
    bad.change(&call);
    const auto answer = client->Forward(call.call);
    INFO(bad.what << ": " << answer.status().ToString());
    CHECK(answer.status().code() == bad.code);
    for (const std::string& text : bad.in_text)
      CHECK(std::string(answer.status().message()).find(text) != std::string::npos);
    CheckGolden(golden, client->Forward(Call(golden, DType::kBf16).call));
  }
}

TEST_CASE("Logits that cannot be routed are refused by row (B42)") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.tcp());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<float, size_t>> kinds = {{nan, 1}, {nan, 16}, {inf, 1}, {inf, 2}, {-inf, 16}, {-inf, 13}};
  for (const auto& [value, count] : kinds) {
    INFO(count << " logits of row 11 are " << value);
    std::vector<float> logits = ReadGolden(golden.model.GoldenFile(), "1.router_logits").values;
    for (size_t e = 0; e < count; ++e) logits[11 * 16 + e] = value;
    Call call(golden, DType::kBf16);
    call.call.top_k = 0;
    call.call.ids = {};
    call.call.weights = {};
    call.call.num_experts = golden.experts;
    call.call.router_logits = logits;
    const auto answer = client->Forward(call.call);
    CHECK(answer.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(std::string(answer.status().message()).find("11") != std::string::npos);
  }
  CheckGolden(golden, client->Forward(Call(golden, DType::kBf16).call));
}

TEST_CASE("The client refuses spans that contradict their shapes without a call") {
  const Golden golden;
  const auto client = Connect("127.0.0.1:1");  // nobody there: a call would be UNAVAILABLE
  const std::vector<std::function<void(Call*)>> changes = {
      [](Call* c) { c->call.hidden.rows = -1; },
      [](Call* c) { c->call.hidden.rows = int64_t{1} << 40; },
      [](Call* c) { c->call.hidden.columns = std::numeric_limits<int64_t>::max(); },
      [](Call* c) { c->call.hidden.data = c->call.hidden.data.first(c->bytes.size() - 1); },
      [](Call* c) { c->call.weights = c->call.weights.first(8); },
      [](Call* c) { c->call.top_k = 3; },
      [](Call* c) { c->call.num_experts = 16; },
  };
  for (const auto& change : changes) {
    Call call(golden, DType::kBf16);
    change(&call);
    CHECK(client->Forward(call.call).status().code() == absl::StatusCode::kInvalidArgument);
  }
}

TEST_CASE("A thousand messages of random bytes are INVALID_ARGUMENT and the server lives (B62)") {
  const Golden golden;
  RunningServer server({golden.model.path});
  grpc::GenericStub stub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  std::mt19937_64 random(62);
  int wrong = 0;
  std::string first_wrong;
  for (int i = 0; i < 1000; ++i) {
    std::string bytes(1024, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    const grpc::Status status = SendRaw(&stub, bytes);
    if (status.error_code() == grpc::StatusCode::INVALID_ARGUMENT && !status.error_message().empty()) continue;
    if (++wrong == 1) first_wrong = std::to_string(status.error_code()) + " " + status.error_message();
  }
  INFO(first_wrong);
  CHECK(wrong == 0);
  // Nothing is a message too: of layer 0, which is dense here, without hidden states.
  const grpc::Status nothing = SendRaw(&stub, "");
  CHECK((nothing.error_code() == grpc::StatusCode::INVALID_ARGUMENT || nothing.error_code() == grpc::StatusCode::NOT_FOUND));
  CHECK(!nothing.error_message().empty());
  CHECK(server.process().Running());
  CheckGolden(golden, Connect(server.tcp())->Forward(Call(golden, DType::kF32).call));
}

TEST_CASE("Every method answers random bytes with INVALID_ARGUMENT") {
  const RunningServer server({CheckedInModel("ct-w4a16-g32-sym").path});
  grpc::GenericStub stub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  std::mt19937_64 random(63);
  for (const char* method : {"Status", "Explain", "SelfCheck"}) {
    int wrong = 0;
    for (int i = 0; i < 100; ++i) {
      std::string bytes(256, '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      if (SendRaw(&stub, bytes, method).error_code() != grpc::StatusCode::INVALID_ARGUMENT) ++wrong;
    }
    INFO(method);
    CHECK(wrong == 0);
  }
}

TEST_CASE("A shape of millions of entries is refused") {
  const RunningServer server({CheckedInModel("ct-w4a16-g32-sym").path});
  grpc::GenericStub stub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()));
  const auto field = [](char tag, const std::string& value) {
    std::string length;
    for (size_t left = value.size(); left > 0; left >>= 7) {
      length += static_cast<char>((left & 127) | (left > 127 ? 128 : 0));
    }
    return tag + length + value;
  };
  const std::string packed = field('\x1a', field('\x12', std::string(50'000'000, '\1')));
  const grpc::Status status = SendRaw(&stub, packed);
  CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  CHECK(status.error_message().find("hidden.shape") != std::string::npos);
}

TEST_CASE("Messages of many MiB pass in both directions (B58)") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  constexpr int64_t kRepeat = 256;
  Call call(golden, DType::kBf16, kRepeat);
  REQUIRE(call.bytes.size() > 6'000'000);
  for (const std::string& address : {server.tcp(), server.unix_socket()}) {
    const auto answer = Connect(address)->Forward(call.call);
    CheckGolden(golden, answer, kRepeat);
    CHECK(answer->data.size() == call.bytes.size());
  }
}

TEST_CASE("A message above the client's limit is RESOURCE_EXHAUSTED with both numbers") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  auto client = client::MoeClient::Connect(server.tcp(), {.max_message_bytes = 1 << 20, .transport = client::Transport::kRpc});
  REQUIRE(client.ok());
  const Call call(golden, DType::kBf16, 64);
  const auto answer = (*client)->Forward(call.call);
  CHECK(answer.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK(std::string(answer.status().message()).find("1048576") != std::string::npos);
  CheckGolden(golden, (*client)->Forward(Call(golden, DType::kBf16).call));
}

TEST_CASE("Calls from many threads over one client get their own answers") {
  const Golden golden;
  const RunningServer server({golden.model.path});
  const auto client = Connect(server.tcp());
  std::vector<std::future<int>> threads;
  for (int t = 0; t < 8; ++t) {
    threads.push_back(std::async(std::launch::async, [&golden, &client, t] {
      int wrong = 0;
      for (int i = 0; i < 20; ++i) {
        const int64_t row = (t * 20 + i) % golden.rows;
        Call call(golden, DType::kF32);
        call.call.hidden = {DType::kF32, 1, golden.hidden, std::span<const uint8_t>(call.bytes).subspan(row * 1024, 1024)};
        call.call.ids = std::span<const int32_t>(call.ids).subspan(row * 4, 4);
        call.call.weights = std::span<const float>(call.weights).subspan(row * 4, 4);
        const auto answer = client->Forward(call.call);
        if (!answer.ok()) return 1000;
        const std::span<const float> wanted(golden.y.data() + row * golden.hidden, golden.hidden);
        if (!(client::RelativeError(answer->Floats(), wanted) <= 0.01)) ++wrong;
      }
      return wrong;
    }));
  }
  for (auto& thread : threads) CHECK(thread.get() == 0);
}

}  // namespace moed::testing
