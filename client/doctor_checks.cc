#include "client/doctor_checks.h"

#include <algorithm>
#include <cmath>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/table.h"

namespace moed::client {
namespace {

constexpr uint64_t kWantedFiles = 4096;                 // each connection, session and shard of a checkpoint takes one
constexpr uint64_t kWantedLocked = uint64_t{4} << 30;   // what all sessions together may pin by default
constexpr int64_t kWantedMessage = int64_t{256} << 20;  // what clients allow
constexpr int64_t kDay = 86'400, kSoon = 14 * kDay;     // until a certificate ends
constexpr uint64_t kWantedGpu = uint64_t{1} << 30;      // free beside what is loaded
constexpr double kSlowRing = 1000;                      // microseconds

class Judge {
 public:
  explicit Judge(const DoctorFacts& facts) : facts_(facts) {}

  std::vector<DoctorCheck> All() {
    Host();
    Way();
    if (facts_.hello) {
      Versions();
      Models();
      SelfCheck();
      Session();
      Machine();
    }
    return std::move(checks_);
  }

 private:
  // `fix` is told only where the verdict is not ok.
  void Add(std::string name, Verdict verdict, std::string found, std::string wanted, std::string fix) {
    if (verdict == Verdict::kOk) fix.clear();
    checks_.push_back({std::move(name), verdict, std::move(found), std::move(wanted), std::move(fix)});
  }
  static Verdict OkOr(bool ok, Verdict otherwise) { return ok ? Verdict::kOk : otherwise; }
  // "CODE: text" of an error, its first line.
  static std::string Text(const absl::Status& status) {
    const std::string text(status.message());
    return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", text.substr(0, text.find('\n')));
  }

  void Host();
  void Way();
  void Reach();
  void Certificate(const CertificateFacts& certificate);
  void Token(const TokenFacts& token);
  void Versions();
  void Models();
  void Model(const ModelStatus& model);
  void SelfCheck();
  void Session();
  void Machine();
  void Gpu(const HostStatus& host);

  const DoctorFacts& facts_;
  std::vector<DoctorCheck> checks_;
};

std::string LimitText(uint64_t limit, bool bytes) {
  if (limit == kUnlimited) return "unlimited";
  return bytes ? BytesText(static_cast<double>(limit)) : absl::StrCat(limit);
}

std::string DateText(int64_t seconds) {
  const time_t time = seconds;
  tm parts{};
  gmtime_r(&time, &parts);
  return absl::StrFormat("%04d-%02d-%02d", parts.tm_year + 1900, parts.tm_mon + 1, parts.tm_mday);
}

void Judge::Host() {
  const LimitFacts& limits = facts_.limits;
  Add(absl::StrCat("open files (", limits.whose, ")"), OkOr(limits.open_files >= kWantedFiles, Verdict::kWarn),
      LimitText(limits.open_files, false), absl::StrCat(">= ", kWantedFiles),
      "Raise the limit where moed starts: ulimit -n 65536, or LimitNOFILE=65536 in its unit.");
  const bool gpu = facts_.status && !facts_.status->host.gpu.empty();
  if (gpu) {
    Add(absl::StrCat("locked memory (", limits.whose, ")"), OkOr(limits.locked_bytes >= kWantedLocked, Verdict::kWarn),
        LimitText(limits.locked_bytes, true), absl::StrCat(">= ", LimitText(kWantedLocked, true), " for a GPU"),
        "Raise the limit where moed starts: ulimit -l unlimited, or LimitMEMLOCK=infinity in its unit.");
  }
  Add("shared memory", OkOr(facts_.memfd.ok(), Verdict::kWarn), facts_.memfd.ok() ? "can be made" : Text(facts_.memfd),
      "memfd that can be sealed", "Let the sandbox allow memfd_create and give it memory; until then calls travel as messages.");
  const std::string& pages = facts_.huge_pages;
  Add("transparent huge pages", OkOr(pages == "always" || pages == "madvise" || pages.empty(), Verdict::kWarn),
      pages.empty() ? "unknown" : pages, "madvise or always",
      "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, so that weights lie in large pages.");
}

void Judge::Way() {
  Add("connection options", OkOr(facts_.connection.ok(), Verdict::kFail),
      facts_.connection.ok() ? "complete" : Text(facts_.connection), "an address and readable files",
      "Correct the option that is named, see moectl --help.");
  for (const CertificateFacts& certificate : facts_.certificates) Certificate(certificate);
  if (facts_.token) Token(*facts_.token);
  if (facts_.connection.ok()) Reach();
}

void Judge::Certificate(const CertificateFacts& certificate) {
  if (!certificate.status.ok()) {
    return Add(certificate.what, Verdict::kFail, Text(certificate.status), "a certificate",
               "Name a certificate that can be read, or call the server as it listens: with these options the connection is TLS.");
  }
  const bool ended = certificate.ends < facts_.now;
  const bool early = certificate.begins > facts_.now;
  const bool soon = certificate.ends - facts_.now < kSoon;
  Add(certificate.what, ended || early ? Verdict::kFail : OkOr(!soon, Verdict::kWarn),
      absl::StrCat(certificate.subject, ", ", DateText(certificate.begins), " to ", DateText(certificate.ends)),
      absl::StrCat("valid today and for ", kSoon / kDay, " days"),
      early ? "It is not valid yet: look at the clock, or wait." : "Issue a new one; moed takes replaced files without a restart.");
}

void Judge::Token(const TokenFacts& token) {
  if (!token.status.ok()) {
    return Add("token file", Verdict::kFail, Text(token.status), "a readable file with a token",
               "Let --token-file name a file that this user may read, with a token of 16 to 255 characters on its first line.");
  }
  Add("token file", OkOr((token.mode & 077) == 0, Verdict::kWarn), absl::StrFormat("%s, mode %04o", token.path, token.mode & 07777),
      "readable by its owner alone", absl::StrCat("chmod 600 ", token.path));
}

void Judge::Reach() {
  if (!facts_.reach.ok()) {
    const std::string text(facts_.reach.message());
    const size_t line = text.find('\n');
    return Add(
        "address", Verdict::kFail, absl::StrCat(facts_.address, ": ", text.substr(0, line)), "a server that listens",
        line == std::string::npos ? "Start moed with this --listen, or name its address by --server." : text.substr(line + 1));
  }
  Add("address", Verdict::kOk, absl::StrCat(facts_.address, ": connected"), "a server that listens", "");
  if (facts_.hello) return;
  std::string fix = "See that a moed of this version listens there, and its log.";
  if (absl::IsUnauthenticated(facts_.hello_status)) fix = "Give a token that is in the server's --token-file: --token-file FILE.";
  if (absl::IsUnavailable(facts_.hello_status)) {
    fix = "Something listens but does not talk to this client: give --tls-ca where the server has TLS, and none where it has not.";
  }
  if (absl::IsFailedPrecondition(facts_.hello_status)) fix = "Install moectl of the server's version.";
  Add("server", Verdict::kFail, Text(facts_.hello_status), "an answer to Hello", fix);
}

void Judge::Versions() {
  const ServerHello& hello = *facts_.hello;
  Add("version", OkOr(hello.version == facts_.version, Verdict::kWarn),
      absl::StrCat("moectl ", facts_.version, ", moed ", hello.version, ", protocol ", hello.protocol), "the same version",
      absl::StrCat("Install moectl ", hello.version, "; the two talk to each other meanwhile."));
  Add("message limit", OkOr(hello.max_message_bytes >= kWantedMessage, Verdict::kWarn),
      BytesText(static_cast<double>(hello.max_message_bytes)), absl::StrCat(">= ", BytesText(static_cast<double>(kWantedMessage))),
      "Larger calls are refused: send fewer rows at once.");
}

void Judge::Models() {
  if (facts_.health) {
    Add("health", OkOr(*facts_.health == Health::kServing, Verdict::kFail), HealthName(*facts_.health), "SERVING",
        "Wait until the models are loaded; if they are, moed drains or a layer failed: see the models below and the log.");
  }
  if (!facts_.status) {
    return Add("models", Verdict::kFail, Text(facts_.status_status), "the models' states",
               absl::IsNotFound(facts_.status_status) ? "Name one of the served models by --model." : "See the server's log.");
  }
  if (facts_.status->models.empty()) {
    Add("models", Verdict::kWarn, "none", "at least one", "Load one: moectl --server ADMIN load NAME PATH.");
  }
  for (const ModelStatus& model : facts_.status->models) Model(model);
}

void Judge::Model(const ModelStatus& model) {
  int ready = 0, notes = 0;
  std::string note;
  for (const LayerStatus& layer : model.layers) {
    ready += layer.state == LayerState::kReady;
    if (layer.note.empty()) continue;
    if (++notes == 1) note = absl::StrCat("layer ", layer.layer, ": ", layer.note);
  }
  const int layers = static_cast<int>(model.layers.size());
  std::string found = absl::StrCat(LayerStateName(model.state), ", ", ready, " of ", layers, " layers ready");
  std::string fix = "Wait: it is being loaded.";
  Verdict verdict = OkOr(model.state == LayerState::kReady && ready == layers, Verdict::kWarn);
  if (model.state == LayerState::kFailed) {
    verdict = Verdict::kFail;
    absl::StrAppend(&found, "; ", model.error);
    fix = "Correct what the error names and start moed again, or swap the model.";
  } else if (verdict == Verdict::kOk && notes > 0) {
    verdict = Verdict::kWarn;
    absl::StrAppend(&found, "; ", notes, " with a note, ", note);
    fix = "moectl explain tells which backend each layer has and why not another.";
  }
  Add(absl::StrCat("model ", model.name), verdict, found, "ready", fix);
}

void Judge::SelfCheck() {
  if (!facts_.self_check) return;
  const SelfCheckFacts& check = *facts_.self_check;
  const std::string name = absl::StrCat("self-check of ", check.model, "/", check.layer);
  if (!check.status.ok()) {
    const bool busy = absl::IsResourceExhausted(check.status) || absl::IsDeadlineExceeded(check.status);
    return Add(name, busy ? Verdict::kWarn : Verdict::kFail, Text(check.status), "a passed check",
               busy ? "The server is busy: try again, with a larger --timeout." : "See the server's log.");
  }
  bool passed = !check.rows.empty();
  std::string found;
  for (const SelfCheckRow& row : check.rows) {
    passed &= row.passed;
    absl::StrAppend(&found, found.empty() ? "" : "; ", row.backend, ", ", absl::StrFormat("%.2g of %.2g", row.max_rel, row.bound));
  }
  Add(name, OkOr(passed, Verdict::kFail), absl::StrCat(found, absl::StrFormat(", %.0f ms", check.milliseconds)), "within the bound",
      "The results are wrong: start moed with --policy that names another backend, and report this.");
}

void Judge::Session() {
  if (!facts_.session || !facts_.session->same_host) return;
  const SessionFacts& session = *facts_.session;
  if (session.socket.empty()) {
    return Add("session", Verdict::kWarn, "the server offers none", "shared memory for a client of its host",
               "Start moed without --session-socket none; until then calls travel as messages.");
  }
  if (!session.status.ok()) {
    return Add("session", Verdict::kWarn, Text(session.status), "a session and a call by its ring",
               absl::StrCat("Run as the server's user, with the folder of ", session.socket,
                            " in reach; until then calls travel as messages."));
  }
  Add("session", OkOr(session.round_trip_us <= kSlowRing, Verdict::kWarn),
      absl::StrFormat("%s, an empty call takes %.0f us", session.socket, session.round_trip_us),
      absl::StrFormat("<= %.0f us", kSlowRing),
      "The processors are busy, or fewer than client and server need: leave some to each.");
}

void Judge::Machine() {
  if (!facts_.status || facts_.status->host.threads == 0) return;
  const HostStatus& host = facts_.status->host;
  const double processors = host.cpu_quota > 0 ? std::min<double>(host.cpu_quota, host.processors) : host.processors;
  const int most = std::max(1, static_cast<int>(std::floor(processors)));
  Add("threads", OkOr(host.threads <= most, Verdict::kWarn),
      absl::StrFormat("%d, %d processors, quota %s", host.threads, host.processors,
                      host.cpu_quota > 0 ? absl::StrFormat("%.2g", host.cpu_quota) : std::string("none")),
      absl::StrCat("<= ", most),
      absl::StrCat("Start moed with --threads ", most, ", or raise the quota: threads beyond it stop all others."));
  const bool several = host.numa_nodes.size() > 1;
  Add("memory nodes", OkOr(!several || host.pinned, Verdict::kWarn),
      host.numa_nodes.empty() ? "unknown"
                              : absl::StrCat(host.numa_nodes.size(), host.pinned ? ", threads pinned" : ", threads not pinned"),
      "one, or pinned threads", "Start moed with --pin-threads, or one moed on each node by numactl.");
  Gpu(host);
}

void Judge::Gpu(const HostStatus& host) {
  if (host.gpu.empty()) return;
  Add("GPU", OkOr(host.gpu_free_bytes >= kWantedGpu, Verdict::kWarn),
      absl::StrCat(host.gpu, ", ", BytesText(static_cast<double>(host.gpu_free_bytes)), " free"),
      absl::StrCat(">= ", BytesText(static_cast<double>(kWantedGpu)), " free"),
      "Swaps and larger calls want memory: stop what else uses the GPU, or serve fewer models.");
}

}  // namespace

const char* VerdictName(Verdict verdict) {
  switch (verdict) {
    case Verdict::kOk: return "ok";
    case Verdict::kWarn: return "warn";
    case Verdict::kFail: return "fail";
  }
  return "fail";
}

std::vector<DoctorCheck> JudgeFacts(const DoctorFacts& facts) { return Judge(facts).All(); }

Verdict Worst(const std::vector<DoctorCheck>& checks) {
  Verdict worst = Verdict::kOk;
  for (const DoctorCheck& check : checks) worst = std::max(worst, check.verdict);
  return worst;
}

}  // namespace moed::client
