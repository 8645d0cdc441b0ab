#include "server/token_file.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "engine/text_file.h"

namespace moed {
namespace {

constexpr uint64_t kMaxFile = 64 << 10;  // bytes; bounds what each call compares
constexpr size_t kMinToken = 16, kMaxToken = 255;
constexpr std::chrono::seconds kLookInterval(1);

absl::StatusOr<std::shared_ptr<const std::vector<TokenDigest>>> ReadTokens(const std::string& path) {
  absl::StatusOr<std::string> text = ReadTextFile(path, kMaxFile);
  if (!text.ok()) return text.status();
  auto digests = std::make_shared<std::vector<TokenDigest>>();
  int number = 0;
  for (const absl::string_view whole : absl::StrSplit(*text, '\n')) {
    ++number;
    const absl::string_view line = absl::StripAsciiWhitespace(whole);
    if (line.empty() || line.front() == '#') continue;
    const bool printable = std::all_of(line.begin(), line.end(), [](unsigned char c) { return c > 32 && c < 127; });
    if (!printable || line.size() < kMinToken || line.size() > kMaxToken) {
      return absl::InvalidArgumentError(absl::StrCat(path, " line ", number, ": wanted a token of ", kMinToken, " to ", kMaxToken,
                                                     " printable characters without space, got ", line.size(),
                                                     printable ? " characters" : " bytes with others"));
    }
    digests->push_back(DigestOf(std::string_view(line.data(), line.size())));
  }
  if (digests->empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": wanted at least one token, got none"));
  return digests;
}

}  // namespace

TokenDigest DigestOf(std::string_view token) {
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(), digest.data());
  return digest;
}

TokenFile::TokenFile(std::string path, Clock clock, FileStamp stamp, std::shared_ptr<const Digests> digests)
    : path_(std::move(path)), clock_(std::move(clock)), stamp_(stamp), next_look_(clock_() + kLookInterval),
      digests_(std::move(digests)) {}

absl::StatusOr<std::unique_ptr<TokenFile>> TokenFile::Open(const std::string& path, Clock clock) {
  const FileStamp stamp = StampOf(path);
  absl::StatusOr<std::shared_ptr<const Digests>> digests = ReadTokens(path);
  if (!digests.ok()) return digests.status();
  return std::unique_ptr<TokenFile>(new TokenFile(path, std::move(clock), stamp, *std::move(digests)));
}

std::shared_ptr<const TokenFile::Digests> TokenFile::Current() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto now = clock_();
  if (now < next_look_) return digests_;
  next_look_ = now + kLookInterval;
  const FileStamp stamp = StampOf(path_);
  if (stamp == stamp_) return digests_;
  stamp_ = stamp;
  absl::StatusOr<std::shared_ptr<const Digests>> read = ReadTokens(path_);
  if (!read.ok()) {
    spdlog::warn("tokens stay as they were: {}", std::string(read.status().message()));
    return digests_;
  }
  digests_ = *std::move(read);
  spdlog::info("{} tokens read from {}", digests_->size(), path_);
  return digests_;
}

bool TokenFile::Contains(const TokenDigest& digest) {
  const std::shared_ptr<const Digests> digests = Current();
  unsigned found = 0;
  for (const TokenDigest& known : *digests) found |= CRYPTO_memcmp(known.data(), digest.data(), digest.size()) == 0 ? 1u : 0u;
  return found != 0;
}

}  // namespace moed
