// Answers on the wire: the bytes of a forward, self-checks, states and explanations.
#include <catch2/catch.hpp>

#include <cstring>
#include <string>

#include "proto/moe/v1/moe.pb.h"
#include "server/wire.h"
#include "tests/server/wire_requests.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: requests and their parts
using Catch::Matchers::Contains;

}  // namespace

TEST_CASE("An answer that no message can hold is refused before it is computed") {
  // 2 MiB of hidden states, whose routing by 64 slots per row takes 512 MiB.
  ModelStatus wide;
  wide.name = "wide";
  wide.hidden = 1;
  wide.num_experts = 64;
  wide.top_k = 64;
  wide.layers.resize(1);
  const ModelTable table({wide});
  v1::ForwardRequest request;
  SetTensor(v1::DTYPE_F16, 1 << 20, 1, 2 << 20, request.mutable_hidden());
  CHECK(CheckForward(request, table).ok());
  request.set_return_routing(true);
  const absl::Status status = CheckForward(request, table).status();
  CHECK(absl::IsResourceExhausted(status));
  CHECK_THAT(std::string(status.message()), Contains("538968064") && Contains("268369920"));
}

TEST_CASE("Head, data and rest together are the serialised answer") {
  ForwardInfo info;
  info.backend = "cpu_generic";
  info.scheme = "int4";
  info.generation = 3;
  info.compute_us = 42;
  info.batch_rows = 1234;
  info.top_k = 2;
  info.ids = {3, -1};
  info.weights = {0.5f, 0.25f};
  for (const int64_t rows : {0, 1, 1000}) {
    v1::ForwardRequest request = Good();
    request.set_request_id("abc");
    info.want_routing = rows == 1;
    std::string data(static_cast<size_t>(rows) * kHidden * 2, '\0');
    for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<char>(i * 31);
    v1::ForwardResponse rest = BeginAnswer(request);
    EndAnswer(info, rows, &rest);
    const std::string bytes = OutputHead(DType::kF16, rows, kHidden) + data + rest.SerializeAsString();
    v1::ForwardResponse answer;
    REQUIRE(answer.ParseFromString(bytes));
    CHECK(answer.output().dtype() == v1::DTYPE_F16);
    CHECK(answer.output().shape_size() == 2);
    CHECK(answer.output().shape(0) == rows);
    CHECK(answer.output().shape(1) == kHidden);
    CHECK(answer.output().data() == data);
    CHECK(answer.backend() == "cpu_generic");
    CHECK(answer.scheme() == "int4");
    CHECK(answer.generation() == 3);
    CHECK(answer.timing().compute_us() == 42);
    CHECK(answer.timing().batch_rows() == 1234);
    CHECK(answer.request_id() == "abc");
    CHECK(answer.has_routing() == (rows == 1));
    CHECK(answer.GetReflection()->GetUnknownFields(answer).empty());
    if (rows != 1) continue;
    int32_t ids[2];
    std::memcpy(ids, answer.routing().ids().data().data(), sizeof(ids));
    CHECK(ids[0] == 3);
    CHECK(ids[1] == -1);
    CHECK(answer.routing().weights().data().size() == 8);
  }
}

TEST_CASE("A self-check takes 1 to 64 rows, 8 when unsaid") {
  v1::SelfCheckRequest request;
  CHECK(*SelfCheckTokens(request) == 8);
  request.set_tokens(64);
  CHECK(*SelfCheckTokens(request) == 64);
  for (const int tokens : {-1, 65}) {
    request.set_tokens(tokens);
    CHECK_THAT(std::string(SelfCheckTokens(request).status().message()), Contains("1 to 64") && Contains(std::to_string(tokens)));
  }
}

TEST_CASE("One failed row fails a self-check") {
  v1::SelfCheckResponse response;
  SelfCheckRow row;
  row.passed = true;
  AddSelfCheckRows({row}, &response);
  CHECK(response.passed());
  row.passed = false;
  AddSelfCheckRows({row}, &response);
  row.passed = true;
  AddSelfCheckRows({row}, &response);
  CHECK_FALSE(response.passed());
  CHECK(response.rows_size() == 3);
}

TEST_CASE("A layer is shown as ready only when calls are let in (B64)") {
  ModelStatus model;
  model.name = "tiny";
  model.state = LayerState::kReady;
  model.layers.resize(2);
  model.layers[0].state = LayerState::kReady;
  model.layers[1].state = LayerState::kFailed;
  v1::StatusResponse loading, serving;
  FillStatus({model}, {}, Phase::kLoading, &loading);
  FillStatus({model}, {}, Phase::kServing, &serving);
  CHECK(loading.models(0).state() == v1::LAYER_STATE_LOADING);
  CHECK(loading.models(0).layers(0).state() == v1::LAYER_STATE_LOADING);
  CHECK(loading.models(0).layers(1).state() == v1::LAYER_STATE_FAILED);
  CHECK(serving.models(0).layers(0).state() == v1::LAYER_STATE_READY);
  CHECK(serving.models(0).error().empty());
  CHECK(serving.version() == "0.1.0");
  v1::StatusResponse draining;
  FillStatus({model}, {}, Phase::kDraining, &draining);
  CHECK(draining.models(0).state() == v1::LAYER_STATE_PLANNED);
  CHECK(draining.models(0).layers(0).state() == v1::LAYER_STATE_PLANNED);
  CHECK(draining.models(0).error() == "the server is draining");
}

TEST_CASE("A status tells threads, their limit, the memory nodes of processors and layers, and the GPU with its free memory") {
  ModelStatus model;
  model.layers.resize(2);
  model.layers[1].numa_nodes = {0, 3};
  const HostStatus host{.threads = 2, .threads_limit = "cgroup quota 2.5", .pinned = true, .processors = 16, .cpu_quota = 2.5,
                        .numa_nodes = {1}, .gpu = "NVIDIA H200", .gpu_free_bytes = 141000000000};
  v1::StatusResponse status;
  FillStatus({model}, host, Phase::kServing, &status);
  CHECK(status.host().threads() == 2);
  CHECK(status.host().threads_limit() == "cgroup quota 2.5");
  CHECK(status.host().pinned());
  CHECK(status.host().processors() == 16);
  CHECK(status.host().cpu_quota() == 2.5);
  REQUIRE(status.host().numa_nodes_size() == 1);
  CHECK(status.host().numa_nodes(0) == 1);
  CHECK(status.host().gpu() == "NVIDIA H200");
  CHECK(status.host().gpu_free_bytes() == 141000000000u);
  CHECK(status.models(0).layers(0).numa_nodes_size() == 0);
  REQUIRE(status.models(0).layers(1).numa_nodes_size() == 2);
  CHECK(status.models(0).layers(1).numa_nodes(1) == 3);
}

TEST_CASE("An explanation keeps every reason") {
  ExplainReport report;
  report.device = "h200";
  report.fits = false;
  for (const int layer : {1, 2}) {
    LayerExplanation explanation;
    explanation.layer = layer;
    BackendVerdict verdict;
    verdict.name = "cpu_amx";
    verdict.verdict.reasons = {{"isa_missing", "amx_tile"}, {"shape_unsupported", "I=640"}};
    explanation.backends = {verdict};
    report.layers.push_back(explanation);
  }
  v1::ExplainResponse all, one;
  FillExplain(report, -1, &all);
  FillExplain(report, 2, &one);
  CHECK(all.layers_size() == 2);
  REQUIRE(one.layers_size() == 1);
  CHECK(one.layers(0).layer() == 2);
  CHECK_FALSE(one.fits());
  REQUIRE(one.layers(0).backends(0).reasons_size() == 2);
  CHECK_FALSE(one.layers(0).backends(0).ok());
  CHECK(one.layers(0).backends(0).reasons(1).code() == "shape_unsupported");
}

}  // namespace moed
