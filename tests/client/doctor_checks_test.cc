// The judgement of `moectl doctor` on invented facts: what is right is ok without a fix; each thing that is wrong changes the
// verdict of its own check alone, with the numbers and a fix.
#include <catch2/catch.hpp>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "client/doctor_checks.h"

namespace moed::testing {
namespace {

using client::DoctorCheck;
using client::DoctorFacts;
using client::Verdict;

constexpr int64_t kNow = 1'800'000'000, kDay = 86'400;

// A server on this host with nothing wrong.
DoctorFacts Healthy() {
  DoctorFacts facts;
  facts.version = "1.2.3";
  facts.now = kNow;
  facts.limits = {"moed, process 12", 65'536, client::kUnlimited};
  facts.huge_pages = "madvise";
  facts.address = "127.0.0.1:50061";
  facts.certificates = {{"--tls-ca", {}, "/CN=ca", kNow - kDay, kNow + 100 * kDay}};
  facts.token = client::TokenFacts{"/etc/token", {}, 0100600};
  facts.hello = client::ServerHello{1, "1.2.3", int64_t{256} << 20, "/run/moed/session"};
  facts.health = client::Health::kServing;
  client::ServerStatus status;
  client::ModelStatus model;
  model.name = "m";
  model.state = client::LayerState::kReady;
  for (int layer = 0; layer < 3; ++layer) {
    model.layers.emplace_back();
    model.layers.back().layer = layer, model.layers.back().state = client::LayerState::kReady;
  }
  status.models.push_back(model);
  status.host = {.threads = 8,
                 .threads_limit = "affinity",
                 .pinned = false,
                 .processors = 8,
                 .cpu_quota = 0,
                 .numa_nodes = {0},
                 .gpu = "H200",
                 .gpu_free_bytes = uint64_t{8} << 30};
  facts.status = status;
  client::SelfCheckFacts check;
  check.model = "m";
  client::SelfCheckRow row;
  row.passed = true, row.backend = "cpu_amx";
  check.rows.push_back(row);
  facts.self_check = check;
  client::SessionFacts session;
  session.same_host = true, session.socket = "/run/moed/session", session.round_trip_us = 20;
  facts.session = session;
  return facts;
}

const DoctorCheck* Find(const std::vector<DoctorCheck>& checks, const std::string& name) {
  const auto found =
      std::find_if(checks.begin(), checks.end(), [&](const DoctorCheck& each) { return each.name.rfind(name, 0) == 0; });
  return found == checks.end() ? nullptr : &*found;
}

struct Case {
  std::string name;  // of the check
  Verdict verdict;
  std::string text;  // in what was found, or in the fix
  std::function<void(DoctorFacts*)> change;
};

void CheckCases(const std::vector<Case>& cases) {
  for (const Case& each : cases) {
    DoctorFacts facts = Healthy();
    each.change(&facts);
    const std::vector<DoctorCheck> checks = client::JudgeFacts(facts);
    const DoctorCheck* check = Find(checks, each.name);
    CAPTURE(each.name, each.text);
    REQUIRE(check != nullptr);
    INFO("found: " << check->found << "; fix: " << check->fix);
    CHECK(check->verdict == each.verdict);
    CHECK((check->found + " / " + check->fix).find(each.text) != std::string::npos);
    CHECK_FALSE(check->fix.empty());
    for (const DoctorCheck& other : checks) {
      if (&other != check) CHECK(other.verdict == Verdict::kOk);
    }
    CHECK(client::Worst(checks) == each.verdict);
  }
}

}  // namespace

TEST_CASE("Nothing wrong is ok everywhere, and nothing is to be done") {
  const std::vector<DoctorCheck> checks = client::JudgeFacts(Healthy());
  CHECK(client::Worst(checks) == Verdict::kOk);
  for (const DoctorCheck& check : checks) {
    INFO(check.name << ": " << check.found);
    CHECK(check.verdict == Verdict::kOk);
    CHECK(check.fix.empty());
    CHECK_FALSE(check.found.empty());
    CHECK_FALSE(check.wanted.empty());
  }
  for (const char* name :
       {"open files", "locked memory", "shared memory", "transparent huge pages", "--tls-ca", "token file", "address", "version",
        "message limit", "health", "model m", "self-check", "session", "threads", "memory nodes", "GPU"}) {
    CAPTURE(name);
    CHECK(Find(checks, name) != nullptr);
  }
}

TEST_CASE("What is wrong with the host and the way is told by its own check") {
  CheckCases({
      {"open files", Verdict::kWarn, "1024", [](auto* f) { f->limits.open_files = 1024; }},
      {"locked memory", Verdict::kWarn, "64.0 KiB", [](auto* f) { f->limits.locked_bytes = 65'536; }},
      {"shared memory", Verdict::kWarn, "UNAVAILABLE: no", [](auto* f) { f->memfd = absl::UnavailableError("no"); }},
      {"transparent huge pages", Verdict::kWarn, "never", [](auto* f) { f->huge_pages = "never"; }},
      {"--tls-ca", Verdict::kFail, "Issue a new one", [](auto* f) { f->certificates[0].ends = kNow - 1; }},
      {"--tls-ca", Verdict::kWarn, "Issue a new one", [](auto* f) { f->certificates[0].ends = kNow + 3 * kDay; }},
      {"--tls-ca", Verdict::kFail, "clock", [](auto* f) { f->certificates[0].begins = kNow + 60; }},
      {"--tls-ca", Verdict::kFail, "no PEM", [](auto* f) { f->certificates[0].status = absl::InvalidArgumentError("no PEM"); }},
      {"token file", Verdict::kWarn, "chmod 600 /etc/token", [](auto* f) { f->token->mode = 0100640; }},
      {"token file", Verdict::kFail, "NOT_FOUND", [](auto* f) { f->token->status = absl::NotFoundError("none"); }},
  });
}

TEST_CASE("What is wrong with the server is told by its own check") {
  const auto model = [](DoctorFacts* f) -> client::ModelStatus& { return f->status->models[0]; };
  CheckCases({
      {"version", Verdict::kWarn, "moed 1.2.4", [](auto* f) { f->hello->version = "1.2.4"; }},
      {"message limit", Verdict::kWarn, "4.0 MiB", [](auto* f) { f->hello->max_message_bytes = 4 << 20; }},
      {"health", Verdict::kFail, "NOT_SERVING", [](auto* f) { f->health = client::Health::kNotServing; }},
      {"models", Verdict::kWarn, "none", [](auto* f) { f->status->models.clear(); }},
      {"model m", Verdict::kWarn, "loading, 2 of 3",
       [&](auto* f) { model(f).state = client::LayerState::kLoading, model(f).layers[1].state = client::LayerState::kLoading; }},
      {"model m", Verdict::kFail, "lost", [&](auto* f) { model(f).state = client::LayerState::kFailed, model(f).error = "lost"; }},
      {"model m", Verdict::kWarn, "layer 2: quarantined", [&](auto* f) { model(f).layers[2].note = "quarantined"; }},
      {"self-check", Verdict::kFail, "cpu_amx", [](auto* f) { f->self_check->rows[0].passed = false; }},
      {"self-check", Verdict::kFail, "INTERNAL", [](auto* f) { f->self_check->status = absl::InternalError("x"); }},
      {"self-check", Verdict::kWarn, "busy", [](auto* f) { f->self_check->status = absl::ResourceExhaustedError("x"); }},
      {"session", Verdict::kWarn, "none", [](auto* f) { f->session->socket.clear(); }},
      {"session", Verdict::kWarn, "Permission", [](auto* f) { f->session->status = absl::UnavailableError("Permission denied"); }},
      {"session", Verdict::kWarn, "5000 us", [](auto* f) { f->session->round_trip_us = 5000; }},
      {"threads", Verdict::kWarn, "--threads 2", [](auto* f) { f->status->host.cpu_quota = 2.5; }},
      {"threads", Verdict::kWarn, "--threads 4", [](auto* f) { f->status->host.processors = 4; }},
      {"memory nodes", Verdict::kWarn, "--pin-threads",
       [](auto* f) {
         f->status->host.numa_nodes = {0, 1};
       }},
      {"GPU", Verdict::kWarn, "100.0 MiB", [](auto* f) { f->status->host.gpu_free_bytes = 100 << 20; }},
  });
}

TEST_CASE("Without a server only this host and the way are judged, and the way's fix is that of its reason") {
  DoctorFacts facts = Healthy();
  facts.hello.reset(), facts.status.reset(), facts.health.reset(), facts.self_check.reset(), facts.session.reset();
  facts.reach = absl::UnavailableError("Connection refused\nStart it.");
  std::vector<DoctorCheck> checks = client::JudgeFacts(facts);
  CHECK(Find(checks, "address")->verdict == Verdict::kFail);
  CHECK(Find(checks, "address")->found == "127.0.0.1:50061: Connection refused");
  CHECK(Find(checks, "address")->fix == "Start it.");
  CHECK(Find(checks, "version") == nullptr);
  facts.reach = absl::OkStatus();
  facts.hello_status = absl::UnauthenticatedError("no token");
  checks = client::JudgeFacts(facts);
  CHECK(Find(checks, "address")->verdict == Verdict::kOk);
  CHECK(Find(checks, "server")->verdict == Verdict::kFail);
  CHECK(Find(checks, "server")->fix.find("--token-file") != std::string::npos);
  facts.connection = absl::InvalidArgumentError("address \"x\"");
  checks = client::JudgeFacts(facts);
  CHECK(Find(checks, "connection options")->verdict == Verdict::kFail);
  CHECK(Find(checks, "address") == nullptr);
}

TEST_CASE("A client of another host is not told about sessions") {
  DoctorFacts facts = Healthy();
  facts.session->same_host = false, facts.session->socket.clear();
  CHECK(Find(client::JudgeFacts(facts), "session") == nullptr);
}

}  // namespace moed::testing
