#include "server/tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/text_file.h"
#include "server/address.h"

namespace moed {
namespace {

constexpr uint64_t kMaxFile = 1 << 20;  // bytes; bundles of authorities are a quarter of it

// Frees what OpenSSL made.
struct Free {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

// OpenSSL's reason for the failure just now; clears what else it remembers of it.
std::string LastReason() {
  const unsigned long code = ERR_peek_last_error();  // NOLINT: OpenSSL's type
  ERR_clear_error();
  const char* reason = code == 0 ? nullptr : ERR_reason_error_string(code);
  return reason == nullptr ? "OpenSSL does not say why" : reason;
}

absl::Status BadFile(const std::string& option, const std::string& path, const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(option, ": wanted ", wanted, " in ", path, ", got ", got));
}

absl::StatusOr<std::string> Read(const std::string& option, const std::string& path) {
  absl::StatusOr<std::string> text = ReadTextFile(path, kMaxFile);
  if (text.ok()) return text;
  return absl::Status(text.status().code(), absl::StrCat(option, ": ", text.status().message()));
}

// Certificates of a PEM text, at least one.
absl::StatusOr<std::vector<Owned<X509>>> ParseCertificates(const std::string& option, const std::string& path,
                                                           const std::string& text) {
  const Owned<BIO> bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
  std::vector<Owned<X509>> certificates;
  for (;;) {
    ERR_clear_error();
    Owned<X509> one(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (one == nullptr) break;
    certificates.push_back(std::move(one));
  }
  const bool ended = ERR_GET_REASON(ERR_peek_last_error()) == PEM_R_NO_START_LINE;
  const std::string reason = LastReason();
  if (!ended) {
    return BadFile(option, path, "PEM certificates", absl::StrCat("a broken one after ", certificates.size(), ": ", reason));
  }
  if (certificates.empty()) return BadFile(option, path, "at least one PEM certificate", "none");
  return certificates;
}

// OpenSSL would ask on the terminal for the passphrase of a key that has one.
int NoPassphrase(char*, int, int, void* asked) {
  *static_cast<bool*>(asked) = true;
  return -1;
}

absl::StatusOr<Owned<EVP_PKEY>> ParseKey(const std::string& path, const std::string& text) {
  const Owned<BIO> bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
  bool asked = false;
  ERR_clear_error();
  Owned<EVP_PKEY> key(PEM_read_bio_PrivateKey(bio.get(), nullptr, NoPassphrase, &asked));
  const std::string reason = LastReason();
  if (asked) return BadFile("--tls-key", path, "a PEM private key without a passphrase", "one with a passphrase");
  if (key == nullptr) return BadFile("--tls-key", path, "a PEM private key", reason);
  return key;
}

absl::Status CheckDates(const TlsPaths& paths, const X509& certificate) {
  if (X509_cmp_current_time(X509_get0_notAfter(&certificate)) < 0) {
    return BadFile("--tls-cert", paths.cert, "a certificate that is valid now", "one that has expired");
  }
  if (X509_cmp_current_time(X509_get0_notBefore(&certificate)) > 0) {
    return BadFile("--tls-cert", paths.cert, "a certificate that is valid now", "one that is not valid yet");
  }
  return absl::OkStatus();
}

absl::Status CheckPair(const TlsPaths& paths, const TlsContents& contents) {
  absl::StatusOr<std::vector<Owned<X509>>> chain = ParseCertificates("--tls-cert", paths.cert, contents.cert);
  if (!chain.ok()) return chain.status();
  absl::StatusOr<Owned<EVP_PKEY>> key = ParseKey(paths.key, contents.key);
  if (!key.ok()) return key.status();
  if (absl::Status status = CheckDates(paths, *chain->front()); !status.ok()) return status;
  if (X509_check_private_key(chain->front().get(), key->get()) != 1) {
    ERR_clear_error();
    return BadFile("--tls-key", paths.key, absl::StrCat("the key of the certificate in ", paths.cert), "another key");
  }
  // What is left is the library's own policy, such as the size of a key.
  const Owned<SSL_CTX> context(SSL_CTX_new(TLS_server_method()));
  if (context == nullptr) return absl::ResourceExhaustedError("--tls-cert: no memory to check it");
  if (SSL_CTX_use_certificate(context.get(), chain->front().get()) != 1 ||
      SSL_CTX_use_PrivateKey(context.get(), key->get()) != 1) {
    return BadFile("--tls-cert", paths.cert, "a certificate that OpenSSL takes", LastReason());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TlsContents> ReadTls(const TlsPaths& paths) {
  TlsContents contents;
  const std::pair<const char*, std::pair<const std::string*, std::string*>> files[] = {
      {"--tls-cert", {&paths.cert, &contents.cert}},
      {"--tls-key", {&paths.key, &contents.key}},
      {"--tls-client-ca", {&paths.client_ca, &contents.client_ca}},
  };
  for (const auto& [option, file] : files) {
    if (file.first->empty()) continue;
    absl::StatusOr<std::string> text = Read(option, *file.first);
    if (!text.ok()) return text.status();
    *file.second = *std::move(text);
  }
  if (absl::Status status = CheckPair(paths, contents); !status.ok()) return status;
  if (!paths.client_ca.empty()) {
    const auto authorities = ParseCertificates("--tls-client-ca", paths.client_ca, contents.client_ca);
    if (!authorities.ok()) return authorities.status();
  }
  return contents;
}

// gRPC keeps what it was given for each address apart, so each is told of a change on its own. It takes connections of one address
// one after the other, and changes what they use without a lock: the addresses that a name stands for must not share one of these.
struct TlsFiles::Address {
  TlsFiles* files;
  std::mutex mutex;
  std::shared_ptr<const TlsContents> given;  // guarded by mutex

  // Called by gRPC before a handshake.
  static grpc_ssl_certificate_config_reload_status Fetch(void* self, grpc_ssl_server_certificate_config** config) {
    auto* address = static_cast<Address*>(self);
    std::shared_ptr<const TlsContents> now = address->files->Current();
    std::lock_guard<std::mutex> lock(address->mutex);
    if (now == address->given) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair = {now->key.c_str(), now->cert.c_str()};
    // gRPC wants authorities here also where no client is asked for a certificate; then it does not use them.
    const std::string& authorities = now->client_ca.empty() ? now->cert : now->client_ca;
    *config = grpc_ssl_server_certificate_config_create(authorities.c_str(), &pair, 1);
    address->given = std::move(now);
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }
};

// gRPC's C++ interface has no credentials that both ask for certificates anew and keep the old ones when new ones are bad; its C
// interface has, so this is the little that wraps it.
class TlsFiles::ReloadingCredentials final : public grpc::ServerCredentials {
 public:
  explicit ReloadingCredentials(TlsFiles* files) : files_(files) {}

  void SetAuthMetadataProcessor(const std::shared_ptr<grpc::AuthMetadataProcessor>&) override {}  // moed has none

 private:
  // The port, 0 when nothing could be bound; of a name's addresses those that can be.
  int AddPortToServer(const std::string& text, grpc_server* server) override {
    int bound = 0;
    for (const std::string& numeric : NumericAddresses(text)) {
      const int port = AddAddress(bound == 0 ? numeric : BoundAddress(numeric, bound), server);
      if (port > 0) bound = port;
    }
    return bound;
  }

  int AddAddress(const std::string& numeric, grpc_server* server) {
    const auto wanted = files_->paths_.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                                         : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY;
    auto owned = std::make_unique<Address>();
    Address* address = owned.get();
    address->files = files_;
    {
      std::lock_guard<std::mutex> lock(files_->mutex_);
      files_->addresses_.push_back(std::move(owned));
    }
    grpc_server_credentials* credentials = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(wanted, Address::Fetch, address));
    const int port = grpc_server_add_http2_port(server, numeric.c_str(), credentials);
    grpc_server_credentials_release(credentials);
    return port;
  }

  TlsFiles* const files_;
};

TlsFiles::TlsFiles(const TlsPaths& paths, const Stamps& stamps, TlsContents contents)
    : paths_(paths), stamps_(stamps), contents_(std::make_shared<const TlsContents>(std::move(contents))) {}

TlsFiles::~TlsFiles() = default;

TlsFiles::Stamps TlsFiles::StampsOf(const TlsPaths& paths) {
  return {StampOf(paths.cert), StampOf(paths.key), StampOf(paths.client_ca)};
}

absl::StatusOr<std::unique_ptr<TlsFiles>> TlsFiles::Open(const TlsPaths& paths) {
  const Stamps stamps = StampsOf(paths);
  absl::StatusOr<TlsContents> contents = ReadTls(paths);
  if (!contents.ok()) return contents.status();
  return std::unique_ptr<TlsFiles>(new TlsFiles(paths, stamps, *std::move(contents)));
}

std::shared_ptr<grpc::ServerCredentials> TlsFiles::Credentials() { return std::make_shared<ReloadingCredentials>(this); }

std::shared_ptr<const TlsContents> TlsFiles::Current() {
  std::lock_guard<std::mutex> lock(mutex_);
  const Stamps stamps = StampsOf(paths_);
  if (stamps == stamps_) return contents_;
  stamps_ = stamps;
  absl::StatusOr<TlsContents> read = ReadTls(paths_);
  if (!read.ok()) {
    spdlog::warn("TLS stays as it was: {}", std::string(read.status().message()));
    return contents_;
  }
  contents_ = std::make_shared<const TlsContents>(*std::move(read));
  spdlog::info("TLS certificates read again");
  return contents_;
}

}  // namespace moed
