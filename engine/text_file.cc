#include "engine/text_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr size_t kBufferBytes = 64 * 1024;

absl::Status TooLong(const std::string& path, uint64_t limit) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": wanted at most ", limit, " bytes"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TextStream>> TextStream::Open(const std::string& path, uint64_t limit) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat facts = {};
  const int failed = ::fstat(fd, &facts) == 0 ? 0 : errno;
  std::unique_ptr<TextStream> stream(new TextStream(path, fd, static_cast<uint64_t>(facts.st_size), limit));
  if (failed != 0) return absl::ErrnoToStatus(failed, absl::StrCat("cannot read ", path));
  if (!S_ISREG(facts.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  if (stream->size_ > limit) return TooLong(path, limit);
  return stream;
}

TextStream::~TextStream() { ::close(fd_); }

bool TextStream::Fill() {
  at_ = 0;
  buffer_.resize(kBufferBytes);
  ssize_t got = -1;
  do {
    got = ::read(fd_, buffer_.data(), buffer_.size());
  } while (got < 0 && errno == EINTR);
  status_ = got < 0 ? absl::DataLossError(absl::StrCat(path_, ": ", strerror(errno))) : absl::OkStatus();
  buffer_.resize(got < 0 ? 0 : static_cast<size_t>(got));
  read_ += buffer_.size();
  if (read_ > limit_) {
    status_ = TooLong(path_, limit_);
    buffer_.clear();
  }
  return !buffer_.empty();
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, uint64_t limit) {
  absl::StatusOr<std::unique_ptr<TextStream>> stream = TextStream::Open(path, limit);
  if (!stream.ok()) return stream.status();
  std::string text;
  text.reserve((*stream)->size());  // at most the limit
  for (char c = 0; (*stream)->Next(&c);) text.push_back(c);
  if (!(*stream)->status().ok()) return (*stream)->status();
  return text;
}

}  // namespace moed
