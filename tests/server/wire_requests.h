// A server's one model, a request to it that is right, and what the checks say of one that was changed.
#ifndef MOED_TESTS_SERVER_WIRE_REQUESTS_H_
#define MOED_TESTS_SERVER_WIRE_REQUESTS_H_

#include <catch2/catch.hpp>

#include <functional>
#include <string>
#include <vector>

#include "proto/moe/v1/moe.pb.h"
#include "server/wire.h"

namespace moed::testing {

namespace v1 = moe::v1;

inline constexpr int kHidden = 8;
inline constexpr int kExperts = 4;
inline constexpr int kRows = 3;
inline constexpr int kSlots = 2;

inline ModelTable OneModel() {
  ModelStatus model;
  model.name = "tiny";
  model.hidden = kHidden;
  model.num_experts = kExperts;
  model.top_k = kSlots;
  for (const int layer : {1, 2, 3, 7}) {
    LayerStatus status;
    status.layer = layer;
    model.layers.push_back(status);
  }
  return ModelTable({model});
}

inline void SetTensor(v1::DType dtype, int64_t rows, int64_t cols, size_t bytes, v1::Tensor* tensor) {
  tensor->Clear();
  tensor->set_dtype(dtype);
  tensor->add_shape(rows);
  tensor->add_shape(cols);
  tensor->set_data(std::string(bytes, '\0'));
}

// A correct request with ids.
inline v1::ForwardRequest Good() {
  v1::ForwardRequest request;
  request.set_layer(1);
  SetTensor(v1::DTYPE_BF16, kRows, kHidden, kRows * kHidden * 2, request.mutable_hidden());
  SetTensor(v1::DTYPE_I32, kRows, kSlots, kRows * kSlots * 4, request.mutable_top_k()->mutable_ids());
  SetTensor(v1::DTYPE_F32, kRows, kSlots, kRows * kSlots * 4, request.mutable_top_k()->mutable_weights());
  return request;
}

// The error of Good() after `change`.
inline absl::Status ErrorOf(const std::function<void(v1::ForwardRequest*)>& change) {
  v1::ForwardRequest request = Good();
  change(&request);
  return CheckForward(request, OneModel()).status();
}

inline void CheckInvalid(const std::function<void(v1::ForwardRequest*)>& change, const std::vector<std::string>& parts) {
  const absl::Status status = ErrorOf(change);
  INFO(status.ToString());
  CHECK(absl::IsInvalidArgument(status));
  for (const std::string& part : parts) CHECK_THAT(std::string(status.message()), Catch::Matchers::Contains(part));
}

}  // namespace moed::testing

#endif  // MOED_TESTS_SERVER_WIRE_REQUESTS_H_
