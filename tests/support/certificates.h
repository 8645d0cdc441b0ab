// Certificates for tests, made when they are needed: an authority, and servers and clients that it signs.
#ifndef MOED_TESTS_SUPPORT_CERTIFICATES_H_
#define MOED_TESTS_SUPPORT_CERTIFICATES_H_

#include <openssl/types.h>

#include <memory>
#include <string>

namespace moed::testing {

// PEM text.
struct Identity {
  std::string cert, key;
};

class Authority {
 public:
  // Ends the program when OpenSSL fails, as do the methods: no test can go on without.
  explicit Authority(const std::string& name);
  ~Authority();
  Authority(const Authority&) = delete;
  Authority& operator=(const Authority&) = delete;

  // Its own certificate, PEM.
  const std::string& cert() const { return cert_; }

  // A new key, and a certificate with the common name `name` for 127.0.0.1 and localhost, valid from `from_s` to `to_s` seconds
  // from now.
  Identity Issue(const std::string& name, long from_s = -3600, long to_s = 86400) const;  // NOLINT: OpenSSL's type

 private:
  EVP_PKEY* key_;
  X509* x509_;
  std::string cert_;
};

// `key`, a PEM private key, under a passphrase.
std::string Encrypted(const std::string& key);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_CERTIFICATES_H_
