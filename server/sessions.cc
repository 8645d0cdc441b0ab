#include "server/sessions.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using std::chrono::steady_clock;

constexpr std::chrono::seconds kSilence(2);       // until a connection must have asked for its session
constexpr int kPollMs = 500;                      // how often silent connections are looked for
constexpr uint64_t kPage = 4096;

std::string ErrnoText(int error) { return std::generic_category().message(error); }

absl::Status CannotListen(const std::string& path, const std::string& reason) {
  return absl::UnavailableError(absl::StrCat("session socket: wanted a path that can be bound, got ", path, ": ", reason));
}

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return CannotListen(path, absl::StrCat("a path has 1 to ", sizeof(address.sun_path) - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

// Removes the socket of a server that is gone.
absl::Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat info{};
  if (lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) return absl::AlreadyExistsError(absl::StrCat("session socket: ", path, " is another kind of file"));
  const int probe = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const bool answered = probe >= 0 && connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  if (probe >= 0) close(probe);
  if (answered) return absl::AlreadyExistsError(absl::StrCat("session socket: another server answers at ", path));
  unlink(path.c_str());
  return absl::OkStatus();
}

bool FillRandom(ring::SessionKey* key) { return getrandom(key->data(), key->size(), 0) == static_cast<ssize_t>(key->size()); }

std::string TokenOf(const ring::OpenRequest& request) {
  return std::string(request.token, strnlen(request.token, sizeof(request.token)));
}

void SetText(const absl::string_view text, char* out, size_t size) {
  out[text.copy(out, size - 1)] = 0;
}

}  // namespace

// A connection, and once it asked for one, its session.
struct Sessions::Session {
  steady_clock::time_point connected = steady_clock::now();
  ring::SessionKey key = {};
  std::shared_ptr<Region> region;
  std::unique_ptr<SessionRing> ring;
};

Sessions::Sessions(SessionOptions options) : options_(std::move(options)) {}

absl::StatusOr<std::unique_ptr<Sessions>> Sessions::Listen(SessionOptions options) {
  std::unique_ptr<Sessions> sessions(new Sessions(std::move(options)));
  if (absl::Status status = sessions->Bind(); !status.ok()) return status;
  sessions->thread_ = std::thread([raw = sessions.get()] {
    pthread_setname_np(pthread_self(), "sessions");  // as `top -H` shows it
    raw->ThreadMain();
  });
  return sessions;
}

absl::Status Sessions::Bind() {
  const absl::StatusOr<sockaddr_un> address = AddressOf(options_.path);
  if (!address.ok()) return address.status();
  if (absl::Status status = RemoveStale(options_.path, *address); !status.ok()) return status;
  if (!FillRandom(&server_id_)) return CannotListen(options_.path, "the system gives no random numbers");
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  listener_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (wake_ < 0 || listener_ < 0) return CannotListen(options_.path, ErrnoText(errno));
  // Nobody can connect between bind and listen, so there is no moment with other permissions.
  if (bind(listener_, reinterpret_cast<const sockaddr*>(&*address), sizeof(*address)) != 0 ||
      chmod(options_.path.c_str(), options_.mode) != 0 || listen(listener_, 64) != 0) {
    return CannotListen(options_.path, ErrnoText(errno));
  }
  return absl::OkStatus();
}

Sessions::~Sessions() {
  Stop();
  for (const int fd : {listener_, wake_}) {
    if (fd >= 0) close(fd);
  }
}

void Sessions::Wake() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_, &one, sizeof(one));  // fails only when it is awake anyway
}

void Sessions::StopAccepting() {
  std::lock_guard<std::mutex> lock(mutex_);
  accepting_ = false;
}

void Sessions::Stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  Wake();
  thread_.join();
  std::vector<int> open;
  for (const auto& [connection, session] : connections_) open.push_back(connection);
  for (const int connection : open) End(connection);
  unlink(options_.path.c_str());
}

absl::StatusOr<std::shared_ptr<Region>> Sessions::Find(const ring::SessionKey& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [connection, session] : connections_) {
    if (session->region != nullptr && session->key == key) return session->region;
  }
  return absl::NotFoundError("session_memory: no open session has this key");
}

Sessions::Counts Sessions::counts() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return counts_;
}

std::vector<int> Sessions::Watched() const {
  std::vector<int> watched = {wake_, listener_};
  for (const auto& [connection, session] : connections_) watched.push_back(connection);
  return watched;
}

void Sessions::ThreadMain() {
  for (;;) {
    std::vector<pollfd> polled;
    std::vector<std::pair<int, absl::Status>> abandoned;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      abandoned.swap(abandoned_);
      counts_.abandoned += abandoned.size();
    }
    for (const auto& [connection, why] : abandoned) End(connection);
    DropSilent();
    for (const int fd : Watched()) polled.push_back({fd, POLLIN, 0});
    if (poll(polled.data(), polled.size(), kPollMs) <= 0) continue;
    if (polled[0].revents != 0) {
      uint64_t ignored;
      [[maybe_unused]] const ssize_t got = read(wake_, &ignored, sizeof(ignored));
    }
    for (size_t i = 2; i < polled.size(); ++i) {
      if (polled[i].revents != 0) Serve(polled[i].fd);
    }
    if (polled[1].revents != 0) Accept();
  }
}

void Sessions::Accept() {
  const int connection = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (connection < 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  // Those that did not ask yet are few at any time, and short-lived.
  if (!accepting_ || connections_.size() >= 2 * static_cast<size_t>(options_.max_sessions) + 16) {
    ++counts_.refused;
    close(connection);
    return;
  }
  connections_[connection] = std::make_unique<Session>();
}

// A connection that has something to say. One that is open already has nothing to say but that it ends.
void Sessions::Serve(int connection) {
  const auto found = connections_.find(connection);
  if (found == connections_.end()) return;
  if (found->second->region != nullptr) return End(connection);
  OpenSession(connection);
}

void Sessions::OpenSession(int connection) {
  ring::OpenRequest request;
  int fd = -1;
  if (ring::ReceivePacket(connection, &request, sizeof(request), &fd) != 0) return End(connection);
  Session* const session = connections_.at(connection).get();
  absl::StatusOr<ring::SessionKey> key = Open(request, fd, session);
  if (fd >= 0) close(fd);
  absl::Status status = key.status();
  if (status.ok() && request.ring_slots > 0) status = StartRing(request, connection, session);
  ring::OpenAnswer answer;
  answer.server_id = server_id_;
  answer.code = static_cast<int32_t>(status.code());
  if (status.ok()) {
    answer.key = *key;
  } else {
    SetText(status.message(), answer.message, sizeof(answer.message));
  }
  const int error = ring::SendPacket(connection, &answer, sizeof(answer), -1);
  if (!status.ok() || error != 0) return End(connection);
}

absl::Status Sessions::CheckRequest(const ring::OpenRequest& request, int fd) const {
  if (request.magic != ring::kMagic) return absl::InvalidArgumentError("session: the request is none of this protocol");
  if (request.version != ring::kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("session: wanted version ", ring::kVersion, " of the shared-memory protocol, got ",
                                                      request.version));
  }
  if (options_.admit) {
    if (absl::Status status = options_.admit(TokenOf(request)); !status.ok()) return status;
  }
  if (fd < 0) return absl::InvalidArgumentError("session: wanted the descriptor of a region, got none");
  if (request.region_bytes == 0 || request.region_bytes % kPage != 0) {
    return absl::InvalidArgumentError(absl::StrCat("region: wanted a multiple of ", kPage, " bytes, got ", request.region_bytes));
  }
  const uint32_t slots = request.ring_slots;
  if (slots == 0) return absl::OkStatus();
  if (slots > ring::kMaxSlots || !std::has_single_bit(slots)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ring: wanted a power of two of slots, at most ", ring::kMaxSlots, ", got ", slots));
  }
  const uint64_t bytes = ring::RingBytes(slots), offset = request.ring_offset;
  if (offset % ring::kAlignment == 0 && offset <= request.region_bytes && bytes <= request.region_bytes - offset) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("ring: wanted ", bytes, " bytes within the ", request.region_bytes,
                                                 " of the region at a multiple of ", ring::kAlignment, ", got them at ", offset));
}

absl::StatusOr<ring::SessionKey> Sessions::Open(const ring::OpenRequest& request, int fd, Session* session) {
  absl::Status status = CheckRequest(request, fd);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (status.ok() && counts_.open >= options_.max_sessions) {
      status = absl::ResourceExhaustedError(absl::StrCat("session: ", counts_.open, " are open, ", options_.max_sessions, " may be"));
    }
    if (status.ok() && request.region_bytes > options_.max_bytes - std::min(counts_.bytes, options_.max_bytes)) {
      status = absl::ResourceExhaustedError(absl::StrCat("region: ", request.region_bytes, " bytes asked for, ", counts_.bytes, " of ",
                                                         options_.max_bytes, " are in use"));
    }
    if (!status.ok()) return ++counts_.refused, status;
  }
  absl::StatusOr<std::shared_ptr<Region>> region = Region::Map(fd, request.region_bytes);
  ring::SessionKey key;
  if (region.ok() && !FillRandom(&key)) {
    region = absl::InternalError("session: the system gives no random numbers");
  }
  if (region.ok() && options_.pin) (*region)->KeepPinned(options_.pin((*region)->memory()));
  std::lock_guard<std::mutex> lock(mutex_);
  if (!region.ok()) return ++counts_.refused, region.status();
  session->key = key;
  session->region = *std::move(region);
  ++counts_.open, ++counts_.opened;
  counts_.bytes += request.region_bytes;
  return key;
}

absl::Status Sessions::StartRing(const ring::OpenRequest& request, int connection, Session* session) {
  if (!options_.serve_ring) return absl::UnimplementedError("ring: this server serves none");
  const auto abandon = [this, connection](const absl::Status& why) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      abandoned_.emplace_back(connection, why);
    }
    Wake();
  };
  session->ring = options_.serve_ring(session->region, request.ring_offset, request.ring_slots, TokenOf(request), abandon);
  return absl::OkStatus();
}

// Forgets the session, then ends its ring; the region goes when no call uses it.
void Sessions::End(int connection) {
  std::unique_ptr<Session> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = connections_.find(connection);
    if (found == connections_.end()) return;
    ended = std::move(found->second);
    connections_.erase(found);
    std::erase_if(abandoned_, [connection](const auto& one) { return one.first == connection; });
    if (ended->region != nullptr) {
      --counts_.open;
      counts_.bytes -= ended->region->memory().size();
    }
  }
  ended->ring.reset();
  {
    std::lock_guard<std::mutex> lock(mutex_);  // the ring may have given up on its client as it ended
    std::erase_if(abandoned_, [connection](const auto& one) { return one.first == connection; });
  }
  close(connection);  // last: a new connection may get its number
}

void Sessions::DropSilent() {
  std::vector<int> silent;
  const steady_clock::time_point now = steady_clock::now();
  for (const auto& [connection, session] : connections_) {
    if (session->region == nullptr && now - session->connected > kSilence) silent.push_back(connection);
  }
  for (const int connection : silent) End(connection);
}

}  // namespace moed
