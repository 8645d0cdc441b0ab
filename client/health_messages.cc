#include "client/health_messages.h"

#include <google/protobuf/unknown_field_set.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

namespace moed::client {

grpc::ByteBuffer EncodeHealthRequest(const std::string& service) {
  google::protobuf::UnknownFieldSet fields;
  if (!service.empty()) fields.AddLengthDelimited(1, service);
  std::string bytes;
  fields.SerializeToString(&bytes);
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

absl::StatusOr<Health> DecodeHealthResponse(const grpc::ByteBuffer& bytes) {
  std::vector<grpc::Slice> slices;
  std::string flat;
  if (!bytes.Dump(&slices).ok()) return absl::InternalError("health answer: wanted readable bytes, got none");
  for (const grpc::Slice& slice : slices) flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  google::protobuf::UnknownFieldSet fields;
  if (!fields.ParseFromString(flat)) {
    return absl::InternalError("health answer: wanted a HealthCheckResponse, got other bytes");
  }
  uint64_t value = 0;
  for (int i = 0; i < fields.field_count(); ++i) {
    const google::protobuf::UnknownField& field = fields.field(i);
    const bool is_status = field.number() == 1 && field.type() == google::protobuf::UnknownField::TYPE_VARINT;
    if (is_status) value = field.varint();  // the last one counts, as everywhere in protobuf
  }
  switch (value) {
    case 1: return Health::kServing;
    case 2: return Health::kNotServing;
    case 3: return Health::kServiceUnknown;
    default: return Health::kUnknown;
  }
}

}  // namespace moed::client
