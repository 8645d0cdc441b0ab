// What `moectl doctor` judges, and how: from facts to verdicts. Pure: whoever gathers the facts is doctor_facts.h, so that a test
// can say anything about a machine.
#ifndef MOED_CLIENT_DOCTOR_CHECKS_H_
#define MOED_CLIENT_DOCTOR_CHECKS_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/moed_client.h"

namespace moed::client {

inline constexpr uint64_t kUnlimited = UINT64_MAX;

struct CertificateFacts {
  std::string what;              // "--tls-ca", "--tls-cert", "the server's certificate"
  absl::Status status;           // why it could not be read
  std::string subject;           // of the one that decides
  int64_t begins = 0, ends = 0;  // its validity, seconds since 1970
};

struct TokenFacts {
  std::string path;
  absl::Status status;  // why no token was found in it
  mode_t mode = 0;      // permissions
};

// Limits of a process.
struct LimitFacts {
  std::string whose;                 // "moed, process 12" or "this shell"
  uint64_t open_files = kUnlimited;  // soft limits
  uint64_t locked_bytes = kUnlimited;
};

// A model's layer through the server.
struct SelfCheckFacts {
  std::string model;
  int32_t layer = 0;
  absl::Status status;
  std::vector<SelfCheckRow> rows;
  double milliseconds = 0;
};

// A session of shared memory.
struct SessionFacts {
  bool same_host = false;  // the address says so
  std::string socket;      // empty: the server offers none
  absl::Status status;     // of opening one and of an empty call by its ring
  double round_trip_us = 0;
};

struct DoctorFacts {
  std::string version;  // of moectl
  int64_t now = 0;      // seconds since 1970
  // This host.
  LimitFacts limits;
  absl::Status memfd;      // whether sealed memory can be made
  std::string huge_pages;  // "always", "madvise", "never"; empty: unknown
  // How to the server.
  std::string address;
  absl::Status connection;  // what is wrong with the options of the connection
  absl::Status reach;       // of a bare connection to the address; the text says why not and what to do after a newline
  std::vector<CertificateFacts> certificates;
  std::optional<TokenFacts> token;
  // The server, where it answers.
  absl::Status hello_status;
  std::optional<ServerHello> hello;
  std::optional<Health> health;
  absl::Status status_status;
  std::optional<ServerStatus> status;
  std::optional<SelfCheckFacts> self_check;
  std::optional<SessionFacts> session;
};

enum class Verdict { kOk, kWarn, kFail };
// "ok", "warn", "fail".
const char* VerdictName(Verdict verdict);

struct DoctorCheck {
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string found, wanted;
  std::string fix;  // what to do, a sentence; empty when it is ok
};

// The checks that the facts allow, what concerns this host first. Without a server those of the server are left out.
std::vector<DoctorCheck> JudgeFacts(const DoctorFacts& facts);

// The worst of them; kOk without any.
Verdict Worst(const std::vector<DoctorCheck>& checks);

}  // namespace moed::client

#endif  // MOED_CLIENT_DOCTOR_CHECKS_H_
