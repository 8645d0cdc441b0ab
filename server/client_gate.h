// Who may call which plane, and how much of the server one client may hold.
//
// Threads: any. A method says its plane; what a plane wants is a token of its own file. The data plane is open without a file; the
// admin plane is open only where neither has one, so that a server which asks for tokens never lets a stranger change it.
//
// A client is, in this order, the subject of its TLS certificate where the server asks for one, its token where its plane wants
// one, and the host that it calls from; all clients of UNIX sockets without tokens are one.
#ifndef MOED_SERVER_CLIENT_GATE_H_
#define MOED_SERVER_CLIENT_GATE_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/client_limits.h"
#include "server/token_file.h"

namespace moed {

enum class Plane {
  kData,   // computes or reports
  kAdmin,  // changes the server
};

class ClientGate {
 public:
  struct Rules {
    std::string token_file, admin_token_file;  // empty: none
    bool client_certificates = false;          // TLS clients show verified ones
    int64_t client_rows = 0, client_bytes = 0;  // 0: no limit
  };

  // Errors start with the option that named the file (--token-file, --admin-token-file); otherwise as TokenFile::Open.
  static absl::StatusOr<std::unique_ptr<ClientGate>> Open(const Rules& rules, TokenFile::Clock clock);

  // UNAUTHENTICATED unless `context` carries what `plane` wants. The text says what is wrong with the header, and has none of it.
  absl::Status Admit(Plane plane, const grpc::ServerContextBase& context) const;

  // The same for the bearer of `token`, which came another way than in a header; "": none.
  absl::Status AdmitToken(Plane plane, std::string_view token) const;

  // The share of a call that was let in; nothing is taken yet. Empty where there are no limits.
  ClientShare ShareOf(Plane plane, const grpc::ServerContextBase& context);
  // The same for a client of a UNIX socket.
  ClientShare ShareOfToken(Plane plane, std::string_view token);

  size_t clients_in_flight() const { return limits_.clients(); }

 private:
  explicit ClientGate(const Rules& rules);
  std::string NameOf(Plane plane, const grpc::ServerContextBase& context) const;
  TokenFile* TokensOf(Plane plane) const { return plane == Plane::kData ? data_tokens_.get() : admin_tokens_.get(); }

  const bool client_certificates_;
  std::unique_ptr<TokenFile> data_tokens_, admin_tokens_;  // null: none
  ClientLimits limits_;
};

// The host of a peer as gRPC writes it ("ipv4:10.0.0.1:4711" is "ipv4:10.0.0.1"), "unix" for every UNIX socket.
std::string HostOfPeer(const std::string& peer);

}  // namespace moed

#endif  // MOED_SERVER_CLIENT_GATE_H_
