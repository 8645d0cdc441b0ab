// The writer: the whole header is known before the first byte is written, then data is appended in order.
//
// Deterministic: metadata first, then the tensors in the order given, padded with spaces so that the data area begins at a
// multiple of 8. Refuses what the reader would refuse. Plain write calls only.
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "absl/strings/str_cat.h"
#include "engine/outside_name.h"
#include "engine/safetensors.h"
#include "engine/safetensors_header.h"

namespace moed {
namespace {

void AppendJsonString(const std::string& text, std::string* out) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (static_cast<uint8_t>(c) < 0x20) {
      absl::StrAppend(out, "\\u", absl::Hex(static_cast<uint8_t>(c), absl::kZeroPad4));
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

absl::Status CheckText(const std::string& what, const std::string& text) {
  if (!IsUtf8(text)) return absl::InvalidArgumentError(absl::StrCat(what, " is not UTF-8"));
  return absl::OkStatus();
}

absl::Status CheckKey(const std::string& what, const std::string& key, std::unordered_set<std::string>* keys) {
  if (key.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, " has ", key.size(), " bytes, wanted at most ", kMaxNameBytes));
  }
  if (!keys->insert(key).second) return absl::InvalidArgumentError(absl::StrCat(what, " is given twice"));
  return CheckText(what, key);
}

absl::Status AppendMetadata(const std::vector<std::pair<std::string, std::string>>& metadata, std::string* header) {
  if (metadata.size() > kMaxMetadataEntries) {
    return absl::InvalidArgumentError(
        absl::StrCat(metadata.size(), " metadata entries, wanted at most ", kMaxMetadataEntries));
  }
  std::unordered_set<std::string> keys;
  absl::StrAppend(header, "\"__metadata__\":{");
  for (size_t i = 0; i < metadata.size(); ++i) {
    const auto& [key, value] = metadata[i];
    absl::Status status = CheckKey(absl::StrCat("metadata ", QuotedName(key)), key, &keys);
    if (status.ok()) status = CheckText(absl::StrCat("the value of metadata ", QuotedName(key)), value);
    if (!status.ok()) return status;
    if (i > 0) header->push_back(',');
    AppendJsonString(key, header);
    header->push_back(':');
    AppendJsonString(value, header);
  }
  header->push_back('}');
  return absl::OkStatus();
}

// Appends the entries and adds up their sizes.
absl::StatusOr<uint64_t> AppendTensors(const std::vector<SafetensorsWriter::Tensor>& tensors, std::string* header) {
  if (tensors.size() > kMaxTensors) {
    return absl::InvalidArgumentError(absl::StrCat(tensors.size(), " tensors, wanted at most ", kMaxTensors));
  }
  std::unordered_set<std::string> names = {"__metadata__"};
  uint64_t at = 0;
  for (const SafetensorsWriter::Tensor& tensor : tensors) {
    const std::string what = absl::StrCat("tensor ", QuotedName(tensor.name));
    const absl::Status status = CheckKey(what, tensor.name, &names);
    if (!status.ok()) return status;
    const absl::StatusOr<uint64_t> bytes = TensorBytes(tensor.dtype, tensor.shape);
    if (!bytes.ok()) return absl::InvalidArgumentError(absl::StrCat(what, ": ", std::string(bytes.status().message())));
    if (*bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) - at) {
      return absl::InvalidArgumentError(absl::StrCat(what, ": the size of the file overflows"));
    }
    if (header->size() > 1) header->push_back(',');
    AppendJsonString(tensor.name, header);
    absl::StrAppend(header, ":{\"dtype\":\"", StDtypeName(tensor.dtype), "\",\"shape\":[");
    for (size_t i = 0; i < tensor.shape.size(); ++i) absl::StrAppend(header, i == 0 ? "" : ",", tensor.shape[i]);
    absl::StrAppend(header, "],\"data_offsets\":[", at, ",", at + *bytes, "]}");
    at += *bytes;
  }
  return at;
}

absl::Status WriteAll(int fd, std::span<const uint8_t> bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return absl::ErrnoToStatus(errno, "write");
    bytes = bytes.subspan(static_cast<size_t>(wrote));
  }
  return absl::OkStatus();
}

absl::Status AtPath(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", std::string(status.message())));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(
    const std::string& path, const std::vector<Tensor>& tensors,
    const std::vector<std::pair<std::string, std::string>>& metadata, mode_t mode) {
  std::string header(8, '\0');  // the length comes last
  std::string body = "{";
  if (!metadata.empty()) {
    const absl::Status status = AppendMetadata(metadata, &body);
    if (!status.ok()) return AtPath(path, status);
  }
  const absl::StatusOr<uint64_t> bytes = AppendTensors(tensors, &body);
  if (!bytes.ok()) return AtPath(path, bytes.status());
  body.push_back('}');
  body.resize((body.size() + 7) / 8 * 8, ' ');
  if (body.size() > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the header has ", body.size(), " bytes, wanted at most ", kMaxHeaderBytes));
  }
  for (int i = 0; i < 8; ++i) header[i] = static_cast<char>(body.size() >> (8 * i));
  header += body;

  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path));
  std::unique_ptr<SafetensorsWriter> writer(new SafetensorsWriter(path, fd, *bytes));
  const absl::Status status = WriteAll(fd, {reinterpret_cast<const uint8_t*>(header.data()), header.size()});
  if (!status.ok()) return AtPath(path, status);
  return writer;
}

SafetensorsWriter::~SafetensorsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status SafetensorsWriter::Append(std::span<const uint8_t> bytes) {
  if (fd_ < 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": the file is finished"));
  if (bytes.size() > left_) {
    return absl::OutOfRangeError(absl::StrCat(path_, ": ", bytes.size(), " bytes appended, ", left_, " are left"));
  }
  const absl::Status status = WriteAll(fd_, bytes);
  if (!status.ok()) return AtPath(path_, status);
  left_ -= bytes.size();
  return absl::OkStatus();
}

absl::Status SafetensorsWriter::Finish() {
  if (fd_ < 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": the file is finished"));
  if (left_ != 0) return absl::FailedPreconditionError(absl::StrCat(path_, ": ", left_, " bytes were not written"));
  const int fd = fd_;
  fd_ = -1;
  if (::close(fd) != 0) return absl::ErrnoToStatus(errno, absl::StrCat("closing ", path_));
  return absl::OkStatus();
}

}  // namespace moed
