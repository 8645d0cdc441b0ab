#include "tests/soak/soak_caller.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <future>
#include <iterator>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/ring/doorbell.h"
#include "tests/server/session_client.h"

namespace moed::testing {
namespace {

using client::Transport;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr size_t kSessionBytes = 8 << 20;
constexpr int kPeakSteps = 30;
constexpr int64_t kStreamRows = 33;
constexpr int kWindow = 8;  // requests of a stream that were not answered, below the server's limit

Seen WayOf(Transport transport) {
  switch (transport) {
    case Transport::kSharedMemory: return Seen::kSharedMemory;
    case Transport::kRing: return Seen::kRing;
    default: return Seen::kRpc;
  }
}

grpc::ByteBuffer Bytes(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace

void SoakReport::Problem(Seen seen, const std::string& text) {
  Add(seen);
  std::printf("PROBLEM %s: %s\n", kSeenNames[static_cast<size_t>(seen)], text.c_str());
  std::fflush(stdout);
}

SoakCaller::SoakCaller(const SoakClientOptions& options, const SoakCases& cases, const SoakAnswers& answers, uint32_t seed,
                       SoakReport* report)
    : options_(options),
      cases_(cases),
      answers_(answers),
      report_(report),
      random_(seed) {
  const auto bytes = [](const std::unique_ptr<SoakCase>& each) { return each->hidden.size() + each->OutputBytes(); };
  largest_ = static_cast<size_t>(
      std::max_element(cases_.begin(), cases_.end(), [&](const auto& a, const auto& b) { return bytes(a) < bytes(b); }) -
      cases_.begin());
  Reconnect();
}

void SoakCaller::Step() {
  // All threads begin with the largest call, so that the server's memory has its peak early and what grows later is a leak.
  if (++steps_ <= kPeakSteps) return CallByClient(largest_);
  const uint32_t choice = Random(200);
  if (choice < 4) return Reconnect();
  if (choice < 20) return CallAndCancel();
  if (choice < 40) return CallByStream();
  if (choice < 52) return CallBadly();
  if (choice < 58) return SendGarbage();
  if (choice < 62) return SendGarbageBytes();
  if (choice < 70) return BreakSession();
  CallByClient(RandomCase());
}

size_t SoakCaller::RandomCase(int64_t most_rows) {
  size_t index = RandomCase();
  while (cases_[index]->call.hidden.rows > most_rows) index = RandomCase();
  return index;
}

void SoakCaller::Reconnect() {
  constexpr Transport kTransports[] = {Transport::kRpc, Transport::kSharedMemory, Transport::kRing};
  transport_ = kTransports[Random(std::size(kTransports))];
  const std::string& address = Random(2) == 0 ? options_.tcp : options_.unix_socket;
  auto client =
      client::MoeClient::Connect(address, {.own_connection = true, .transport = transport_, .session_bytes = kSessionBytes});
  if (!client.ok()) return report_->Problem(Seen::kError, absl::StrCat("connect: ", client.status().ToString()));
  client_ = *std::move(client);
  // Waiting for the connection, since gRPC 1.51 can take one that is under way for a failed one: it looks at the errno of connect()
  // after calls that may have set another.
  if (const auto hello = client_->Hello({.wait_for_ready = true}); !hello.ok()) {
    return report_->Problem(Seen::kError, absl::StrCat("connect: ", hello.status().ToString()));
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(256 << 20);
  const auto channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  stub_ = moe::v1::Moe::NewStub(channel);
  generic_ = std::make_unique<grpc::GenericStub>(channel);
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  moe::v1::HelloRequest request;
  moe::v1::HelloResponse response;
  request.set_protocol(1);
  const grpc::Status status = stub_->Hello(&context, request, &response);
  if (!status.ok()) return JudgeError("Hello", status.error_code(), status.error_message(), false, false);
  session_socket_ = response.shared_memory().socket();
}

void SoakCaller::Judge(size_t index, uint64_t generation, const std::string& output, Seen way) {
  if (answers_.Right(index, cases_[index]->call.model == kSteady ? 1 : generation, output)) return report_->Add(way);
  report_->Problem(Seen::kWrong, absl::StrCat("case ", index, " of model ", cases_[index]->call.model, ", generation ", generation,
                                              ", by ", kSeenNames[static_cast<size_t>(way)]));
}

void SoakCaller::JudgeError(const std::string& what, int code, const std::string& text, bool may_be_late, bool may_be_cancelled) {
  if (code == grpc::RESOURCE_EXHAUSTED) return report_->Add(Seen::kFull);
  if (may_be_late && code == grpc::DEADLINE_EXCEEDED) return report_->Add(Seen::kLate);
  if (may_be_cancelled && code == grpc::CANCELLED) return report_->Add(Seen::kCancelled);
  report_->Problem(Seen::kError, absl::StrCat(what, ": code ", code, ": ", text));
}

void SoakCaller::CallByClient(size_t index) {
  const bool hurry = Random(8) == 0;
  const client::CallOptions options = {.timeout = hurry ? milliseconds(1 + Random(6)) : milliseconds(60'000)};
  const SoakCase& each = *cases_[index];
  const absl::StatusOr<client::ForwardResult> result =
      transport_ != Transport::kRpc && Random(2) == 0 ? CallInBuffers(each, options) : client_->Forward(each.call, options);
  if (result.ok()) return Judge(index, result->generation, result->data, WayOf(transport_));
  JudgeError(absl::StrCat("call by ", client::TransportName(transport_)), static_cast<int>(result.status().code()),
             std::string(result.status().message()), hurry, false);
}

absl::StatusOr<client::ForwardResult> SoakCaller::CallInBuffers(const SoakCase& each, const client::CallOptions& options) {
  absl::StatusOr<client::Buffer> in = client_->Allocate(each.hidden.size()), out = client_->Allocate(each.OutputBytes());
  if (!in.ok()) return in.status();
  if (!out.ok()) return out.status();
  std::copy(each.hidden.begin(), each.hidden.end(), in->bytes().begin());
  client::ForwardCall call = each.call;
  call.hidden.data = in->bytes();
  absl::StatusOr<client::ForwardResult> result = client_->ForwardInto(call, out->bytes(), options);
  if (result.ok()) result->data.assign(reinterpret_cast<const char*>(out->bytes().data()), out->bytes().size());
  // Once given up, the server may still read and write what it was given; the client keeps only its own parts from others.
  if (absl::IsDeadlineExceeded(result.status())) client_.reset(), Reconnect();
  return result;
}

void SoakCaller::CallAndCancel() {
  const size_t index = RandomCase();
  const moe::v1::ForwardRequest request = cases_[index]->Request();
  moe::v1::ForwardResponse response;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  stub_->async()->Forward(&context, &request, &response, [&done](grpc::Status status) { done.set_value(std::move(status)); });
  std::this_thread::sleep_for(microseconds(Random(3000)));
  context.TryCancel();
  const grpc::Status status = done.get_future().get();
  if (status.ok()) return Judge(index, response.generation(), response.output().data(), Seen::kRpc);
  JudgeError("cancelled call", status.error_code(), status.error_message(), false, true);
}

void SoakCaller::CallByStream() {
  grpc::ClientContext context;
  const std::unique_ptr<Stream> stream = stub_->ForwardStream(&context);
  const int calls = 1 + static_cast<int>(Random(40));
  const bool cancel = Random(4) == 0;
  int written = 0, under_way = 0;
  for (; written < calls; ++written) {
    if (under_way == kWindow) ReadStream(stream.get(), 1, cancel), --under_way;
    const size_t index = RandomCase(kStreamRows);  // many are under way at once
    moe::v1::ForwardRequest request = cases_[index]->Request();
    request.set_request_id(absl::StrCat(index));
    if (Random(8) == 0) request.set_timeout_us(1 + Random(5000));
    if (!stream->Write(request)) break;
    ++under_way;
  }
  if (cancel) context.TryCancel();
  stream->WritesDone();
  ReadStream(stream.get(), under_way, cancel);
  moe::v1::ForwardResponse none;
  while (cancel && stream->Read(&none)) {
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) JudgeError("stream", status.error_code(), status.error_message(), false, cancel);
}

void SoakCaller::ReadStream(Stream* stream, int want, bool cancelled) {
  moe::v1::ForwardResponse response;
  for (int i = 0; i < want; ++i) {
    if (!stream->Read(&response)) {
      if (!cancelled) report_->Problem(Seen::kError, absl::StrCat("stream: wanted ", want, " answers, got ", i));
      return;
    }
    const size_t index = static_cast<size_t>(std::strtoul(response.request_id().c_str(), nullptr, 10));
    if (!response.has_status()) {
      Judge(index, response.generation(), response.output().data(), Seen::kStream);
    } else {
      JudgeError("request of a stream", response.status().code(), response.status().message(), true, cancelled);
    }
  }
}

void SoakCaller::WantRefused(const std::string& what, const grpc::Status& status) {
  if (status.error_code() == grpc::INVALID_ARGUMENT || status.error_code() == grpc::NOT_FOUND) return report_->Add(Seen::kBad);
  JudgeError(absl::StrCat(what, " (wanted a refusal)"), status.error_code(), status.error_message(), false, false);
}

void SoakCaller::CallBadly() {
  moe::v1::ForwardRequest request;
  do {
    request = cases_[RandomCase()]->Request();
  } while (request.hidden().shape(0) == 0);
  switch (Random(7)) {
    case 0: request.set_layer(77); break;
    case 1: request.set_model("another"); break;
    case 2: request.mutable_hidden()->set_shape(0, 1 + Random(1u << 30) + request.hidden().shape(0)); break;
    case 3: request.mutable_hidden()->mutable_data()->pop_back(); break;
    case 4: request.set_request_id(std::string(129 + Random(100'000), 'x')); break;
    case 5: request.mutable_hidden()->set_dtype(moe::v1::DTYPE_I32); break;
    default: request.mutable_hidden()->mutable_session_memory()->set_key(std::string(16, 'k')); break;
  }
  grpc::ClientContext context;
  moe::v1::ForwardResponse response;
  WantRefused("bad call", stub_->Forward(&context, request, &response));
}

void SoakCaller::SendGarbage() {
  std::string text = cases_[RandomCase()]->Request().SerializeAsString();
  for (int i = 0; i < 20; ++i) text[Random(static_cast<uint32_t>(std::min<size_t>(text.size(), 60)))] = static_cast<char>(0xff);
  text.insert(0, std::string(1 + Random(8), '\xff'));
  const grpc::ByteBuffer request = Bytes(text);
  grpc::ByteBuffer response;
  grpc::ClientContext context;
  std::promise<grpc::Status> done;
  generic_->UnaryCall(&context, "/moe.v1.Moe/Forward", grpc::StubOptions(), &request, &response,
                      [&done](grpc::Status status) { done.set_value(std::move(status)); });
  WantRefused("garbage", done.get_future().get());
}

void SoakCaller::SendGarbageBytes() {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port =
      htons(static_cast<uint16_t>(std::strtoul(options_.tcp.substr(options_.tcp.rfind(':') + 1).c_str(), nullptr, 10)));
  const int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    // Half of them begin as a connection of HTTP/2 does.
    std::string text = Random(2) == 0 ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" : "";
    for (uint32_t i = Random(5000); i > 0; --i) text.push_back(static_cast<char>(random_()));
    [[maybe_unused]] const ssize_t sent = send(connection, text.data(), text.size(), MSG_NOSIGNAL);
    report_->Add(Seen::kBroken);
  } else {
    report_->Problem(Seen::kError, "connect to the TCP port failed");
  }
  close(connection);
}

void SoakCaller::BreakSession() {
  if (session_socket_.empty()) return;
  SessionClient session(session_socket_);
  if (!session.connected())
    return report_->Problem(Seen::kError, absl::StrCat("session socket ", session_socket_, ": no connection"));
  const uint32_t choice = Random(5);
  if (choice == 0) return report_->Add(Seen::kBroken);  // left at once
  if (choice == 1) {
    send(session.socket_fd(), "none", 4, MSG_NOSIGNAL);
    return report_->Add(Seen::kBroken);
  }
  const ring::OpenAnswer answer = session.Open(1 << 20, choice == 2 ? 3 : 8);  // three slots are none
  if (choice == 2 ? answer.code == 0 : answer.code != 0 && answer.code != grpc::RESOURCE_EXHAUSTED) {
    return report_->Problem(Seen::kError, absl::StrCat("session: code ", answer.code, ": ", answer.message));
  }
  if (choice == 3 && answer.code == 0) {  // a slot that is none
    session.header().queue[0].store(4711);
    session.header().posted.fetch_add(1);
    ring::Ring(session.header().posted, session.header().server_waits);
    if (!session.Ended()) report_->Problem(Seen::kError, "session: a slot that is none did not end it");
  }
  report_->Add(Seen::kBroken);
}

}  // namespace moed::testing
