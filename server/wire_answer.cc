// The pieces of a forward's answer.
#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstdint>
#include <string>

#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

v1::DType WireType(DType dtype) {
  switch (dtype) {
    case DType::kF32: return v1::DTYPE_F32;
    case DType::kBf16: return v1::DTYPE_BF16;
    case DType::kF16: return v1::DTYPE_F16;
  }
  return v1::DTYPE_UNSPECIFIED;
}

// Elements of 4 bytes.
void FillTensor(v1::DType dtype, int64_t rows, int64_t cols, const void* data, v1::Tensor* out) {
  out->set_dtype(dtype);
  out->add_shape(rows);
  out->add_shape(cols);
  out->set_data(data, static_cast<size_t>(rows * cols) * sizeof(int32_t));
}

}  // namespace

v1::ForwardResponse BeginAnswer(const v1::ForwardRequest& request) {
  v1::ForwardResponse answer;
  answer.set_request_id(request.request_id());
  answer.mutable_timing();
  return answer;
}

void EndAnswer(const ForwardInfo& info, int64_t rows, v1::ForwardResponse* answer) {
  answer->set_backend(info.backend);
  answer->set_scheme(info.scheme);
  answer->set_generation(info.generation);
  answer->set_weights_id(info.weights_id);
  answer->mutable_timing()->set_compute_us(info.compute_us);
  answer->mutable_timing()->set_batch_rows(info.batch_rows);
  if (!info.want_routing) return;
  FillTensor(v1::DTYPE_I32, rows, info.top_k, info.ids.data(), answer->mutable_routing()->mutable_ids());
  FillTensor(v1::DTYPE_F32, rows, info.top_k, info.weights.data(), answer->mutable_routing()->mutable_weights());
}

std::string OutputHead(DType dtype, int64_t rows, int64_t cols, bool with_data) {
  using google::protobuf::internal::WireFormatLite;
  const uint64_t bytes = with_data ? MutableTensorView{nullptr, dtype, rows, cols}.bytes() : 0;
  v1::Tensor tensor;
  tensor.set_dtype(WireType(dtype));
  tensor.add_shape(rows);
  tensor.add_shape(cols);
  std::string body = tensor.SerializeAsString();
  const auto append = [](std::string* out, int field, uint64_t length) {
    google::protobuf::io::StringOutputStream stream(out);
    google::protobuf::io::CodedOutputStream coded(&stream);
    coded.WriteTag(WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED));
    coded.WriteVarint64(length);
  };
  append(&body, v1::Tensor::kDataFieldNumber, bytes);
  std::string head;
  append(&head, v1::ForwardResponse::kOutputFieldNumber, body.size() + bytes);
  return head + body;
}

}  // namespace moed
