#include "engine/safetensors_header.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <limits>
#include <unordered_set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/outside_name.h"

namespace moed {
namespace {

// The bytes of the header through one buffer of fixed size.
class HeaderBytes {
 public:
  HeaderBytes(int fd, uint64_t begin, uint64_t size) : fd_(fd), next_(begin), begin_(begin), end_(begin + size) {}

  // The next byte, not consumed; -1 at the end of the header or after a read error.
  int Peek() { return at_ < filled_ || Fill() ? buffer_[at_] : -1; }
  void Skip(size_t count) { at_ += count; }
  // What is buffered now; empty only at the end when called after Peek.
  std::span<const uint8_t> Buffered() const { return {buffer_.data() + at_, filled_ - at_}; }

  uint64_t position() const { return next_ - begin_ - (filled_ - at_); }
  const absl::Status& status() const { return status_; }

 private:
  bool Fill() {
    if (next_ == end_ || !status_.ok()) return false;
    const size_t count = static_cast<size_t>(std::min<uint64_t>(buffer_.size(), end_ - next_));
    status_ = ReadFully(fd_, next_, {buffer_.data(), count});
    if (!status_.ok()) return false;
    next_ += count;
    at_ = 0;
    filled_ = count;
    return true;
  }

  const int fd_;
  uint64_t next_;
  const uint64_t begin_;
  const uint64_t end_;
  size_t at_ = 0;
  size_t filled_ = 0;
  absl::Status status_;
  std::array<uint8_t, 64 * 1024> buffer_;
};

bool IsPlain(uint8_t byte) { return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\'; }

void AppendUtf8(uint32_t code, std::string* out) {
  if (code < 0x80) {
    out->push_back(static_cast<char>(code));
  } else if (code < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (code >> 6)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else if (code < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (code >> 12)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (code >> 18)));
    out->push_back(static_cast<char>(0x80 | ((code >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((code >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (code & 0x3F)));
  }
}

// One scan. Every Parse function returns false after Fail; the first failure is the one that is kept.
class Scanner {
 public:
  Scanner(int fd, uint64_t header_bytes, uint64_t file_bytes, const TensorVisitor& visit,
          std::map<std::string, std::string>* metadata)
      : bytes_(fd, 8, header_bytes),
        data_begin_(8 + header_bytes),
        data_bytes_(file_bytes - 8 - header_bytes),
        visit_(visit),
        metadata_(metadata) {}

  absl::Status Run() {
    if (bytes_.Peek() != '{') Fail("the header does not begin with '{'");
    const bool ok = status_.ok() && ParseObject([this] { return ParseTopEntry(); });
    if (ok && !stopped_ && NextToken() != -1) Fail("bytes after the header's object that are not padding");
    return bytes_.status().ok() ? status_ : bytes_.status();
  }

 private:
  bool Fail(const std::string& what) {
    if (!status_.ok()) return false;
    const std::string where = in_tensor_ ? absl::StrCat("tensor ", QuotedName(name_), ": ") : std::string();
    status_ = absl::InvalidArgumentError(absl::StrCat(where, what, " (byte ", bytes_.position(), " of the header)"));
    return false;
  }

  // Skips JSON white space; the byte that follows, not consumed.
  int NextToken() {
    int byte = bytes_.Peek();
    while (byte == ' ' || byte == '\n' || byte == '\t' || byte == '\r') {
      bytes_.Skip(1);
      byte = bytes_.Peek();
    }
    return byte;
  }

  bool Expect(char wanted) {
    const int got = NextToken();
    if (got == wanted) {
      bytes_.Skip(1);
      return true;
    }
    return Fail(absl::StrCat("wanted '", std::string(1, wanted), "', found ", ByteText(got)));
  }

  static std::string ByteText(int byte) {
    if (byte < 0) return "the end of the header";
    if (byte > 0x20 && byte < 0x7F) return absl::StrCat("'", std::string(1, static_cast<char>(byte)), "'");
    return absl::StrCat("byte 0x", absl::Hex(byte, absl::kZeroPad2));
  }

  // open item , item ... close, where `item` parses one of them.
  template <typename Item>
  bool ParseList(char open, char close, const Item& item) {
    if (!Expect(open)) return false;
    if (NextToken() == close) return Expect(close);
    while (true) {
      if (!item()) return false;
      if (stopped_) return true;
      if (NextToken() != ',') return Expect(close);
      bytes_.Skip(1);
    }
  }
  template <typename Item>
  bool ParseObject(const Item& item) { return ParseList('{', '}', item); }

  bool ParseTopEntry() {
    in_tensor_ = false;
    if (!ParseString(&name_, kMaxNameBytes, "name") || !Expect(':')) return false;
    if (name_ == "__metadata__") return ParseMetadata();
    in_tensor_ = true;
    if (++tensors_ > kMaxTensors) return Fail(absl::StrCat("more than ", kMaxTensors, " tensors in one file"));
    return ParseTensor();
  }

  bool ParseMetadata() {
    if (seen_metadata_) return Fail("__metadata__ appears twice");
    seen_metadata_ = true;
    std::unordered_set<std::string> keys;
    return ParseObject([&] {
      std::string key;
      if (!ParseString(&key, kMaxNameBytes, "__metadata__ key") || !Expect(':')) return false;
      if (NextToken() != '"') return Fail(absl::StrCat("__metadata__ ", QuotedName(key), " is not a string"));
      if (keys.size() == kMaxMetadataEntries)
        return Fail(absl::StrCat("more than ", kMaxMetadataEntries, " metadata entries"));
      if (!keys.insert(key).second) return Fail(absl::StrCat("__metadata__ has ", QuotedName(key), " twice"));
      return metadata_ == nullptr ? ParseString(nullptr, 0, "__metadata__ value") : KeepMetadata(key);
    });
  }

  bool KeepMetadata(const std::string& key) {
    std::string value;
    if (!ParseString(&value, kMaxMetadataBytes, "__metadata__ value")) return false;
    metadata_bytes_ += key.size() + value.size();
    if (metadata_bytes_ > kMaxMetadataBytes) return Fail(absl::StrCat("__metadata__ of more than ", kMaxMetadataBytes, " bytes"));
    metadata_->emplace(key, std::move(value));
    return true;
  }

  bool ParseTensor() {
    info_.shape.clear();
    seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    if (!ParseObject([this] { return ParseField(); })) return false;
    if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) {
      return Fail(absl::StrCat("has no ", !seen_dtype_ ? "dtype" : !seen_shape_ ? "shape" : "data_offsets"));
    }
    if (!CheckTensor()) return false;
    stopped_ = !visit_(name_, info_);
    return true;
  }

  bool ParseField() {
    if (!ParseString(&field_, 64, "field name") || !Expect(':')) return false;
    if (field_ == "dtype") return Once(&seen_dtype_) && ParseDtype();
    if (field_ == "shape") return Once(&seen_shape_) && ParseShape();
    if (field_ == "data_offsets") return Once(&seen_offsets_) && ParseOffsets();
    return Fail(absl::StrCat("unknown field ", QuotedName(field_), "; wanted dtype, shape and data_offsets"));
  }

  bool Once(bool* seen) {
    if (*seen) return Fail(absl::StrCat("has ", field_, " twice"));
    *seen = true;
    return true;
  }

  bool ParseDtype() {
    std::string name;
    if (!ParseString(&name, 64, "dtype")) return false;
    return DtypeFromName(name, &info_.dtype) || Fail(absl::StrCat("unknown dtype ", QuotedName(name)));
  }

  bool ParseShape() {
    return ParseList('[', ']', [this] {
      uint64_t dimension = 0;
      if (!ParseUnsigned("shape", &dimension)) return false;
      if (dimension > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail(absl::StrCat("shape has a dimension of ", dimension));
      }
      if (info_.shape.size() == kMaxRank) return Fail(absl::StrCat("shape has more than ", kMaxRank, " dimensions"));
      info_.shape.push_back(static_cast<int64_t>(dimension));
      return true;
    });
  }

  bool ParseOffsets() {
    int count = 0;
    const bool ok = ParseList('[', ']', [this, &count] {
      if (count == 2) return Fail("data_offsets has more than 2 numbers");
      return ParseUnsigned("data_offsets", &offsets_[count++]);
    });
    return ok && (count == 2 || Fail(absl::StrCat("data_offsets has ", count, " numbers, wanted 2")));
  }

  bool ParseUnsigned(const char* what, uint64_t* value) {
    int byte = NextToken();
    if (byte < '0' || byte > '9') {
      return Fail(
          absl::StrCat(what, ": wanted an unsigned integer, found ", byte == '-' ? "a negative number" : ByteText(byte)));
    }
    *value = 0;
    for (int digits = 0; byte >= '0' && byte <= '9'; ++digits) {
      if (digits > 0 && *value == 0) return Fail(absl::StrCat(what, ": a number with a leading zero"));
      const uint64_t digit = static_cast<uint64_t>(byte - '0');
      if (*value > (std::numeric_limits<uint64_t>::max() - digit) / 10) {
        return Fail(absl::StrCat(what, ": a number above 2^64 - 1"));
      }
      *value = *value * 10 + digit;
      bytes_.Skip(1);
      byte = bytes_.Peek();
    }
    if (byte == '.' || byte == 'e' || byte == 'E') return Fail(absl::StrCat(what, ": a number that is not a plain integer"));
    return true;
  }

  // Range against shape and file; fills begin and bytes.
  bool CheckTensor() {
    const auto [begin, end] = offsets_;
    // Built for errors only: this runs once for every tensor of a file.
    const auto range = [begin = begin, end = end] { return absl::StrCat("data_offsets [", begin, ", ", end, "]"); };
    if (end < begin) return Fail(absl::StrCat(range(), " end before they begin"));
    const absl::StatusOr<uint64_t> bytes = TensorBytes(info_.dtype, info_.shape);
    if (!bytes.ok()) return Fail(std::string(bytes.status().message()));
    if (end - begin != *bytes) {
      return Fail(absl::StrCat(range(), " span ", end - begin, " bytes, but ", StDtypeName(info_.dtype), " ",
                               ShapeText(info_.shape), " needs ", *bytes));
    }
    if (end > data_bytes_) return Fail(absl::StrCat(range(), " lie outside the data area of ", data_bytes_, " bytes"));
    info_.begin = data_begin_ + begin;
    info_.bytes = *bytes;
    return true;
  }

  // A string into `out`, decoded; `out` null checks it and keeps nothing, without a limit.
  bool ParseString(std::string* out, size_t limit, const char* what) {
    if (!Expect('"')) return false;
    if (out != nullptr) out->clear();
    Utf8Checker utf8;
    while (true) {
      if (out != nullptr && out->size() > limit) return Fail(absl::StrCat(what, " longer than ", limit, " bytes"));
      const int byte = bytes_.Peek();
      if (byte < 0) return Fail(absl::StrCat(what, " without an end"));
      if (utf8.complete() && IsPlain(static_cast<uint8_t>(byte))) {
        TakePlain(out, limit);
        continue;
      }
      bytes_.Skip(1);
      if (byte == '"' && utf8.complete()) return true;
      if (byte == '\\' && utf8.complete()) {
        if (!ParseEscape(out)) return false;
        continue;
      }
      if (byte < 0x20) return Fail(absl::StrCat(what, " with an unescaped control character"));
      if (!utf8.Feed(static_cast<uint8_t>(byte))) return Fail(absl::StrCat(what, " that is not UTF-8"));
      if (out != nullptr) out->push_back(static_cast<char>(byte));
    }
  }

  // Consumes the run of plain characters that is buffered, up to just past `limit`.
  void TakePlain(std::string* out, size_t limit) {
    std::span<const uint8_t> run = bytes_.Buffered();
    if (out != nullptr) run = run.first(std::min(run.size(), limit + 1 - out->size()));
    size_t count = 0;
    while (count < run.size() && IsPlain(run[count])) ++count;
    if (out != nullptr) out->append(reinterpret_cast<const char*>(run.data()), count);
    bytes_.Skip(count);
  }

  bool ParseEscape(std::string* out) {
    static constexpr char kShort[][2] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                                         {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};
    const int byte = bytes_.Peek();
    if (byte >= 0) bytes_.Skip(1);
    uint32_t code = 0;
    if (byte == 'u') {
      if (!ParseCodePoint(&code)) return false;
    } else {
      const auto* found = std::find_if(std::begin(kShort), std::end(kShort), [byte](const char* e) { return e[0] == byte; });
      if (found == std::end(kShort)) return Fail("an unknown escape in a string");
      code = static_cast<uint32_t>((*found)[1]);
    }
    if (out != nullptr) AppendUtf8(code, out);
    return true;
  }

  // The digits after "\u", and the second half of a surrogate pair.
  bool ParseCodePoint(uint32_t* code) {
    if (!ParseHex4(code)) return false;
    if (*code < 0xD800 || *code > 0xDFFF) return true;
    uint32_t low = 0;
    if (*code > 0xDBFF || !Take('\\') || !Take('u') || !ParseHex4(&low) || low < 0xDC00 || low > 0xDFFF) {
      return Fail("half of a surrogate pair in a string");
    }
    *code = 0x10000 + ((*code - 0xD800) << 10) + (low - 0xDC00);
    return true;
  }

  bool Take(char wanted) {
    if (bytes_.Peek() != wanted) return false;
    bytes_.Skip(1);
    return true;
  }

  bool ParseHex4(uint32_t* code) {
    *code = 0;
    for (int i = 0; i < 4; ++i) {
      const int byte = bytes_.Peek();
      const int lower = byte | 0x20;
      int digit = -1;
      if (byte >= '0' && byte <= '9') digit = byte - '0';
      if (byte >= 0 && lower >= 'a' && lower <= 'f') digit = lower - 'a' + 10;
      if (digit < 0) return Fail("a \\u escape without four hexadecimal digits");
      *code = *code * 16 + static_cast<uint32_t>(digit);
      bytes_.Skip(1);
    }
    return true;
  }

  HeaderBytes bytes_;
  const uint64_t data_begin_;
  const uint64_t data_bytes_;
  const TensorVisitor& visit_;
  std::map<std::string, std::string>* const metadata_;
  size_t metadata_bytes_ = 0;
  absl::Status status_;
  bool stopped_ = false;
  bool seen_metadata_ = false;
  uint32_t tensors_ = 0;
  // The current entry.
  bool in_tensor_ = false;
  std::string name_;
  std::string field_;
  TensorInfo info_;
  std::array<uint64_t, 2> offsets_ = {};
  bool seen_dtype_ = false;
  bool seen_shape_ = false;
  bool seen_offsets_ = false;
};

}  // namespace

absl::Status ScanHeader(int fd, uint64_t header_bytes, uint64_t file_bytes, const TensorVisitor& visit,
                        std::map<std::string, std::string>* metadata) {
  return Scanner(fd, header_bytes, file_bytes, visit, metadata).Run();
}

absl::Status ReadFully(int fd, uint64_t offset, std::span<uint8_t> out) {
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::DataLossError(absl::StrCat("reading at byte ", offset + done, ": ", strerror(errno)));
    if (got == 0) {
      return absl::DataLossError(absl::StrCat("the file ends at byte ", offset + done, ", wanted ", out.size(),
                                              " bytes from byte ", offset, ": it is shorter than when it was opened"));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

}  // namespace moed
