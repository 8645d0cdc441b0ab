// When certificates are valid: those in a PEM file, and the one that a server shows. Needs OpenSSL; no state.
#ifndef MOED_CLIENT_CERTIFICATES_H_
#define MOED_CLIENT_CERTIFICATES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed::client {

struct Validity {
  std::string subject;
  int64_t begins = 0, ends = 0;  // seconds since 1970
};

// What a file of several certificates is: links of a chain, all of which are needed, or authorities, any of which may do.
enum class PemKind { kChain, kAuthorities };

// Of the certificate in the file that ends first, of authorities last. NOT_FOUND when it cannot be read, INVALID_ARGUMENT when it
// has no certificate.
absl::StatusOr<Validity> FileValidity(const std::string& path, PemKind kind);

// Of the certificate that whoever listens at the other end of the connected TCP socket `connection` shows, without believing it.
// UNAVAILABLE when it does not talk TLS. The socket is used up but stays open; give it time limits before.
absl::StatusOr<Validity> PeerValidity(int connection);

}  // namespace moed::client

#endif  // MOED_CLIENT_CERTIFICATES_H_
