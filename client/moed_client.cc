#include "client/moed_client.h"

#include <grpcpp/generic/generic_stub.h>
#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <future>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/channel.h"
#include "client/credentials.h"
#include "client/health_messages.h"
#include "client/message_call.h"
#include "client/messages.h"
#include "client/session_keeper.h"
#include "client/shared_calls.h"
#include "client/shared_session.h"
#include "moe/v1/moe.grpc.pb.h"

namespace moed::client {
namespace {

void Prepare(const CallOptions& options, const std::string& token, grpc::ClientContext* context) {
  if (!token.empty()) context->AddMetadata("authorization", "Bearer " + token);
  if (options.timeout.count() > 0) context->set_deadline(std::chrono::system_clock::now() + options.timeout);
  context->set_wait_for_ready(options.wait_for_ready);
}

}  // namespace

struct Buffer::Impl {
  std::optional<SharedSession::Part> part;
  std::unique_ptr<uint8_t, void (*)(void*)> heap{nullptr, std::free};
  std::span<uint8_t> bytes;
};

Buffer::Buffer(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
Buffer::Buffer(Buffer&&) noexcept = default;
Buffer& Buffer::operator=(Buffer&&) noexcept = default;
Buffer::~Buffer() = default;
std::span<uint8_t> Buffer::bytes() const { return impl_->bytes; }
bool Buffer::shared() const { return impl_->part.has_value(); }
std::shared_ptr<const void> Buffer::owner() const { return impl_; }

struct MoeClient::Impl {
  const std::string address;
  const std::string token;  // "": none
  const ClientOptions client_options;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<moe::v1::Moe::Stub> stub;
  std::unique_ptr<moe::v1::Admin::Stub> admin;
  grpc::GenericStub generic;
  SessionKeeper sessions;

  Impl(std::string where, std::string secret, const ClientOptions& options, std::shared_ptr<grpc::Channel> to)
      : address(std::move(where)), token(std::move(secret)), client_options(options), channel(std::move(to)),
        stub(moe::v1::Moe::NewStub(channel)), admin(moe::v1::Admin::NewStub(channel)), generic(channel), sessions(options, token) {}

  // One unary call of `method`, a member of the generated stub.
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (moe::v1::Moe::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const CallOptions& options, const Request& request, Response* response) {
    grpc::ClientContext context;
    Prepare(options, token, &context);
    return ToAbsl((stub.get()->*method)(&context, request, response), address);
  }

  // One change of the server's models, by a member of the stub of the admin service.
  template <typename Request>
  absl::StatusOr<ServerStatus> Change(grpc::Status (moe::v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                                   moe::v1::StatusResponse*),
                                      const CallOptions& options, const Request& request) {
    grpc::ClientContext context;
    Prepare(options, token, &context);
    moe::v1::StatusResponse response;
    absl::Status status = ToAbsl((admin.get()->*method)(&context, request, &response), address);
    if (absl::IsUnimplemented(status)) {
      return absl::UnimplementedError(absl::StrCat("server ", address, ": takes no changes here: it offers them at --admin-listen, or with "
                                                   "--admin-token-file"));
    }
    if (!status.ok()) return status;
    return FromWire(response);
  }

  absl::Status Hello(const CallOptions& options, moe::v1::HelloResponse* hello) {
    moe::v1::HelloRequest request;
    request.set_protocol(1);
    request.set_client("moed C++ client");
    return Call(&moe::v1::Moe::Stub::Hello, options, request, hello);
  }

  // The session that a call uses; null: none, by choice or because there is none to be had.
  absl::StatusOr<std::shared_ptr<SharedSession>> Session(const CallOptions& options) {
    return sessions.Get([&](moe::v1::HelloResponse* hello) { return Hello(options, hello); });
  }

  // One unary call of bytes.
  grpc::Status CallBytes(const std::string& method, grpc::ClientContext* context, const grpc::ByteBuffer& request,
                         grpc::ByteBuffer* response) {
    std::promise<grpc::Status> done;
    generic.UnaryCall(context, method, grpc::StubOptions(), &request, response,
                      [&done](grpc::Status result) { done.set_value(std::move(result)); });
    return done.get_future().get();  // the deadline ends the wait
  }

  absl::StatusOr<ForwardResult> ForwardByMessage(const ForwardCall& call, std::span<uint8_t> output, const CallOptions& options) {
    grpc::ClientContext context;
    Prepare(options, token, &context);
    grpc::ByteBuffer response;
    absl::Status status = ToAbsl(CallBytes("/moe.v1.Moe/Forward", &context, EncodeRequest(call), &response), address);
    if (!status.ok()) return status;
    return DecodeResponse(call, &response, output);
  }

  absl::StatusOr<ForwardResult> ForwardBySharedMemory(SharedCall placed, const std::shared_ptr<SharedSession>& session,
                                                      const CallOptions& options) {
    moe::v1::ForwardResponse response;
    absl::Status status = Call(&moe::v1::Moe::Stub::Forward, options, placed.Request(), &response);
    if (status.ok()) return placed.ResultOf(response);
    // With these the server has said that it is through with the call. After others, a deadline that passed here, say, it may be at it.
    const bool over = absl::IsInvalidArgument(status) || absl::IsNotFound(status) || absl::IsResourceExhausted(status) ||
                      absl::IsUnauthenticated(status);
    if (!over) sessions.Leave(session);
    return status;
  }

  // `output` null: in the result.
  absl::StatusOr<ForwardResult> Forward(const ForwardCall& call, std::span<uint8_t> output, const CallOptions& options) {
    if (absl::Status status = CheckCall(call); !status.ok()) return status;
    const absl::StatusOr<std::shared_ptr<SharedSession>> session = Session(options);
    if (!session.ok()) return session.status();
    if (*session == nullptr || !SharedCall::CanSay(call)) return ForwardByMessage(call, output, options);
    std::optional<SharedCall> placed = SharedCall::Place(*session, call, output);
    if (placed && client_options.transport == Transport::kSharedMemory) {
      return ForwardBySharedMemory(*std::move(placed), *session, options);
    }
    if (!placed && (*session)->retired()) return Forward(call, output, options);  // another thread has left it just now
    std::optional<absl::StatusOr<ForwardResult>> result;
    if (placed) result = placed->Run(options);
    if (result && absl::IsUnavailable(result->status())) sessions.Lost(*session);
    if (result) return ToAbsl(*std::move(result));
    if (client_options.transport == Transport::kAuto) return ForwardByMessage(call, output, options);
    return absl::ResourceExhaustedError(
        absl::StrCat("session: wanted free memory and a free slot for this call, got none; session_bytes is ",
                     client_options.session_bytes));
  }

  absl::StatusOr<ForwardResult> ToAbsl(absl::StatusOr<ForwardResult> result) const {
    if (!absl::IsUnavailable(result.status())) return result;
    return absl::UnavailableError(absl::StrCat("server ", address, ": ", result.status().message()));
  }
  absl::Status ToAbsl(const grpc::Status& status, const std::string& where) const { return client::ToAbsl(status, where); }
};

const char* TransportName(Transport transport) {
  switch (transport) {
    case Transport::kAuto: return "auto";
    case Transport::kRpc: return "rpc";
    case Transport::kSharedMemory: return "shared-memory";
    case Transport::kRing: return "ring";
  }
  return "auto";
}

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
  absl::StatusOr<std::string> token = ReadToken(options);
  if (!token.ok()) return token.status();
  return std::unique_ptr<MoeClient>(
      new MoeClient(std::make_unique<Impl>(address, *std::move(token), options, *std::move(channel))));
}

absl::StatusOr<ForwardResult> MoeClient::Forward(const ForwardCall& call, const CallOptions& options) {
  return impl_->Forward(call, {}, options);
}

absl::StatusOr<ForwardResult> MoeClient::ForwardInto(const ForwardCall& call, std::span<uint8_t> output, const CallOptions& options) {
  if (absl::Status status = CheckCall(call); !status.ok()) return status;
  if (output.size() == OutputBytes(call)) return impl_->Forward(call, output, options);
  return absl::InvalidArgumentError(absl::StrCat("output: wanted ", OutputBytes(call), " bytes, got ", output.size()));
}

absl::StatusOr<Buffer> MoeClient::Allocate(size_t bytes) {
  auto impl = std::make_shared<Buffer::Impl>();
  const absl::StatusOr<std::shared_ptr<SharedSession>> session = impl_->Session({});
  if (session.ok() && *session != nullptr) impl->part = (*session)->Allocate(bytes);
  if (impl->part) {
    impl->bytes = impl->part->bytes();
    return Buffer(std::move(impl));
  }
  constexpr size_t kAlignment = 64;
  const size_t whole = (std::max<size_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  impl->heap.reset(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, whole)));
  if (impl->heap == nullptr) return absl::ResourceExhaustedError(absl::StrCat("a buffer of ", bytes, " bytes: the heap has none"));
  impl->bytes = {impl->heap.get(), bytes};
  return Buffer(std::move(impl));
}

absl::StatusOr<ServerHello> MoeClient::Hello(const CallOptions& options) {
  moe::v1::HelloResponse hello;
  if (absl::Status status = impl_->Hello(options, &hello); !status.ok()) return status;
  return ServerHello{.protocol = hello.protocol(),
                     .version = hello.version(),
                     .max_message_bytes = hello.max_message_bytes(),
                     .session_socket = hello.shared_memory().socket()};
}

absl::StatusOr<ServerStatus> MoeClient::Status(const std::string& model, const CallOptions& options) {
  moe::v1::StatusRequest request;
  moe::v1::StatusResponse response;
  request.set_model(model);
  absl::Status status = impl_->Call(&moe::v1::Moe::Stub::Status, options, request, &response);
  if (!status.ok()) return status;
  return FromWire(response);
}

absl::StatusOr<ServerStatus> MoeClient::LoadModel(const std::string& model, const std::string& path, const CallOptions& options) {
  moe::v1::LoadModelRequest request;
  request.set_model(model);
  request.set_path(path);
  return impl_->Change(&moe::v1::Admin::Stub::LoadModel, options, request);
}

absl::StatusOr<ServerStatus> MoeClient::SwapModel(const std::string& model, const std::string& path, bool keep_previous,
                                                  const CallOptions& options) {
  moe::v1::SwapModelRequest request;
  request.set_model(model);
  request.set_path(path);
  request.set_keep_previous(keep_previous);
  return impl_->Change(&moe::v1::Admin::Stub::SwapModel, options, request);
}

absl::StatusOr<ServerStatus> MoeClient::UnloadModel(const std::string& model, const CallOptions& options) {
  moe::v1::UnloadModelRequest request;
  request.set_model(model);
  return impl_->Change(&moe::v1::Admin::Stub::UnloadModel, options, request);
}

absl::StatusOr<ServerStatus> MoeClient::RollbackModel(const std::string& model, const CallOptions& options) {
  moe::v1::RollbackModelRequest request;
  request.set_model(model);
  return impl_->Change(&moe::v1::Admin::Stub::RollbackModel, options, request);
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
  Prepare(options, impl_->token, &context);
  const grpc::ByteBuffer request = EncodeHealthRequest(service);
  grpc::ByteBuffer response;
  const grpc::Status status = impl_->CallBytes(kHealthCheckMethod, &context, request, &response);
  if (status.error_code() == grpc::StatusCode::NOT_FOUND) return Health::kServiceUnknown;
  if (!status.ok()) return ToAbsl(status, impl_->address);
  return DecodeHealthResponse(response);
}

}  // namespace moed::client
