#include "tests/support/certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <cstdlib>
#include <functional>

namespace moed::testing {
namespace {

void Must(bool done, const char* what) {
  if (done) return;
  std::fprintf(stderr, "certificates: %s failed\n", what);
  std::abort();
}

// What `write` puts into a memory file.
std::string Pem(const std::function<int(BIO*)>& write) {
  BIO* bio = BIO_new(BIO_s_mem());
  Must(bio != nullptr && write(bio) == 1, "writing PEM");
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio, &data);  // NOLINT: OpenSSL's type
  std::string text(data, static_cast<size_t>(bytes));
  BIO_free(bio);
  return text;
}

EVP_PKEY* NewKey() {
  EVP_PKEY* key = EVP_EC_gen("P-256");
  Must(key != nullptr, "making a key");
  return key;
}

void AddExtension(X509* x509, int nid, const char* value) {
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, nullptr, nid, value);
  Must(extension != nullptr && X509_add_ext(x509, extension, -1) == 1, "adding an extension");
  X509_EXTENSION_free(extension);
}

// A certificate of `name` for `key` without extensions, not yet signed.
X509* Unsigned(const std::string& name, EVP_PKEY* key, long from_s, long to_s) {  // NOLINT: OpenSSL's type
  static long serial = 0;                                                          // NOLINT: OpenSSL's type
  X509* x509 = X509_new();
  Must(x509 != nullptr && X509_set_version(x509, 2) == 1, "making a certificate");
  ASN1_INTEGER_set(X509_get_serialNumber(x509), ++serial);
  X509_gmtime_adj(X509_getm_notBefore(x509), from_s);
  X509_gmtime_adj(X509_getm_notAfter(x509), to_s);
  Must(X509_set_pubkey(x509, key) == 1, "setting the key");
  Must(X509_NAME_add_entry_by_txt(X509_get_subject_name(x509), "CN", MBSTRING_UTF8,
                                  reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0) == 1,
       "setting the name");
  return x509;
}

}  // namespace

Authority::Authority(const std::string& name) : key_(NewKey()), x509_(Unsigned(name, key_, -3600, 86400)) {
  AddExtension(x509_, NID_basic_constraints, "critical,CA:TRUE");
  Must(X509_set_issuer_name(x509_, X509_get_subject_name(x509_)) == 1 && X509_sign(x509_, key_, EVP_sha256()) > 0, "signing");
  cert_ = Pem([this](BIO* bio) { return PEM_write_bio_X509(bio, x509_); });
}

Authority::~Authority() {
  X509_free(x509_);
  EVP_PKEY_free(key_);
}

Identity Authority::Issue(const std::string& name, long from_s, long to_s) const {  // NOLINT: OpenSSL's type
  EVP_PKEY* key = NewKey();
  X509* x509 = Unsigned(name, key, from_s, to_s);
  AddExtension(x509, NID_subject_alt_name, "IP:127.0.0.1,DNS:localhost");
  Must(X509_set_issuer_name(x509, X509_get_subject_name(x509_)) == 1 && X509_sign(x509, key_, EVP_sha256()) > 0, "signing");
  Identity identity;
  identity.cert = Pem([x509](BIO* bio) { return PEM_write_bio_X509(bio, x509); });
  identity.key = Pem([key](BIO* bio) { return PEM_write_bio_PrivateKey(bio, key, nullptr, nullptr, 0, nullptr, nullptr); });
  X509_free(x509);
  EVP_PKEY_free(key);
  return identity;
}

std::string Encrypted(const std::string& key) {
  BIO* bio = BIO_new_mem_buf(key.data(), static_cast<int>(key.size()));
  EVP_PKEY* parsed = PEM_read_bio_PrivateKey(bio, nullptr, nullptr, nullptr);
  BIO_free(bio);
  Must(parsed != nullptr, "reading a key");
  char phrase[] = "phrase";
  const std::string text = Pem([&](BIO* out) {
    return PEM_write_bio_PrivateKey(out, parsed, EVP_aes_128_cbc(), nullptr, 0, nullptr, phrase);
  });
  EVP_PKEY_free(parsed);
  return text;
}

}  // namespace moed::testing
