#include "client/doctor_facts.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "client/certificates.h"
#include "proto/ring/session.h"

namespace moed::client {
namespace {

using std::chrono::steady_clock;

constexpr int kSelfCheckTokens = 2;
constexpr int kRoundTrips = 20;
constexpr size_t kSessionBytes = 1 << 20;

uint64_t LimitOf(rlim_t limit) { return limit == RLIM_INFINITY ? kUnlimited : limit; }

// The soft limit of a line "NAME  SOFT  HARD  UNITS" of /proc/PID/limits; nothing when there is none.
std::optional<uint64_t> LimitIn(const std::string& text, const std::string& name) {
  const size_t at = text.find(name);
  if (at == std::string::npos) return std::nullopt;
  std::istringstream line(text.substr(at + name.size()));
  std::string soft;
  line >> soft;
  return soft == "unlimited" ? kUnlimited : std::strtoull(soft.c_str(), nullptr, 10);
}

// Of the server where its process is known, else of this one, which the same shell may have started.
LimitFacts LimitsOf(pid_t server) {
  if (server > 0) {
    std::ifstream file(absl::StrCat("/proc/", server, "/limits"));
    std::ostringstream text;
    text << file.rdbuf();
    const std::optional<uint64_t> files = LimitIn(text.str(), "Max open files"), locked = LimitIn(text.str(), "Max locked memory");
    if (files && locked) return {absl::StrCat("moed, process ", server), *files, *locked};
  }
  rlimit files{}, locked{};
  getrlimit(RLIMIT_NOFILE, &files);
  getrlimit(RLIMIT_MEMLOCK, &locked);
  return {"this shell", LimitOf(files.rlim_cur), LimitOf(locked.rlim_cur)};
}

absl::Status TryMemfd() {
  const int region = ring::MakeRegion(kSessionBytes);
  if (region < 0) return absl::UnavailableError(std::generic_category().message(errno));
  close(region);
  return absl::OkStatus();
}

// The word in brackets: "always [madvise] never".
std::string HugePages() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  std::getline(file, line);
  const size_t begin = line.find('['), end = line.find(']');
  return begin == std::string::npos || end == std::string::npos ? "" : line.substr(begin + 1, end - begin - 1);
}

CertificateFacts FactsOf(const std::string& what, const absl::StatusOr<Validity>& validity) {
  CertificateFacts facts{.what = what, .status = validity.status(), .subject = {}};
  if (validity.ok()) facts.subject = validity->subject, facts.begins = validity->begins, facts.ends = validity->ends;
  return facts;
}

std::optional<TokenFacts> TokenOf(const std::string& path) {
  if (path.empty()) return std::nullopt;
  TokenFacts facts{.path = path, .status = {}};
  struct stat found = {};
  if (stat(path.c_str(), &found) == 0) facts.mode = found.st_mode;
  // The client's own rules for the file; no connection is made.
  facts.status = MoeClient::Connect("127.0.0.1:1", {.token_file = path}).status();
  return facts;
}

bool SameHost(const std::string& address) {
  for (const char* prefix : {"unix:", "127.", "localhost:", "[::1]:"}) {
    if (address.rfind(prefix, 0) == 0) return true;
  }
  return false;
}

// Asks the server that answered Hello.
class ServerFacts {
 public:
  ServerFacts(const DoctorOptions& options, MoeClient* client, DoctorFacts* facts)
      : options_(options),
        client_(client),
        facts_(facts),
        quick_{.timeout = options.short_call} {}

  void Gather() {
    const absl::StatusOr<Health> health = client_->CheckHealth("", quick_);
    if (health.ok()) facts_->health = *health;
    absl::StatusOr<ServerStatus> status = client_->Status(options_.model, quick_);
    facts_->status_status = status.status();
    if (!status.ok()) return;
    facts_->status = *std::move(status);
    for (const ModelStatus& model : facts_->status->models) {
      const auto layer = std::find_if(model.layers.begin(), model.layers.end(),
                                      [](const LayerStatus& each) { return each.state == LayerState::kReady; });
      if (model.state != LayerState::kReady || layer == model.layers.end()) continue;
      SelfCheck(model.name, layer->layer);
      Session(model, layer->layer);
      return;
    }
  }

 private:
  void SelfCheck(const std::string& model, int32_t layer) {
    SelfCheckFacts check{.model = model, .layer = layer, .status = {}, .rows = {}};
    const auto begin = steady_clock::now();
    const absl::StatusOr<SelfCheckResult> result =
        client_->SelfCheck(model, layer, kSelfCheckTokens, 1, {.timeout = options_.self_check});
    check.milliseconds = std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
    check.status = result.status();
    if (result.ok()) check.rows = result->rows;
    facts_->self_check = std::move(check);
  }

  void Session(const ModelStatus& model, int32_t layer) {
    SessionFacts session{.same_host = SameHost(options_.server), .socket = facts_->hello->session_socket, .status = {}};
    if (session.same_host && !session.socket.empty()) {
      ClientOptions options = options_.connection;
      options.transport = Transport::kRing;
      options.session_bytes = kSessionBytes;
      const absl::StatusOr<std::unique_ptr<MoeClient>> client = MoeClient::Connect(options_.server, options);
      session.status = client.status();
      ForwardCall call;  // of no rows: the way alone
      call.model = model.name;
      call.layer = layer;
      call.hidden = {DType::kF32, 0, model.hidden, {}};
      for (int i = 0; i < kRoundTrips && session.status.ok(); ++i) {
        const auto begin = steady_clock::now();
        session.status = (*client)->Forward(call, quick_).status();
        const double took = std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
        // The first one opens the session.
        if (i > 0) session.round_trip_us = i == 1 ? took : std::min(session.round_trip_us, took);
      }
    }
    facts_->session = std::move(session);
  }

  const DoctorOptions& options_;
  MoeClient* const client_;
  DoctorFacts* const facts_;
  const CallOptions quick_;
};

void GatherWay(const DoctorOptions& options, DoctorFacts* facts) {
  const ClientOptions& given = options.connection;
  if (!given.tls_ca.empty()) facts->certificates.push_back(FactsOf("--tls-ca", FileValidity(given.tls_ca, PemKind::kAuthorities)));
  if (!given.tls_cert.empty()) facts->certificates.push_back(FactsOf("--tls-cert", FileValidity(given.tls_cert, PemKind::kChain)));
  facts->token = TokenOf(given.token_file);
  if (!facts->connection.ok()) return;
  const BareConnection bare = ConnectBare(options.server, options.short_call);
  facts->reach = bare.status;
  const bool tls = !given.tls_ca.empty() || !given.tls_cert.empty();
  if (tls && bare.status.ok()) facts->certificates.push_back(FactsOf("the server's certificate", PeerValidity(bare.socket)));
  if (bare.socket >= 0) close(bare.socket);
  facts->limits = LimitsOf(bare.server);
}

}  // namespace

DoctorFacts GatherFacts(const DoctorOptions& options) {
  DoctorFacts facts;
  facts.version = options.version;
  facts.now = std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  facts.address = options.server;
  facts.limits = LimitsOf(0);
  facts.memfd = TryMemfd();
  facts.huge_pages = HugePages();
  ClientOptions by_message = options.connection;
  by_message.transport = Transport::kRpc;
  const absl::StatusOr<std::unique_ptr<MoeClient>> client = MoeClient::Connect(options.server, by_message);
  facts.connection = client.status();
  GatherWay(options, &facts);
  if (!facts.connection.ok() || !facts.reach.ok()) return facts;
  const absl::StatusOr<ServerHello> hello = (*client)->Hello({.timeout = options.short_call});
  facts.hello_status = hello.status();
  if (!hello.ok()) return facts;
  facts.hello = *hello;
  ServerFacts(options, client->get(), &facts).Gather();
  return facts;
}

}  // namespace moed::client
