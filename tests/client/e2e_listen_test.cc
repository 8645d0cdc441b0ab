// How a real moed listens: permissions of its sockets, sockets of others, and connections kept alive by pings.
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <future>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/moed_client.h"
#include "moe/v1/moe.grpc.pb.h"
#include "tests/client/golden_models.h"
#include "tests/client/running_server.h"

namespace moed::testing {
namespace {

using Catch::Matchers::Contains;
using client::MoeClient;

std::string Model() { return CheckedInModel("gptq-int4-g32-sym").path; }

// A folder whose name is short enough for a UNIX socket in it.
struct SocketFolder {
  std::string path = "/tmp/moed-XXXXXX";
  SocketFolder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~SocketFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::string socket() const { return path + "/moed.sock"; }
  std::string address() const { return "unix:" + socket(); }
  std::string ready() const { return path + "/ready.json"; }
};

std::unique_ptr<Process> Serve(const SocketFolder& folder, const std::vector<std::string>& more = {}) {
  std::filesystem::remove(folder.ready());
  // The widest umask there is, so that nothing but moed narrows what it makes.
  std::vector<std::string> arguments = {"/bin/sh", "-c", "umask 0; exec \"$@\"", "sh", kMoed, "serve", "--model", Model(),
                                        "--listen", folder.address(), "--ready-file", folder.ready()};
  arguments.insert(arguments.end(), more.begin(), more.end());
  auto process = Process::Start(arguments);
  REQUIRE(process != nullptr);
  return process;
}

// The permissions that a socket has shown, looked at without a pause until `folder`'s server is ready.
std::set<mode_t> ModesUntilReady(const SocketFolder& folder) {
  std::set<mode_t> seen;
  const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  for (bool ready = false; !ready && std::chrono::steady_clock::now() < end;) {
    ready = Exists(folder.ready());
    struct stat info{};
    if (lstat(folder.socket().c_str(), &info) == 0) seen.insert(info.st_mode & 07777);
  }
  return seen;
}

absl::Status StatusOf(const std::string& address) {
  const auto client = MoeClient::Connect(address, {.own_connection = true});
  return client.ok() ? (*client)->Status().status() : client.status();
}

// A connection of HTTP/2 that has sent its first words; closed with the object.
class Http2Connection {
 public:
  explicit Http2Connection(const std::string& socket_path) : socket_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socket_path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    REQUIRE(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    const timeval hang_guard = {60, 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &hang_guard, sizeof(hang_guard));
    const std::string words = std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
    REQUIRE(send(socket_, words.data(), words.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(words.size()));
  }
  ~Http2Connection() { close(socket_); }
  Http2Connection(const Http2Connection&) = delete;
  Http2Connection& operator=(const Http2Connection&) = delete;

  // Setting `id` of the server's first frame; nothing when it does not set it.
  std::optional<uint64_t> Setting(uint64_t id) {
    const std::string head = Read(9);
    REQUIRE(Number(head, 3, 1) == 4);  // SETTINGS
    const std::string settings = Read(Number(head, 0, 3));
    for (size_t at = 0; at + 6 <= settings.size(); at += 6) {
      if (Number(settings, at, 2) == id) return Number(settings, at + 2, 4);
    }
    return std::nullopt;
  }

 private:
  std::string Read(size_t bytes) {
    std::string text(bytes, '\0');
    REQUIRE(recv(socket_, text.data(), bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes));
    return text;
  }
  static uint64_t Number(const std::string& bytes, size_t at, size_t count) {
    uint64_t number = 0;
    for (size_t i = 0; i < count; ++i) number = number << 8 | static_cast<uint8_t>(bytes[at + i]);
    return number;
  }

  const int socket_;
};

}  // namespace

TEST_CASE("A connection may have 512 calls under way, or twice as many as may wait for the device") {
  constexpr uint64_t kMaxConcurrentStreams = 3;  // of RFC 9113
  for (const auto& [queue, calls] : {std::pair<std::string, uint64_t>{"16", 512}, {"1000", 2000}}) {
    const SocketFolder folder;
    const auto server = Serve(folder, {"--queue", queue});
    REQUIRE(WaitFor([&] { return Exists(folder.ready()); }));
    CHECK(Http2Connection(folder.socket()).Setting(kMaxConcurrentStreams) == calls);
  }
}

TEST_CASE("A client that begins more calls at once than a connection may have under way gets an answer to each") {
  constexpr int kCalls = 1500;
  const SocketFolder folder;
  const auto server = Serve(folder, {"--queue", "16"});
  REQUIRE(WaitFor([&] { return Exists(folder.ready()); }));
  const auto stub = moe::v1::Moe::NewStub(grpc::CreateChannel(folder.address(), grpc::InsecureChannelCredentials()));
  moe::v1::StatusRequest none;
  moe::v1::StatusResponse status;
  grpc::ClientContext asked;
  REQUIRE(stub->Status(&asked, none, &status).ok());
  moe::v1::ForwardRequest request;
  request.set_layer(status.models(0).layers(0).layer());
  request.mutable_hidden()->set_dtype(moe::v1::DTYPE_BF16);
  request.mutable_hidden()->add_shape(1), request.mutable_hidden()->add_shape(status.models(0).hidden());
  request.mutable_hidden()->set_data(std::string(static_cast<size_t>(status.models(0).hidden()) * 2, '\0'));
  struct Open {
    grpc::ClientContext context;
    moe::v1::ForwardResponse response;
    std::promise<grpc::Status> done;
  };
  std::vector<std::unique_ptr<Open>> open;
  for (int i = 0; i < kCalls; ++i) {
    open.push_back(std::make_unique<Open>());
    Open* const call = open.back().get();
    call->context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
    stub->async()->Forward(&call->context, &request, &call->response, [call](grpc::Status end) { call->done.set_value(end); });
  }
  int answered = 0, refused = 0;
  for (const auto& call : open) {
    const grpc::Status end = call->done.get_future().get();
    answered += end.ok(), refused += end.error_code() == grpc::RESOURCE_EXHAUSTED;
  }
  CHECK(answered > 0);
  CHECK(answered + refused == kCalls);
}

TEST_CASE("A socket has the mode that was asked for from its first moment on, by default for the owner alone") {
  {
    const SocketFolder folder;
    const auto server = Serve(folder);
    CHECK(ModesUntilReady(folder) == std::set<mode_t>{0600});
    CHECK(StatusOf(folder.address()).ok());
  }
  const SocketFolder folder;
  const auto server = Serve(folder, {"--unix-mode", "0660"});
  CHECK(ModesUntilReady(folder) == std::set<mode_t>{0660});
}

TEST_CASE("The socket of a killed server is taken over, that of a living or stopped one is not") {
  const SocketFolder folder;
  auto first = Serve(folder);
  REQUIRE(WaitFor([&] { return Exists(folder.ready()); }));
  for (const bool stopped : {false, true}) {
    if (stopped) first->Signal(SIGSTOP);
    const Finished second = RunToEnd({kMoed, "serve", "--model", Model(), "--listen", folder.address()});
    CHECK(second.exit_code == 2);
    CHECK_THAT(second.FirstError(), Contains(folder.address()) && Contains("another server answers"));
  }
  first->Signal(SIGCONT);
  CHECK(StatusOf(folder.address()).ok());
  first->Signal(SIGKILL);
  REQUIRE(first->Wait(std::chrono::minutes(1)).has_value());
  REQUIRE(Exists(folder.socket()));
  const auto third = Serve(folder);
  REQUIRE(WaitFor([&] { return Exists(folder.ready()); }));
  CHECK(StatusOf(folder.address()).ok());
  third->Signal(SIGTERM);
  CHECK(third->Wait(std::chrono::minutes(1)) == 0);
  CHECK_FALSE(Exists(folder.socket()));
}

TEST_CASE("B61: A client that pings every six seconds without calls keeps its connection, one that pings each second loses it") {
  const RunningServer server({Model()});
  const auto connect = [&server](int seconds) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, seconds * 1000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(server.tcp(), grpc::InsecureChannelCredentials(), arguments);
    REQUIRE(channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::minutes(1)));
    return channel;
  };
  // The server counts pings that come too soon and ends the connection at the third.
  const auto loses = [](const std::shared_ptr<grpc::Channel>& channel) {
    return channel->WaitForStateChange(GRPC_CHANNEL_READY, std::chrono::system_clock::now() + std::chrono::seconds(26));
  };
  auto polite = std::async(std::launch::async, [&] { return loses(connect(6)); });
  auto eager = std::async(std::launch::async, [&] { return loses(connect(1)); });
  CHECK_FALSE(polite.get());
  CHECK(eager.get());  // the protection is on
  CHECK(StatusOf(server.tcp()).ok());
}

TEST_CASE("Reflection lists the services to tools that know none, unless it is switched off") {
  // A ServerReflectionRequest with list_services, which is all that such a tool starts with.
  const auto list = [](const RunningServer& server, std::string* answer) {
    const std::string request("\x3a\x01*");
    const grpc::Slice slice(request);
    const grpc::ByteBuffer bytes(&slice, 1);
    grpc::ByteBuffer received;
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(1));
    std::promise<grpc::Status> done;
    grpc::GenericStub(grpc::CreateChannel(server.tcp(), grpc::InsecureChannelCredentials()))
        .UnaryCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", {}, &bytes, &received,
                   [&](grpc::Status status) { done.set_value(std::move(status)); });
    const grpc::StatusCode code = done.get_future().get().error_code();
    grpc::Slice whole;
    if (code == grpc::StatusCode::OK && received.DumpToSingleSlice(&whole).ok()) {
      answer->assign(reinterpret_cast<const char*>(whole.begin()), whole.size());
    }
    return code;
  };
  std::string answer;
  CHECK(list(RunningServer({Model()}), &answer) == grpc::StatusCode::OK);
  CHECK_THAT(answer, Contains("moe.v1.Moe") && Contains("grpc.health.v1.Health"));
  CHECK(list(RunningServer({Model()}, {"--no-reflection"}), &answer) == grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace moed::testing
