// Fuzz target: the bytes of a request through the server's parser and every check that needs no weights. Nothing is
// computed but the routing of logits that were accepted.
#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/grpc_library.h>

#include <array>
#include <variant>
#include <vector>

#include "engine/routing.h"
#include "proto/moe/v1/moe.pb.h"
#include "server/received_forward.h"
#include "server/request.h"
#include "server/wire.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

namespace v1 = moe::v1;

constexpr int kExperts = 4;
constexpr int64_t kHidden = 4;

ModelStatus Planned(const char* name) {
  ModelStatus model;
  model.name = name;
  model.hidden = kHidden;
  model.num_experts = kExperts;
  model.top_k = 2;
  for (const int layer : {0, 3}) {
    model.layers.emplace_back();
    model.layers.back().layer = layer;
  }
  return model;
}

// The bytes in one slice, or in two that meet at `cut`: messages arrive in pieces of any size.
grpc::ByteBuffer Received(Bytes input, size_t cut) {
  const std::array<grpc::Slice, 2> slices = {grpc::Slice(input.data(), cut), grpc::Slice(input.data() + cut, input.size() - cut)};
  return grpc::ByteBuffer(slices.data(), slices.size());
}

absl::Status Parse(Bytes input, size_t cut, google::protobuf::Message* message) {
  grpc::ByteBuffer bytes = Received(input, cut);
  return ParseRequest(&bytes, message);
}

// The request with its hidden states held back must be the same one, and be checked to the same end.
void CheckHeldBack(Bytes input, size_t cut, const absl::Status& parsed, const v1::ForwardRequest& request,
                   const ModelTable& models) {
  grpc::ByteBuffer bytes = Received(input, cut);
  ReceivedForward received;
  Require(ParseRequest(&bytes, &received) == parsed, "a request is parsed alike with its hidden states held back");
  if (!parsed.ok()) return;
  const auto want = CheckForward(request, models), got = CheckForward(received.message(), models, received.hidden_bytes());
  Require(got.status() == want.status(), "a request is checked alike with its hidden states held back");
  v1::ForwardRequest whole = received.message();
  if (received.hidden_bytes() > 0) {
    Require(whole.hidden().data().empty(), "what was held back is not in the message");
    Require(!got.ok() || got->call.hidden.data == nullptr, "hidden states that were held back have no address");
    std::vector<std::byte> hidden(received.hidden_bytes());
    received.PlaceHidden(hidden.data());
    Require(received.WaitPast(hidden.size() - 1) == hidden.size(), "what was held back comes as a whole");
    whole.mutable_hidden()->set_data(hidden.data(), hidden.size());
  }
  Require(whole.SerializeAsString() == request.SerializeAsString(), "what was held back is what came");
}

// Every byte that a call may look at lies in the request.
void CheckView(const v1::Tensor& tensor, const void* data, size_t bytes) {
  Require(bytes == tensor.data().size(), "a view covers its tensor");
  Require(bytes == 0 || data == tensor.data().data(), "a view is not moved");
}

void RouteLogits(const RoutingByLogits& by_logits, int64_t rows) {
  std::vector<int32_t> ids(static_cast<size_t>(rows) * 2);
  std::vector<float> weights(ids.size());
  const absl::Status status = Route(RouterRule{}, kExperts, 2, by_logits.logits, {}, ids, weights);
  if (!status.ok()) return;
  for (const int32_t id : ids) Require(id >= 0 && id < kExperts, "routing gives experts of the layer");
}

void CheckAccepted(const v1::ForwardRequest& request, const CheckedForward& checked) {
  const TensorView& hidden = checked.call.hidden;
  Require(hidden.rows >= 0 && hidden.cols == kHidden, "hidden is [M, H]");
  if (hidden.place == Place::kDevice) {
    Require(hidden.data == nullptr && request.hidden().data().empty(), "a tensor in device memory has no address yet");
    Require(checked.hidden_memory && checked.hidden_memory->offset % kDeviceAlignment == 0, "a place in device memory is aligned");
    if (hidden.rows > (1 << 20)) return;  // what follows takes memory for each row, of which here no byte came
  } else {
    CheckView(request.hidden(), hidden.data, hidden.bytes());
  }
  if (const auto* by_ids = std::get_if<RoutingByIds>(&checked.call.routing)) {
    CheckView(request.top_k().ids(), by_ids->ids.data(), by_ids->ids.size_bytes());
    CheckView(request.top_k().weights(), by_ids->weights.data(), by_ids->weights.size_bytes());
    Require(by_ids->ids.size() == static_cast<size_t>(hidden.rows * by_ids->top_k), "ids are [M, k]");
    for (const int32_t id : by_ids->ids) Require(id >= -1 && id < kExperts, "ids name experts of the layer or none");
  } else if (const auto* by_logits = std::get_if<RoutingByLogits>(&checked.call.routing)) {
    CheckView(request.router_logits(), by_logits->logits.data(), by_logits->logits.size_bytes());
    RouteLogits(*by_logits, hidden.rows);
  }
  ForwardInfo info;
  info.want_routing = request.return_routing();
  info.top_k = 2;
  info.ids.resize(static_cast<size_t>(hidden.rows) * 2);
  info.weights.resize(info.ids.size());
  v1::ForwardResponse answer = BeginAnswer(request);
  EndAnswer(info, hidden.rows, &answer);
  Require(answer.request_id() == request.request_id(), "an answer repeats the request's id");
  Require(!OutputHead(checked.output_dtype, hidden.rows, hidden.cols).empty(), "an answer has a head");
}

void CheckForwardBytes(Bytes input) {
  static const ModelTable one({Planned("tiny")});
  static const ModelTable two({Planned("tiny"), Planned("other")});
  v1::ForwardRequest request, in_pieces;
  const absl::Status whole = Parse(input, input.size(), &request);
  const size_t cut = input.empty() ? 0 : input.back() % input.size();
  const absl::Status pieces = Parse(input, cut, &in_pieces);
  Require(whole == pieces, "a message in pieces is the same message");
  CheckHeldBack(input, cut, whole, request, one);
  if (!whole.ok()) {
    Require(absl::IsInvalidArgument(whole), "bytes that are no request are an invalid argument");
    return;
  }
  for (const ModelTable* models : {&one, &two}) {
    const auto checked = CheckForward(request, *models);
    if (checked.ok()) CheckAccepted(request, *checked);
    if (!checked.ok()) {
      Require(absl::IsInvalidArgument(checked.status()) || absl::IsNotFound(checked.status()) ||
                  absl::IsResourceExhausted(checked.status()),
              "a bad request is an invalid argument, an unknown name is not found");
    }
  }
}

// What `moed serve` does before its first call: gRPC is started, and protobuf does not write to stderr.
void SetUp() {
  static grpc::internal::GrpcLibraryInitializer library;
  library.summon();
  google::protobuf::SetLogHandler(nullptr);
}

void Run(Bytes input) {
  CheckForwardBytes(input);
  v1::StatusRequest status;
  v1::ExplainRequest explain;
  v1::SelfCheckRequest self_check;
  (void)Parse(input, input.size(), &status);
  (void)Parse(input, input.size(), &explain);
  if (!Parse(input, input.size(), &self_check).ok()) return;
  const auto tokens = SelfCheckTokens(self_check);
  Require(!tokens.ok() || (*tokens >= 1 && *tokens <= 64), "a self-check has 1 to 64 rows");
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  moed::fuzz::SetUp();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
