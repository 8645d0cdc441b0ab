#include "client/moed_client.h"

#include <grpcpp/generic/generic_stub.h>
#include <malloc.h>

#include <future>
#include <utility>

#include "client/channel.h"
#include "client/health_messages.h"
#include "client/messages.h"
#include "moe/v1/moe.grpc.pb.h"

namespace moed::client {
namespace {

void Prepare(const CallOptions& options, grpc::ClientContext* context) {
  if (options.timeout.count() > 0) context->set_deadline(std::chrono::system_clock::now() + options.timeout);
  context->set_wait_for_ready(options.wait_for_ready);
}

}  // namespace

struct MoeClient::Impl {
  std::string address;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<moe::v1::Moe::Stub> stub;
  grpc::GenericStub generic;

  Impl(std::string where, std::shared_ptr<grpc::Channel> to)
      : address(std::move(where)), channel(std::move(to)), stub(moe::v1::Moe::NewStub(channel)), generic(channel) {}

  // One unary call of `method`, a member of the generated stub.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (moe::v1::Moe::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const CallOptions& options, const Request& request, Response* response) {
    grpc::ClientContext context;
    Prepare(options, &context);
    return ToAbsl((stub.get()->*method)(&context, request, response), address);
  }
};

const char* LayerStateName(LayerState state) {
  switch (state) {
    case LayerState::kUnknown: return "unknown";
    case LayerState::kPlanned: return "planned";
    case LayerState::kLoading: return "loading";
    case LayerState::kReady: return "ready";
    case LayerState::kFailed: return "failed";
  }
  return "unknown";
}

const char* HealthName(Health health) {
  switch (health) {
    case Health::kUnknown: return "UNKNOWN";
    case Health::kServing: return "SERVING";
    case Health::kNotServing: return "NOT_SERVING";
    case Health::kServiceUnknown: return "SERVICE_UNKNOWN";
  }
  return "UNKNOWN";
}

std::vector<float> ForwardResult::Floats() const {
  return ToFloats(dtype, {reinterpret_cast<const uint8_t*>(data.data()), data.size()});
}

void TuneAllocator() {
  // 32 MiB is the largest threshold for mapping that glibc accepts; setting it also stops its own adjustment. Trimming only
  // above 1 GiB keeps the pages of one call for the next.
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 1 << 30);
  mallopt(M_TOP_PAD, 1 << 20);
}

MoeClient::MoeClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MoeClient::~MoeClient() = default;

absl::StatusOr<std::unique_ptr<MoeClient>> MoeClient::Connect(const std::string& address, const ClientOptions& options) {
  absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = MakeChannel(address, options);
  if (!channel.ok()) return channel.status();
  return std::unique_ptr<MoeClient>(new MoeClient(std::make_unique<Impl>(address, *std::move(channel))));
}

absl::StatusOr<ForwardResult> MoeClient::Forward(const ForwardCall& call, const CallOptions& options) {
  moe::v1::ForwardRequest request;
  moe::v1::ForwardResponse response;
  if (absl::Status status = ToWire(call, &request); !status.ok()) return status;
  absl::Status status = impl_->Call(&moe::v1::Moe::Stub::Forward, options, request, &response);
  if (!status.ok()) return status;
  return FromWire(call, &response);
}

absl::StatusOr<ServerStatus> MoeClient::Status(const std::string& model, const CallOptions& options) {
  moe::v1::StatusRequest request;
  moe::v1::StatusResponse response;
  request.set_model(model);
  absl::Status status = impl_->Call(&moe::v1::Moe::Stub::Status, options, request, &response);
  if (!status.ok()) return status;
  return FromWire(response);
}

absl::StatusOr<Explanation> MoeClient::Explain(const std::string& model, std::optional<int32_t> layer,
                                               const CallOptions& options) {
  moe::v1::ExplainRequest request;
  moe::v1::ExplainResponse response;
  request.set_model(model);
  if (layer.has_value()) request.set_layer(*layer);
  absl::Status status = impl_->Call(&moe::v1::Moe::Stub::Explain, options, request, &response);
  if (!status.ok()) return status;
  return FromWire(response);
}

absl::StatusOr<SelfCheckResult> MoeClient::SelfCheck(const std::string& model, std::optional<int32_t> layer, int32_t tokens,
                                                     uint64_t seed, const CallOptions& options) {
  moe::v1::SelfCheckRequest request;
  moe::v1::SelfCheckResponse response;
  request.set_model(model);
  if (layer.has_value()) request.set_layer(*layer);
  request.set_tokens(tokens);
  request.set_seed(seed);
  absl::Status status = impl_->Call(&moe::v1::Moe::Stub::SelfCheck, options, request, &response);
  if (!status.ok()) return status;
  return FromWire(response);
}

absl::StatusOr<Health> MoeClient::CheckHealth(const std::string& service, const CallOptions& options) {
  grpc::ClientContext context;
  Prepare(options, &context);
  const grpc::ByteBuffer request = EncodeHealthRequest(service);
  grpc::ByteBuffer response;
  std::promise<grpc::Status> done;
  impl_->generic.UnaryCall(&context, kHealthCheckMethod, grpc::StubOptions(), &request, &response,
                           [&done](grpc::Status result) { done.set_value(std::move(result)); });
  const grpc::Status status = done.get_future().get();  // the deadline ends the wait
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return Health::kServiceUnknown;
  if (!status.ok()) return ToAbsl(status, impl_->address);
  return DecodeHealthResponse(response);
}

}  // namespace moed::client
