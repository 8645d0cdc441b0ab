// A walk over the bytes of a request that builds nothing: what a parse would store in many times the memory of the bytes
// (long lists of dimensions, unknown fields) is refused first.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::internal::WireFormat;
using google::protobuf::internal::WireFormatLite;

constexpr int kMaxDimensions = 8;

// Where a field is: the numbers of the fields that lead to it from the root, and its own, 16 bits each, the last lowest. Numbers of
// moe.v1 fit, and it is less than four messages deep. Names are made for errors only.
using Path = uint64_t;
constexpr int kPathBits = 16;
constexpr Path Join(Path outer, int number) { return outer << kPathBits | static_cast<Path>(number); }

constexpr Path kHidden = v1::ForwardRequest::kHiddenFieldNumber;
constexpr Path kHiddenData = Join(kHidden, v1::Tensor::kDataFieldNumber);

// "hidden.shape"
std::string NameOf(const Descriptor& root, Path path) {
  std::string name;
  const Descriptor* message = &root;
  for (int shift = 64 - kPathBits; shift >= 0; shift -= kPathBits) {
    const int number = static_cast<int>(path >> shift & ((Path{1} << kPathBits) - 1));
    if (number == 0) continue;
    const FieldDescriptor& field = *message->FindFieldByNumber(number);
    absl::StrAppend(&name, name.empty() ? "" : ".", field.name());
    message = field.message_type();  // null behind the last
  }
  return name;
}

// The schema does not recurse, so neither depth nor the number of paths can grow with the input.
class Walker {
 public:
  Walker(google::protobuf::io::ZeroCopyInputStream* stream, size_t size, const Descriptor& root)
      : input_(stream), size_(size), root_(root), has_hidden_(&root == v1::ForwardRequest::descriptor()) {}

  // After a Walk of the whole message.
  std::optional<HiddenPlace> hidden() const {
    if (hidden_pieces_ != 1 || data_pieces_ != 1 || !as_short_ || hidden_.bytes == 0) return std::nullopt;
    return hidden_;
  }

  // The whole message, or the one at `path`, up to the limit of the input.
  absl::Status Walk(const Descriptor& message, Path path = 0) {
    for (;;) {
      const size_t tag_at = at();
      const uint32_t tag = input_.ReadTag();
      if (tag == 0) break;
      const int number = WireFormatLite::GetTagFieldNumber(tag);
      const WireFormatLite::WireType type = WireFormatLite::GetTagWireType(tag);
      const FieldDescriptor* field = message.FindFieldByNumber(number);
      const bool packed = field != nullptr && field->is_packable() && type == WireFormatLite::WIRETYPE_LENGTH_DELIMITED;
      if (field == nullptr || (!packed && type != WireFormat::WireTypeForFieldType(field->type()))) {
        return absl::InvalidArgumentError(
            absl::StrCat(message.full_name(), ": wanted fields of moe.v1 as this server knows them, got ",
                         "an unknown one or one of another type: field ", number));
      }
      if (absl::Status status = Value(*field, Join(path, number), packed, tag, tag_at); !status.ok()) return status;
    }
    return input_.ConsumedEntireMessage() ? absl::OkStatus() : CannotParse(root_, size_);
  }

 private:
  size_t at() const { return static_cast<size_t>(input_.CurrentPosition()); }

  absl::Status Value(const FieldDescriptor& field, Path path, bool packed, uint32_t tag, size_t tag_at) {
    if (has_hidden_ && path == kHiddenData) return HiddenData(tag_at);
    if (!packed && field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      if (field.is_repeated()) {
        if (absl::Status status = Count(path); !status.ok()) return status;
      }
      return WireFormat::SkipField(&input_, tag, nullptr) ? absl::OkStatus() : CannotParse(root_, size_);
    }
    const size_t length_at = at();
    uint32_t length = 0;
    if (!input_.ReadVarint32(&length) || length > size_) return CannotParse(root_, size_);
    if (has_hidden_ && path == kHidden) FoundHidden(length_at, length);
    const auto outer = input_.PushLimit(static_cast<int>(length));
    if (input_.BytesUntilLimit() != static_cast<int>(length)) return CannotParse(root_, size_);  // beyond the outer message
    absl::Status status = packed ? Packed(path) : Walk(*field.message_type(), path);
    input_.PopLimit(outer);
    return status;
  }

  void FoundHidden(size_t length_at, uint32_t length) {
    ++hidden_pieces_;
    hidden_.length_at = length_at;
    hidden_.begin = at();
    hidden_.end = hidden_.begin + length;
    as_short_ = as_short_ && hidden_.begin - length_at == CodedOutputStream::VarintSize32(length);
  }

  absl::Status HiddenData(size_t tag_at) {
    uint32_t length = 0;
    if (!input_.ReadVarint32(&length) || length > size_) return CannotParse(root_, size_);
    ++data_pieces_;
    hidden_.field_at = tag_at;
    hidden_.data_at = at();
    hidden_.bytes = length;
    // Where the parser never sees tag and length, they must be such as it takes without doubt.
    as_short_ = as_short_ && hidden_.data_at - tag_at == 1 + CodedOutputStream::VarintSize32(length);
    return input_.Skip(static_cast<int>(length)) ? absl::OkStatus() : CannotParse(root_, size_);
  }

  // Packable fields of moe.v1 are varints.
  absl::Status Packed(Path path) {
    while (input_.BytesUntilLimit() > 0) {
      uint64_t value = 0;
      if (!input_.ReadVarint64(&value)) return CannotParse(root_, size_);
      if (absl::Status status = Count(path); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Count(Path path) {
    auto at = counts_.begin();
    while (at != counts_.end() && at->first != path) ++at;
    if (at == counts_.end()) at = counts_.insert(at, {path, 0});
    if (++at->second <= kMaxDimensions) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(root_, path), ": wanted at most ", kMaxDimensions, " entries, got ", at->second, " or more"));
  }

  google::protobuf::io::CodedInputStream input_;
  const size_t size_;
  const Descriptor& root_;
  const bool has_hidden_;
  std::vector<std::pair<Path, int>> counts_;  // entries by path, over all pieces of a message that came in pieces; few
  HiddenPlace hidden_;                 // the last that was seen
  int hidden_pieces_ = 0, data_pieces_ = 0;
  bool as_short_ = true;               // tag and lengths of hidden's data
};

}  // namespace

absl::Status CannotParse(const Descriptor& message, size_t bytes) {
  return absl::InvalidArgumentError(
      absl::StrCat("wanted a serialised ", message.full_name(), ", got ", bytes, " bytes that cannot be parsed as one"));
}

absl::Status CheckBytes(google::protobuf::io::ZeroCopyInputStream* stream, size_t size, const Descriptor& message,
                        std::optional<HiddenPlace>* hidden) {
  Walker walker(stream, size, message);
  absl::Status status = walker.Walk(message);
  if (hidden != nullptr) *hidden = walker.hidden();
  return status;
}

}  // namespace moed
