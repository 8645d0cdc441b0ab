// Tokens that clients show: a file with one a line, kept as digests, and read again when it changes.
//
// Threads: any. A token in the file is 16 to 255 printable ASCII characters without space; blank lines and lines that start with
// '#' are skipped. Only SHA-256 digests are kept, and they are compared in constant time, all of them, so that neither a
// wrong token nor its place in the file can be found by timing. No text made here contains a token.
//
// A changed file that cannot be read or breaks a rule leaves the tokens as they were, with a warning in the log.
#ifndef MOED_SERVER_TOKEN_FILE_H_
#define MOED_SERVER_TOKEN_FILE_H_

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/file_stamp.h"

namespace moed {

using TokenDigest = std::array<uint8_t, 32>;

TokenDigest DigestOf(std::string_view token);

class TokenFile {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;

  // Reads `path`. Errors as ReadTextFile, and INVALID_ARGUMENT when the content breaks a rule: the text names file and line.
  static absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& path, Clock clock);

  // Whether `digest` is that of a token in the file. Looks for a change of the file once a second at most.
  bool Contains(const TokenDigest& digest);

 private:
  using Digests = std::vector<TokenDigest>;

  TokenFile(std::string path, Clock clock, FileStamp stamp, std::shared_ptr<const Digests> digests);
  std::shared_ptr<const Digests> Current();

  const std::string path_;
  const Clock clock_;
  std::mutex mutex_;
  FileStamp stamp_;                                   // of what was read last, good or bad; guarded by mutex_
  std::chrono::steady_clock::time_point next_look_;  // guarded by mutex_
  std::shared_ptr<const Digests> digests_;            // guarded by mutex_
};

}  // namespace moed

#endif  // MOED_SERVER_TOKEN_FILE_H_
