#include "engine/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "engine/outside_name.h"
#include "engine/safetensors_header.h"

namespace moed {
namespace {

// Where one tensor lies, without its name: a file is refused before the table of names is built, so that a hostile header
// costs some tens of bytes per entry. `ordinal` counts entries in file order.
struct Placed {
  std::array<uint64_t, 2> name_hash;
  uint64_t begin;
  uint64_t end;
  uint32_t ordinal;
};

absl::Status AtPath(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", std::string(status.message())));
}

// Header and layout checks of one open file.
class Layout {
 public:
  Layout(int fd, uint64_t header_bytes, uint64_t file_bytes)
      : fd_(fd), header_bytes_(header_bytes), file_bytes_(file_bytes) {}

  absl::Status Check() {
    absl::Status status =
        ScanHeader(fd_, header_bytes_, file_bytes_, [this](const std::string& name, const TensorInfo& info) {
          placed_.push_back({HashName(name), info.begin, info.begin + info.bytes, static_cast<uint32_t>(placed_.size())});
          return true;
        });
    if (status.ok()) status = CheckNames();
    if (status.ok()) status = CheckRanges();
    return status;
  }

 private:
  absl::Status CheckNames() {
    std::sort(placed_.begin(), placed_.end(), [](const Placed& a, const Placed& b) { return a.name_hash < b.name_hash; });
    const auto twice = std::adjacent_find(placed_.begin(), placed_.end(),
                                          [](const Placed& a, const Placed& b) { return a.name_hash == b.name_hash; });
    if (twice == placed_.end()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("tensor ", NameOf(twice->ordinal), " appears twice in the header"));
  }

  // The data area is covered from its first to its last byte, by each byte once.
  absl::Status CheckRanges() {
    std::sort(placed_.begin(), placed_.end(), [](const Placed& a, const Placed& b) {
      return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
    });
    const uint64_t data_begin = 8 + header_bytes_;
    uint64_t at = data_begin;
    const Placed* before = nullptr;
    for (const Placed& tensor : placed_) {
      if (tensor.begin != at) {
        const std::string wanted =
            before == nullptr ? std::string("0") : absl::StrCat(at - data_begin, ", the end of ", NameOf(before->ordinal));
        return absl::InvalidArgumentError(absl::StrCat("tensor ", NameOf(tensor.ordinal), " begins at byte ",
                                                       tensor.begin - data_begin, " of the data area, wanted ", wanted,
                                                       tensor.begin < at ? " (they overlap)" : " (a hole)"));
      }
      at = tensor.end;
      before = &tensor;
    }
    if (at == file_bytes_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("the tensors end at byte ", at, " of the file, which has ", file_bytes_,
                                                   " bytes: ", file_bytes_ - at, " trailing bytes"));
  }

  // Names are not kept, so the rare error reads the header once more.
  std::string NameOf(uint32_t ordinal) const {
    std::string found = absl::StrCat("number ", ordinal);
    uint32_t at = 0;
    (void)ScanHeader(fd_, header_bytes_, file_bytes_, [&](const std::string& name, const TensorInfo&) {
      if (at++ != ordinal) return true;
      found = QuotedName(name);
      return false;
    });
    return found;
  }

  const int fd_;
  const uint64_t header_bytes_;
  const uint64_t file_bytes_;
  std::vector<Placed> placed_;
};

// The first 8 bytes against the file's real length; the header's length on success.
absl::StatusOr<uint64_t> ReadHeaderLength(int fd, uint64_t file_bytes) {
  if (file_bytes < 8) return absl::InvalidArgumentError(absl::StrCat("wanted at least 8 bytes, the file has ", file_bytes));
  std::array<uint8_t, 8> bytes;
  const absl::Status status = ReadFully(fd, 0, bytes);
  if (!status.ok()) return status;
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | bytes[i];
  if (length > file_bytes - 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("claims a header of ", length, " bytes, the file has ", file_bytes, " bytes"));
  }
  if (length > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("claims a header of ", length, " bytes, wanted at most ", kMaxHeaderBytes));
  }
  return length;
}

absl::StatusOr<uint64_t> RegularFileSize(int fd) {
  struct stat facts;
  if (::fstat(fd, &facts) != 0) return absl::ErrnoToStatus(errno, "fstat");
  if (!S_ISREG(facts.st_mode)) return absl::InvalidArgumentError("not a regular file");
  return static_cast<uint64_t>(facts.st_size);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  // Non-blocking, so that a pipe in place of the file is refused instead of waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  std::unique_ptr<SafetensorsFile> file(new SafetensorsFile(path, fd));

  const absl::StatusOr<uint64_t> file_bytes = RegularFileSize(fd);
  if (!file_bytes.ok()) return AtPath(path, file_bytes.status());
  const absl::StatusOr<uint64_t> header_bytes = ReadHeaderLength(fd, *file_bytes);
  if (!header_bytes.ok()) return AtPath(path, header_bytes.status());
  absl::Status status = Layout(fd, *header_bytes, *file_bytes).Check();
  if (!status.ok()) return AtPath(path, status);

  // Every tensor is checked again on this second scan, so a file that changes meanwhile yields no wild entry.
  status = ScanHeader(fd, *header_bytes, *file_bytes, [&file](const std::string& name, const TensorInfo& info) {
    file->tensors_.emplace(name, info);
    return true;
  });
  if (!status.ok()) return AtPath(path, status);
  file->header_bytes_ = *header_bytes;
  file->file_bytes_ = *file_bytes;
  return file;
}

SafetensorsFile::~SafetensorsFile() { ::close(fd_); }

const TensorInfo* SafetensorsFile::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

absl::StatusOr<std::map<std::string, std::string>> SafetensorsFile::ReadMetadata() const {
  std::map<std::string, std::string> metadata;
  const auto all = [](const std::string&, const TensorInfo&) { return true; };
  const absl::Status status = ScanHeader(fd_, header_bytes_, file_bytes_, all, &metadata);
  if (!status.ok()) return AtPath(path_, status);
  return metadata;
}

absl::Status SafetensorsFile::Read(const TensorInfo& tensor, uint64_t offset, std::span<uint8_t> out) const {
  if (offset > tensor.bytes || out.size() > tensor.bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": wanted ", out.size(), " bytes from byte ", offset,
                                              " of a tensor of ", tensor.bytes, " bytes"));
  }
  const absl::Status status = ReadFully(fd_, tensor.begin + offset, out);
  return status.ok() ? status : AtPath(path_, status);
}

}  // namespace moed
