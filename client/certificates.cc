#include "client/certificates.h"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <ctime>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"

namespace moed::client {
namespace {

struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(SSL* connection) const { SSL_free(connection); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

int64_t Seconds(const ASN1_TIME* time) {
  tm parts{};
  return ASN1_TIME_to_tm(time, &parts) == 1 ? static_cast<int64_t>(timegm(&parts)) : 0;
}

Validity ValidityOf(X509* certificate) {
  char name[256] = "";
  X509_NAME_oneline(X509_get_subject_name(certificate), name, sizeof(name));
  return {name, Seconds(X509_get0_notBefore(certificate)), Seconds(X509_get0_notAfter(certificate))};
}

}  // namespace

absl::StatusOr<Validity> FileValidity(const std::string& path, PemKind kind) {
  const Owned<BIO> bio(BIO_new_file(path.c_str(), "r"));
  ERR_clear_error();
  if (bio == nullptr) return absl::NotFoundError(absl::StrCat("wanted a readable file, got '", path, "'"));
  std::optional<Validity> decides;
  for (;;) {
    const Owned<X509> one(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (one == nullptr) break;
    const Validity validity = ValidityOf(one.get());
    if (!decides || (kind == PemKind::kChain ? validity.ends < decides->ends : validity.ends > decides->ends)) decides = validity;
  }
  ERR_clear_error();
  if (decides) return *decides;
  return absl::InvalidArgumentError(absl::StrCat("wanted a PEM certificate, got none in ", path));
}

absl::StatusOr<Validity> PeerValidity(int connection) {
  const Owned<SSL_CTX> context(SSL_CTX_new(TLS_client_method()));
  const Owned<SSL> tls(context == nullptr ? nullptr : SSL_new(context.get()));
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  if (tls == nullptr || SSL_set_alpn_protos(tls.get(), kHttp2, sizeof(kHttp2)) != 0 || SSL_set_fd(tls.get(), connection) != 1) {
    return absl::InternalError("OpenSSL makes no connection");
  }
  // A server that wants the client's certificate ends the connection, but shows its own first.
  const int connected = SSL_connect(tls.get());
  const Owned<X509> certificate(SSL_get1_peer_certificate(tls.get()));
  const unsigned long code = ERR_peek_last_error();  // NOLINT: OpenSSL's type
  ERR_clear_error();
  if (certificate != nullptr) return ValidityOf(certificate.get());
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return absl::UnavailableError(
      absl::StrCat("wanted a server with TLS, got ", reason == nullptr ? "none" : reason, " (", connected, ")"));
}

}  // namespace moed::client
