#include "server/security.h"

#include <chrono>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/address.h"
#include "server/client_gate.h"
#include "server/tls.h"

namespace moed {
namespace {

// Options that make no sense without each other, or together.
absl::Status CheckTogether(const ServeOptions& options) {
  const bool cert = !options.tls_cert.empty(), key = !options.tls_key.empty();
  if (cert != key) {
    return absl::InvalidArgumentError(absl::StrCat("--tls-", cert ? "cert" : "key", ": wanted --tls-", cert ? "key" : "cert",
                                                   " with it, got none"));
  }
  if (!options.tls_client_ca.empty() && !cert) {
    return absl::InvalidArgumentError("--tls-client-ca: wanted --tls-cert and --tls-key with it, got neither");
  }
  if (options.channelz && !options.token_file.empty()) {
    return absl::InvalidArgumentError(
        "--channelz: gRPC's own service cannot ask for tokens: wanted it without --token-file, got both");
  }
  return absl::OkStatus();
}

absl::Status CheckReach(const ServeOptions& options, const std::string& option, const std::string& address) {
  const absl::StatusOr<bool> local = StaysOnThisMachine(option, address);
  if (!local.ok()) return local.status();
  if (*local || !options.tls_cert.empty() || options.allow_insecure) return absl::OkStatus();
  const bool tokens = !options.token_file.empty() || !options.admin_token_file.empty();
  return absl::InvalidArgumentError(absl::StrCat(
      option, ": wanted loopback or a unix:PATH for clear text, got ", address, ", which other machines can reach",
      tokens ? "; they would see the tokens" : "",
      "\nencrypt it: --tls-cert FILE --tls-key FILE, with --tls-client-ca FILE for clients that show certificates",
      "\nor keep it on this machine: ", option, " 127.0.0.1:PORT or unix:PATH",
      "\nor take the risk: --allow-insecure"));
}

}  // namespace

absl::Status CheckSecurity(const ServeOptions& options) {
  if (absl::Status status = CheckTogether(options); !status.ok()) return status;
  for (const std::string& address : options.listen) {
    if (absl::Status status = CheckReach(options, "--listen", address); !status.ok()) return status;
  }
  if (!options.admin_listen.empty()) {
    if (absl::Status status = CheckReach(options, "--admin-listen", options.admin_listen); !status.ok()) return status;
    if (!options.token_file.empty() && options.admin_token_file.empty()) {
      return absl::InvalidArgumentError(
          "--admin-listen: wanted --admin-token-file with it where --token-file guards the calls, got none");
    }
  }
  if (!options.tls_cert.empty()) {
    const auto read = ReadTls({options.tls_cert, options.tls_key, options.tls_client_ca});
    if (!read.ok()) return read.status();
  }
  ClientGate::Rules rules;
  rules.token_file = options.token_file;
  rules.admin_token_file = options.admin_token_file;
  return ClientGate::Open(rules, [] { return std::chrono::steady_clock::now(); }).status();
}

std::vector<std::string> SecurityWarnings(const ServeOptions& options) {
  std::vector<std::string> warnings;
  for (const std::string& address : options.listen) {
    const absl::StatusOr<bool> local = StaysOnThisMachine("--listen", address);
    if (!local.ok() || *local) continue;
    if (options.tls_cert.empty()) {
      warnings.push_back(absl::StrCat("--allow-insecure: what goes to and from ", address, " is in clear text"));
    }
    if (options.tls_client_ca.empty() && options.token_file.empty()) {
      warnings.push_back(absl::StrCat("whoever reaches ", address, " may call: there is neither --tls-client-ca nor --token-file"));
    }
  }
  return warnings;
}

}  // namespace moed
