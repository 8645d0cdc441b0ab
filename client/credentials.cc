#include "client/credentials.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace moed::client {
namespace {

constexpr size_t kMaxFile = 1 << 20;  // bytes
constexpr size_t kMinToken = 16, kMaxToken = 255;

absl::Status Bad(const std::string& field, const std::string& wanted, const std::string& got) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": wanted ", wanted, ", got ", got));
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& field, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxFile + 1, '\0');
  if (file) file.read(text.data(), static_cast<std::streamsize>(text.size()));
  // A directory can be opened but not read.
  if (!file.is_open() || file.bad()) {
    return absl::NotFoundError(absl::StrCat(field, ": wanted a readable file, got '", path, "'"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxFile) {
    return Bad(field, absl::StrCat("a file of at most ", kMaxFile, " bytes"), absl::StrCat("more in ", path));
  }
  return text;
}

// The file at `path` with at least one PEM block of `kind`; "" when `path` is empty.
absl::StatusOr<std::string> ReadPem(const std::string& field, const std::string& path, const std::string& kind) {
  if (path.empty()) return std::string();
  absl::StatusOr<std::string> text = ReadSmallFile(field, path);
  if (!text.ok()) return text.status();
  // "EC PRIVATE KEY" and such are keys too.
  const size_t begin = text->find("-----BEGIN ");
  if (begin == std::string::npos || text->find(absl::StrCat(kind, "-----"), begin) == std::string::npos) {
    return Bad(field, absl::StrCat("a PEM file with a ", kind), path);
  }
  return text;
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeCredentials(const std::string& address,
                                                                          const ClientOptions& options) {
  const bool cert = !options.tls_cert.empty(), key = !options.tls_key.empty();
  if (options.tls_ca.empty() && !cert && !key) return grpc::InsecureChannelCredentials();
  if (cert != key) return Bad(cert ? "tls_cert" : "tls_key", cert ? "tls_key with it" : "tls_cert with it", "none");
  if (address.rfind("unix:", 0) == 0) return Bad("tls_ca", "HOST:PORT for TLS", absl::StrCat("\"", address, "\""));
  grpc::SslCredentialsOptions ssl;
  struct Part {
    const char* field;
    const std::string& path;
    const char* kind;
    std::string* text;
  };
  const Part parts[] = {{"tls_ca", options.tls_ca, "CERTIFICATE", &ssl.pem_root_certs},
                        {"tls_cert", options.tls_cert, "CERTIFICATE", &ssl.pem_cert_chain},
                        {"tls_key", options.tls_key, "PRIVATE KEY", &ssl.pem_private_key}};
  for (const Part& part : parts) {
    absl::StatusOr<std::string> text = ReadPem(part.field, part.path, part.kind);
    if (!text.ok()) return text.status();
    *part.text = *std::move(text);
  }
  return grpc::SslCredentials(ssl);
}

absl::StatusOr<std::string> ReadToken(const ClientOptions& options) {
  if (options.token_file.empty()) return std::string();
  absl::StatusOr<std::string> text = ReadSmallFile("token_file", options.token_file);
  if (!text.ok()) return text.status();
  for (const absl::string_view whole : absl::StrSplit(*text, '\n')) {
    const absl::string_view line = absl::StripAsciiWhitespace(whole);
    if (line.empty() || line.front() == '#') continue;
    const bool printable = std::all_of(line.begin(), line.end(), [](unsigned char c) { return c > 32 && c < 127; });
    if (printable && line.size() >= kMinToken && line.size() <= kMaxToken) return std::string(line);
    return Bad("token_file", absl::StrCat("a token of ", kMinToken, " to ", kMaxToken, " printable characters without space"),
               absl::StrCat("another line in ", options.token_file));
  }
  return Bad("token_file", "a line with a token", absl::StrCat("none in ", options.token_file));
}

}  // namespace moed::client
