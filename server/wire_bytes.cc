// A walk over the bytes of a request that builds nothing: what a parse would store in many times the memory of the bytes
// (long lists of dimensions, unknown fields) is refused first.
#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format.h>

#include <map>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "server/wire.h"

namespace moed {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::internal::WireFormat;
using google::protobuf::internal::WireFormatLite;

constexpr int kMaxDimensions = 8;

// The schema does not recurse, so neither depth nor the number of paths can grow with the input.
class Walker {
 public:
  Walker(google::protobuf::io::ZeroCopyInputStream* stream, size_t size, const Descriptor& root)
      : input_(stream), size_(size), root_(root) {}

  // After a Walk of the whole message.
  std::optional<HiddenPlace> hidden() const {
    if (hidden_pieces_ != 1 || data_pieces_ != 1 || !as_short_ || hidden_.bytes == 0) return std::nullopt;
    return hidden_;
  }

  absl::Status Walk(const Descriptor& message, const std::string& path) {
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
      const std::string name = absl::StrCat(path, path.empty() ? "" : ".", field->name());
      if (absl::Status status = Value(*field, name, packed, tag, tag_at); !status.ok()) return status;
    }
    return input_.ConsumedEntireMessage() ? absl::OkStatus() : CannotParse(root_, size_);
  }

 private:
  size_t at() const { return static_cast<size_t>(input_.CurrentPosition()); }

  absl::Status Value(const FieldDescriptor& field, const std::string& name, bool packed, uint32_t tag, size_t tag_at) {
    if (field.type() == FieldDescriptor::TYPE_BYTES && name == "hidden.data") return HiddenData(tag_at);
    if (!packed && field.cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) {
      if (field.is_repeated()) {
        if (absl::Status status = Count(name); !status.ok()) return status;
      }
      return WireFormat::SkipField(&input_, tag, nullptr) ? absl::OkStatus() : CannotParse(root_, size_);
    }
    const size_t length_at = at();
    uint32_t length = 0;
    if (!input_.ReadVarint32(&length) || length > size_) return CannotParse(root_, size_);
    if (name == "hidden") FoundHidden(length_at, length);
    const auto outer = input_.PushLimit(static_cast<int>(length));
    if (input_.BytesUntilLimit() != static_cast<int>(length)) return CannotParse(root_, size_);  // beyond the outer message
    absl::Status status = packed ? Packed(name) : Walk(*field.message_type(), name);
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
  absl::Status Packed(const std::string& name) {
    while (input_.BytesUntilLimit() > 0) {
      uint64_t value = 0;
      if (!input_.ReadVarint64(&value)) return CannotParse(root_, size_);
      if (absl::Status status = Count(name); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Count(const std::string& name) {
    if (++counts_[name] <= kMaxDimensions) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": wanted at most ", kMaxDimensions, " entries, got ", counts_[name], " or more"));
  }

  google::protobuf::io::CodedInputStream input_;
  const size_t size_;
  const Descriptor& root_;
  std::map<std::string, int> counts_;  // entries by path, over all pieces of a message that came in pieces
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
  absl::Status status = walker.Walk(message, "");
  if (hidden != nullptr) *hidden = walker.hidden();
  return status;
}

}  // namespace moed
