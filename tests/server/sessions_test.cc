// The session socket and rings: who gets in, what ends a session, and that a client which breaks the rules loses its own
// session only.
#include "server/sessions.h"

#include <catch2/catch.hpp>
#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "proto/ring/doorbell.h"
#include "server/ring_server.h"
#include "tests/server/session_client.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using testing::SessionClient;
using testing::TempDir;

constexpr size_t kBytes = 256 << 10;

template <typename Condition>
bool Soon(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return condition();
}

// A server's session socket whose rings keep what they are sent, or answer at once.
struct Server {
  explicit Server(const std::function<void(SessionOptions*)>& change = [](SessionOptions*) {}) {
    SessionOptions options;
    options.path = folder.path() + "/session";
    options.serve_ring = [this](std::shared_ptr<Region> region, uint64_t offset, uint32_t slots, const std::string&,
                                std::function<void(const absl::Status&)> abandon) {
      RingServer::Options ring;
      ring.handle = [this](std::shared_ptr<RingCall> call) {
        if (answer) return call->Answer(Echo(*call));
        std::lock_guard<std::mutex> lock(mutex);
        kept.push_back(std::move(call));
      };
      ring.abandon = [this, abandon](const absl::Status& why) {
        {
          std::lock_guard<std::mutex> lock(mutex);
          abandoned.push_back(why);
        }
        abandon(why);
      };
      return std::make_unique<RingServer>(std::move(region), offset, slots, std::move(ring));
    };
    change(&options);
    absl::StatusOr<std::unique_ptr<Sessions>> listening = Sessions::Listen(std::move(options));
    REQUIRE(listening.ok());
    sessions = *std::move(listening);
  }

  static ring::Completion Echo(const RingCall& call) {
    ring::Completion completion = {};
    completion.generation = call.submission().rows;
    std::memcpy(completion.message, call.submission().request_id, sizeof(call.submission().request_id));
    return completion;
  }

  size_t Kept() {
    std::lock_guard<std::mutex> lock(mutex);
    return kept.size();
  }
  std::string Abandoned() {
    std::lock_guard<std::mutex> lock(mutex);
    return abandoned.empty() ? "" : std::string(abandoned.back().message());
  }

  TempDir folder{TempDir::Use::kForSockets};
  std::atomic<bool> answer{true};
  std::mutex mutex;
  std::vector<std::shared_ptr<RingCall>> kept;
  std::vector<absl::Status> abandoned;
  std::unique_ptr<Sessions> sessions;
};

void Post(const SessionClient& client, uint32_t slots, uint32_t slot, uint32_t sequence, uint64_t rows) {
  if (slot < slots) {
    client.slot(slot).submission.sequence = sequence;
    client.slot(slot).submission.rows = rows;
  }
  const uint32_t posted = client.header().posted.load();
  client.header().queue[posted % slots].store(slot);
  client.header().posted.store(posted + 1);
  ring::Ring(client.header().posted, client.header().server_waits);
}

bool Answered(const SessionClient& client, uint32_t slot, uint32_t sequence) {
  return Soon([&] { return client.slot(slot).done.load() == sequence; });
}

void CheckRefused(Server& server, const ring::OpenRequest& request, int fd, const std::string& why) {
  SessionClient client(server.sessions->path());
  REQUIRE(client.connected());
  REQUIRE(client.Send(request, fd));
  const ring::OpenAnswer answer = client.Receive();
  CHECK(answer.code > 0);
  CHECK_THAT(std::string(answer.message), Contains(why));
  CHECK(client.Ended());
}

}  // namespace

TEST_CASE("A session is found by its key until its client closes the connection") {
  Server server;
  CHECK((server.sessions->server_id() != ring::SessionKey{}));
  ring::SessionKey key;
  {
    SessionClient client(server.sessions->path());
    const ring::OpenAnswer answer = client.Open(kBytes, 0);
    REQUIRE(answer.code == 0);
    CHECK(answer.server_id == server.sessions->server_id());
    key = answer.key;
    client.memory()[kBytes - 1] = std::byte{42};
    const auto region = server.sessions->Find(key);
    REQUIRE(region.ok());
    REQUIRE((*region)->memory().size() == kBytes);
    CHECK((*region)->memory().back() == std::byte{42});
    CHECK(server.sessions->counts().open == 1);
    CHECK(server.sessions->counts().bytes == kBytes);
    CHECK(absl::IsNotFound(server.sessions->Find(ring::SessionKey{}).status()));
  }
  CHECK(Soon([&] { return absl::IsNotFound(server.sessions->Find(key).status()); }));
  CHECK(Soon([&] { return server.sessions->counts().open == 0 && server.sessions->counts().bytes == 0; }));
}

TEST_CASE("A region stays mapped for whoever uses it when the session is over") {
  Server server;
  auto client = std::make_unique<SessionClient>(server.sessions->path());
  const ring::OpenAnswer answer = client->Open(kBytes, 0);
  REQUIRE(answer.code == 0);
  const std::shared_ptr<Region> region = *server.sessions->Find(answer.key);
  client.reset();
  REQUIRE(Soon([&] { return server.sessions->counts().open == 0; }));
  region->memory().front() = std::byte{1};  // would be a fault
  CHECK(region.use_count() == 1);
}

TEST_CASE("Places are within the region and aligned, or refused with the numbers") {
  Server server;
  SessionClient client(server.sessions->path());
  const ring::OpenAnswer answer = client.Open(kBytes, 0);
  const std::shared_ptr<Region> region = *server.sessions->Find(answer.key);
  CHECK(*region->At("hidden", 64, kBytes - 64) == region->memory().data() + 64);
  CHECK(region->At("hidden", kBytes, 0).ok());
  CHECK_THAT(std::string(region->At("hidden", 64, kBytes - 63).status().message()),
             Contains("hidden") && Contains("262144") && Contains("262081 bytes from 64"));
  CHECK(absl::IsInvalidArgument(region->At("hidden", kBytes + 64, 0).status()));
  CHECK(absl::IsInvalidArgument(region->At("hidden", uint64_t{0} - 64, 128).status()));
  CHECK(absl::IsInvalidArgument(region->At("hidden", 64, uint64_t{0} - 1).status()));
  CHECK_THAT(std::string(region->At("hidden", 32, 1).status().message()), Contains("multiple of 64, got 32"));
}

TEST_CASE("Requests that break the rules are refused with the reason, and the next one is served") {
  Server server;
  const int region = ring::MakeRegion(kBytes);
  ring::OpenRequest good;
  good.region_bytes = kBytes;
  const auto with = [&](const std::function<void(ring::OpenRequest*)>& change) {
    ring::OpenRequest request = good;
    change(&request);
    return request;
  };
  CheckRefused(server, with([](auto* r) { r->magic = 1; }), region, "none of this protocol");
  CheckRefused(server, with([](auto* r) { r->version = 9; }), region, "wanted version 1 of the shared-memory protocol, got 9");
  CheckRefused(server, good, -1, "got none");
  CheckRefused(server, with([](auto* r) { r->region_bytes = 0; }), region, "multiple of 4096");
  CheckRefused(server, with([](auto* r) { r->region_bytes = kBytes + 1; }), region, "got 262145");
  CheckRefused(server, with([](auto* r) { r->region_bytes = 2 * kBytes; }), region, "got 262144");
  CheckRefused(server, with([](auto* r) { r->ring_slots = 3; }), region, "power of two");
  CheckRefused(server, with([](auto* r) { r->ring_slots = 512; }), region, "at most 256");
  CheckRefused(server, with([](auto* r) { r->ring_slots = 256; }), region, "of the region");
  CheckRefused(server, with([](auto* r) { r->ring_slots = 1, r->ring_offset = 32; }), region, "at a multiple of 64");
  CheckRefused(server, with([](auto* r) { r->ring_slots = 1, r->ring_offset = uint64_t{0} - 64; }), region, "within the");
  CheckRefused(server, good, 0, "region:");
  close(region);
  SessionClient client(server.sessions->path());
  CHECK(client.Open(kBytes, 4).code == 0);
  CHECK(server.sessions->counts().refused == 12);
}

TEST_CASE("Whoever sends something else, or nothing, loses the connection and nobody else does") {
  Server server;
  SessionClient good(server.sessions->path());
  REQUIRE(good.Open(kBytes, 4).code == 0);
  SessionClient silent(server.sessions->path()), talker(server.sessions->path()), short_packet(server.sessions->path());
  REQUIRE(send(short_packet.socket_fd(), "x", 1, MSG_NOSIGNAL) == 1);
  CHECK(short_packet.Ended());
  REQUIRE(talker.Open(kBytes, 0).code == 0);
  REQUIRE(send(talker.socket_fd(), "x", 1, MSG_NOSIGNAL) == 1);
  CHECK(talker.Ended());
  CHECK(silent.Ended());  // after some seconds
  Post(good, 4, 0, 1, 5);
  CHECK(Answered(good, 0, 1));
}

TEST_CASE("Sessions and their bytes are limited, and what ends makes room") {
  Server server([](SessionOptions* options) {
    options->max_sessions = 2;
    options->max_bytes = 3 * kBytes;
  });
  SessionClient first(server.sessions->path());
  REQUIRE(first.Open(2 * kBytes, 0).code == 0);
  SessionClient large(server.sessions->path());
  CHECK_THAT(std::string(large.Open(2 * kBytes, 0).message), Contains("524288 bytes asked for, 524288 of 786432 are in use"));
  SessionClient second(server.sessions->path());
  REQUIRE(second.Open(kBytes, 0).code == 0);
  SessionClient third(server.sessions->path());
  CHECK_THAT(std::string(third.Open(4096, 0).message), Contains("2 are open, 2 may be"));
  first.Close();
  CHECK(Soon([&] { return server.sessions->counts().open == 1; }));
  SessionClient fourth(server.sessions->path());
  CHECK(fourth.Open(2 * kBytes, 0).code == 0);
}

TEST_CASE("Only whom the server admits opens a session, and regions are pinned while it lasts") {
  auto pinned = std::make_shared<std::atomic<int>>(0);
  auto bytes = std::make_shared<std::atomic<size_t>>(0);
  Server server([&](SessionOptions* options) {
    options->admit = [](const std::string& token) {
      return token == "right" ? absl::OkStatus() : absl::UnauthenticatedError("no such token");
    };
    options->pin = [pinned, bytes](std::span<std::byte> memory) {
      *bytes = memory.size();
      ++*pinned;
      return std::shared_ptr<void>(nullptr, [pinned](void*) { --*pinned; });
    };
  });
  ring::OpenRequest request;
  request.region_bytes = kBytes;
  std::memset(request.token, 'x', sizeof(request.token));  // without an end
  const int region = ring::MakeRegion(kBytes);
  CheckRefused(server, request, region, "no such token");
  CHECK(*pinned == 0);
  std::memset(request.token, 0, sizeof(request.token));
  std::memcpy(request.token, "right", 5);
  SessionClient client(server.sessions->path());
  REQUIRE(client.Send(request, region));
  close(region);
  CHECK(client.Receive().code == 0);
  CHECK(*pinned == 1);
  CHECK(*bytes == kBytes);
  client.Close();
  CHECK(Soon([&] { return *pinned == 0; }));
}

TEST_CASE("The socket is the owner's, replaces one that nobody answers at, and goes with the server") {
  const TempDir folder(TempDir::Use::kForSockets);
  const std::string path = folder.path() + "/session";
  SessionOptions options;
  options.path = path;
  auto first = Sessions::Listen(options);
  REQUIRE(first.ok());
  struct stat info{};
  REQUIRE(stat(path.c_str(), &info) == 0);
  CHECK((info.st_mode & 0777) == 0600);
  CHECK(absl::IsAlreadyExists(Sessions::Listen(options).status()));
  first->reset();
  CHECK(stat(path.c_str(), &info) != 0);
  {
    const int stale = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    REQUIRE(bind(stale, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0);
    close(stale);
  }
  CHECK(Sessions::Listen(options).ok());
  const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  REQUIRE(file >= 0);
  close(file);
  CHECK(absl::IsAlreadyExists(Sessions::Listen(options).status()));
  options.path = folder.path() + "/none/session";
  CHECK_THAT(std::string(Sessions::Listen(options).status().message()), Contains(options.path) && Contains("No such file"));
  options.path = std::string(200, 'a');
  CHECK(absl::IsUnavailable(Sessions::Listen(options).status()));
}

TEST_CASE("Submissions are answered in their slots, in any order, round after round") {
  Server server;
  SessionClient client(server.sessions->path());
  constexpr uint32_t kSlots = 4;
  REQUIRE(client.Open(kBytes, kSlots).code == 0);
  for (uint32_t round = 1; round <= 50; ++round) {
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      std::memset(client.slot(slot).submission.request_id, 'a' + static_cast<char>(slot), 136);  // without an end
      Post(client, kSlots, slot, round, 10 * round + slot);
    }
    for (uint32_t slot = 0; slot < kSlots; ++slot) {
      REQUIRE(Answered(client, slot, round));
      CHECK(client.slot(slot).completion.generation == 10 * round + slot);
      CHECK(std::string(client.slot(slot).completion.message) == std::string(135, 'a' + static_cast<char>(slot)));
    }
  }
  server.answer = false;
  for (uint32_t slot = 0; slot < kSlots; ++slot) Post(client, kSlots, slot, 1000, slot);
  REQUIRE(Soon([&] { return server.Kept() == kSlots; }));
  for (const uint32_t slot : {3u, 0u, 2u, 1u}) {
    server.kept[slot]->Answer(Server::Echo(*server.kept[slot]));
    CHECK(client.slot(slot).done.load() == 1000);
  }
}

TEST_CASE("A client that posts what it must not loses its session, and only that") {
  Server server;
  server.answer = false;
  SessionClient good(server.sessions->path());
  REQUIRE(good.Open(kBytes, 4).code == 0);
  Post(good, 4, 0, 1, 1);
  REQUIRE(Soon([&] { return server.Kept() == 1; }));
  uint64_t abandoned = 0;
  const auto breaks = [&](const std::string& why, const std::function<void(const SessionClient&)>& how) {
    SessionClient bad(server.sessions->path());
    REQUIRE(bad.Open(kBytes, 4).code == 0);
    how(bad);
    CHECK(bad.Ended());
    CHECK_THAT(server.Abandoned(), Contains(why));
    ++abandoned;
    CHECK(Soon([&] { return server.sessions->counts().abandoned == abandoned; }));
  };
  breaks("wanted a slot below 4, got 4", [](const SessionClient& bad) { Post(bad, 4, 4, 1, 1); });
  breaks("wanted a slot below 4, got 4294967295", [](const SessionClient& bad) { Post(bad, 4, UINT32_MAX, 1, 1); });
  breaks("slot 2 was posted before it was answered", [](const SessionClient& bad) {
    Post(bad, 4, 2, 1, 1);
    Post(bad, 4, 2, 2, 1);
  });
  breaks("submissions were posted at once", [](const SessionClient& bad) {
    bad.header().posted.store(5);
    ring::Ring(bad.header().posted, bad.header().server_waits);
  });
  breaks("submissions were posted at once", [](const SessionClient& bad) {
    bad.header().posted.store(UINT32_MAX);
    ring::Ring(bad.header().posted, bad.header().server_waits);
  });
  CHECK_FALSE(server.kept.front()->Gone());
  server.kept.front()->Answer(Server::Echo(*server.kept.front()));
  CHECK(good.slot(0).done.load() == 1);
}

TEST_CASE("Calls know that their client is gone, and may still be answered") {
  Server server;
  server.answer = false;
  auto client = std::make_unique<SessionClient>(server.sessions->path());
  REQUIRE(client->Open(kBytes, 4).code == 0);
  Post(*client, 4, 1, 7, 1);
  REQUIRE(Soon([&] { return server.Kept() == 1; }));
  CHECK_FALSE(server.kept.front()->Gone());
  client.reset();
  CHECK(Soon([&] { return server.kept.front()->Gone(); }));
  server.kept.front()->Answer(Server::Echo(*server.kept.front()));
  server.kept.clear();
}

TEST_CASE("A completion tells why a call failed, as far as there are words and room for them") {
  CHECK(std::string(FailedCompletion(absl::InternalError("why")).message) == "why");
  CHECK(std::string(FailedCompletion(absl::Status(absl::StatusCode::kCancelled, {})).message).empty());
  const ring::Completion completion = FailedCompletion(absl::InternalError(std::string(10'000, 'x')));
  CHECK(std::string(completion.message) == std::string(sizeof(completion.message) - 1, 'x'));
}

TEST_CASE("Stop ends every session, and nobody can open another") {
  Server server;
  SessionClient client(server.sessions->path()), late(server.sessions->path());
  REQUIRE(client.Open(kBytes, 4).code == 0);
  server.sessions->StopAccepting();
  SessionClient refused(server.sessions->path());
  CHECK((!refused.connected() || refused.Ended()));
  server.sessions->Stop();
  CHECK(client.Ended());
  CHECK(server.sessions->counts().open == 0);
  CHECK_FALSE(SessionClient(server.sessions->path()).connected());
}

}  // namespace moed
