// Small text files from outside (configs, indexes), read within a limit: as a whole, or character by character.
#ifndef MOED_ENGINE_TEXT_FILE_H_
#define MOED_ENGINE_TEXT_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace moed {

// One pass over a file through one small buffer. Not thread-safe.
class TextStream {
 public:
  // Never waits for a writer: what is no regular file is INVALID_ARGUMENT, as is one above `limit` bytes; NOT_FOUND when
  // missing.
  static absl::StatusOr<std::unique_ptr<TextStream>> Open(const std::string& path, uint64_t limit);
  ~TextStream();
  TextStream(const TextStream&) = delete;
  TextStream& operator=(const TextStream&) = delete;

  // The next character into *c; false at the end, after an error, and where the file has grown beyond the limit.
  bool Next(char* c) { return (at_ < buffer_.size() || Fill()) && (*c = buffer_[at_++], true); }
  // Of the last Next that gave false: ok at the end of the file.
  const absl::Status& status() const { return status_; }
  // Bytes on the disk when it was opened.
  uint64_t size() const { return size_; }

 private:
  TextStream(std::string path, int fd, uint64_t size, uint64_t limit)
      : path_(std::move(path)), fd_(fd), size_(size), limit_(limit) {}
  bool Fill();

  const std::string path_;
  const int fd_;
  const uint64_t size_;
  const uint64_t limit_;
  uint64_t read_ = 0;
  std::vector<char> buffer_;
  size_t at_ = 0;
  absl::Status status_;
};

// All of it. Errors as TextStream.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, uint64_t limit);

}  // namespace moed

#endif  // MOED_ENGINE_TEXT_FILE_H_
