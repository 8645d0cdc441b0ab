#include "client/message_call.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/messages.h"
#include "moe/v1/moe.pb.h"

namespace moed::client {
namespace {

namespace v1 = moe::v1;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;
using google::protobuf::io::StringOutputStream;

// Appends the tag and the length of a field of `bytes` bytes.
void AppendLength(int field, uint64_t bytes, std::string* out) {
  StringOutputStream stream(out);
  CodedOutputStream coded(&stream);
  coded.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
  coded.WriteVarint64(bytes);
}

// Everything of the request up to the bytes of the hidden states, which come last.
std::string RequestHead(const ForwardCall& call) {
  v1::ForwardRequest request;
  FillWire(call, &request);
  const size_t bytes = call.hidden.data.size();
  std::string tensor = request.hidden().SerializeAsString();
  if (bytes > 0) AppendLength(v1::Tensor::kDataFieldNumber, bytes, &tensor);
  request.clear_hidden();
  std::string head = request.SerializeAsString();
  AppendLength(v1::ForwardRequest::kHiddenFieldNumber, tensor.size() + bytes, &head);
  return head + tensor;
}

// A slice of the caller's memory that owns what keeps it.
grpc::Slice KeptSlice(std::span<const uint8_t> memory, std::shared_ptr<const void> keep) {
  auto* const owner = new std::shared_ptr<const void>(std::move(keep));
  return grpc::Slice(const_cast<uint8_t*>(memory.data()), memory.size(),
                     [](void* held) { delete static_cast<std::shared_ptr<const void>*>(held); }, owner);
}

// Reads an answer: the output's data to their place, all else as a message.
class ResponseReader {
 public:
  // `bytes` of data are expected.
  ResponseReader(size_t bytes, std::span<uint8_t> output) : bytes_(bytes), output_(output) {}

  // False for what is no ForwardResponse.
  bool Read(google::protobuf::io::ZeroCopyInputStream* stream) {
    CodedInputStream in(stream);
    in.SetTotalBytesLimit(INT32_MAX);
    StringOutputStream rest_stream(&rest_);
    CodedOutputStream rest(&rest_stream);
    while (const uint32_t tag = in.ReadTag()) {
      const bool output = tag == WireFormatLite::MakeTag(v1::ForwardResponse::kOutputFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
      if (output ? !ReadOutput(&in) : !CopyField(tag, &in, &rest)) return false;
    }
    if (!in.ConsumedEntireMessage()) return false;
    rest.Trim();
    return message_.ParseFromString(rest_) && tensor_.ParseFromString(tensor_rest_);
  }

  const v1::ForwardResponse& message() const { return message_; }  // without its output
  const v1::Tensor& tensor() const { return tensor_; }   // the output without its data
  size_t data_bytes() const { return data_bytes_; }
  std::string TakeData() { return std::move(data_); }    // when there was no place for them

 private:
  bool ReadOutput(CodedInputStream* in) {
    uint32_t length = 0;
    if (!in->ReadVarint32(&length)) return false;
    const CodedInputStream::Limit limit = in->PushLimit(static_cast<int>(length));
    StringOutputStream rest_stream(&tensor_rest_);
    CodedOutputStream rest(&rest_stream);
    while (const uint32_t tag = in->ReadTag()) {
      const bool data = tag == WireFormatLite::MakeTag(v1::Tensor::kDataFieldNumber, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
      if (data ? !ReadData(in) : !CopyField(tag, in, &rest)) return false;
    }
    const bool whole = in->ConsumedEntireMessage();
    in->PopLimit(limit);
    return whole;
  }

  bool ReadData(CodedInputStream* in) {
    uint32_t length = 0;
    if (!in->ReadVarint32(&length)) return false;
    data_bytes_ = length;
    if (data_bytes_ != bytes_) return in->Skip(static_cast<int>(length));  // the caller will say what is wrong
    if (output_.data() != nullptr) return in->ReadRaw(output_.data(), static_cast<int>(length));
    return in->ReadString(&data_, static_cast<int>(length));
  }

  // Copies one field as it is.
  static bool CopyField(uint32_t tag, CodedInputStream* in, CodedOutputStream* out) {
    out->WriteTag(tag);
    switch (WireFormatLite::GetTagWireType(tag)) {
      case WireFormatLite::WIRETYPE_VARINT: {
        uint64_t value = 0;
        return in->ReadVarint64(&value) && (out->WriteVarint64(value), true);
      }
      case WireFormatLite::WIRETYPE_FIXED64: {
        uint64_t value = 0;
        return in->ReadLittleEndian64(&value) && (out->WriteLittleEndian64(value), true);
      }
      case WireFormatLite::WIRETYPE_FIXED32: {
        uint32_t value = 0;
        return in->ReadLittleEndian32(&value) && (out->WriteLittleEndian32(value), true);
      }
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED: {
        uint32_t length = 0;
        std::string bytes;
        if (!in->ReadVarint32(&length) || !in->ReadString(&bytes, static_cast<int>(length))) return false;
        out->WriteVarint32(length);
        out->WriteString(bytes);
        return true;
      }
      default: return false;  // groups are in no message of this contract
    }
  }

  const size_t bytes_;
  const std::span<uint8_t> output_;
  std::string rest_, tensor_rest_, data_;
  v1::ForwardResponse message_;
  v1::Tensor tensor_;
  size_t data_bytes_ = 0;
};

}  // namespace

grpc::ByteBuffer EncodeRequest(const ForwardCall& call) {
  const std::span<const uint8_t> hidden = call.hidden.data;
  const grpc::Slice slices[] = {grpc::Slice(RequestHead(call)), call.hidden_owner == nullptr
                                                                    ? grpc::Slice(hidden.data(), hidden.size())
                                                                    : KeptSlice(hidden, call.hidden_owner)};
  return grpc::ByteBuffer(slices, hidden.empty() ? 1 : 2);
}

absl::StatusOr<ForwardResult> DecodeResponse(const ForwardCall& call, grpc::ByteBuffer* response, std::span<uint8_t> output) {
  ResponseReader reader(OutputBytes(call), output);
  grpc::ProtoBufferReader stream(response);
  if (!stream.status().ok() || !reader.Read(&stream)) {
    return absl::InternalError(absl::StrCat("answer: ", response->Length(), " bytes are no ForwardResponse"));
  }
  if (absl::Status status = CheckOutput(call, reader.tensor(), reader.data_bytes()); !status.ok()) return status;
  absl::StatusOr<ForwardResult> result = ResultOf(call, reader.message());
  if (result.ok()) result->data = reader.TakeData();
  return result;
}

}  // namespace moed::client
