// TLS of the listeners: certificate, key and the authorities of clients from PEM files, read again when they change.
//
// Threads: any. gRPC asks before each handshake; connections that exist keep what they began with. Files are checked before gRPC
// sees them, as OpenSSL would use them: new files that do not parse, do not belong together or are out of date leave the old ones
// in use, with a warning in the log, until they change again. So cert and key may be replaced one after the other.
#ifndef MOED_SERVER_TLS_H_
#define MOED_SERVER_TLS_H_

#include <grpcpp/security/server_credentials.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/file_stamp.h"

namespace moed {

struct TlsPaths {
  std::string cert;       // the server's certificate, then intermediate ones
  std::string key;        // its private key, without a passphrase
  std::string client_ca;  // certificates of authorities; empty: clients need no certificate
};

// PEM text of the files.
struct TlsContents {
  std::string cert, key, client_ca;
};

// Reads and checks the files. Errors start with the option that named the file (--tls-cert, --tls-key, --tls-client-ca).
absl::StatusOr<TlsContents> ReadTls(const TlsPaths& paths);

class TlsFiles {
 public:
  // Errors as ReadTls.
  static absl::StatusOr<std::unique_ptr<TlsFiles>> Open(const TlsPaths& paths);
  ~TlsFiles();
  TlsFiles(const TlsFiles&) = delete;
  TlsFiles& operator=(const TlsFiles&) = delete;

  // For any number of addresses; with client_ca, clients must show a certificate. This object must outlive the servers that listen
  // with them.
  std::shared_ptr<grpc::ServerCredentials> Credentials();

  // The files as they are now, or as they were last good.
  std::shared_ptr<const TlsContents> Current();

 private:
  using Stamps = std::array<FileStamp, 3>;
  class ReloadingCredentials;
  struct Address;

  TlsFiles(const TlsPaths& paths, const Stamps& stamps, TlsContents contents);
  static Stamps StampsOf(const TlsPaths& paths);

  const TlsPaths paths_;
  std::mutex mutex_;
  Stamps stamps_;                                     // of what was read last, good or bad; guarded by mutex_
  std::shared_ptr<const TlsContents> contents_;       // guarded by mutex_
  std::vector<std::unique_ptr<Address>> addresses_;  // guarded by mutex_; what the credentials of each have given to gRPC
};

}  // namespace moed

#endif  // MOED_SERVER_TLS_H_
