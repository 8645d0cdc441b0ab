#include "server/request.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "server/wire.h"

namespace moed {

absl::Status ByteBudget::Take(size_t bytes) {
  const size_t used = used_.fetch_add(bytes);
  if (used + bytes <= limit_) return absl::OkStatus();
  used_ -= bytes;
  return absl::ResourceExhaustedError(absl::StrCat("requests in flight: wanted at most ", limit_, " bytes, got ", used,
                                                   " in flight and ", bytes, " of this request"));
}

absl::Status ParseRequest(grpc::ByteBuffer* bytes, google::protobuf::Message* message) {
  const size_t size = bytes->Length();
  if (size == 0) return absl::OkStatus();  // a message without fields
  {
    grpc::ProtoBufferReader reader(bytes);
    if (absl::Status status = CheckBytes(&reader, size, *message->GetDescriptor()); !status.ok()) return status;
  }
  grpc::ProtoBufferReader reader(bytes);
  if (!reader.status().ok() || !message->ParseFromZeroCopyStream(&reader)) {
    return CannotParse(*message->GetDescriptor(), size);
  }
  bytes->Clear();
  return absl::OkStatus();
}

grpc::ByteBuffer Serialised(const google::protobuf::Message& message) {
  const grpc::Slice slice(message.SerializeAsString());
  return grpc::ByteBuffer(&slice, 1);
}

}  // namespace moed
