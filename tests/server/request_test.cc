// Requests as bytes: what is refused before a message is built, and the budget of bytes in flight.
#include <catch2/catch.hpp>
#include <random>
#include <string>

#include "proto/moe/v1/moe.pb.h"
#include "server/request.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using Catch::Matchers::Contains;

absl::Status Parse(const std::string& bytes, google::protobuf::Message* message) {
  const grpc::Slice slice(bytes);
  grpc::ByteBuffer buffer(&slice, 1);
  return ParseRequest(&buffer, message);
}

void CheckRefused(const std::string& bytes, const std::string& text) {
  v1::ForwardRequest request;
  const absl::Status status = Parse(bytes, &request);
  CHECK(absl::IsInvalidArgument(status));
  CHECK_THAT(std::string(status.message()), Contains(text));
  CHECK(request.ByteSizeLong() == 0);
}

std::string Field(int number, const std::string& value) {
  REQUIRE(value.size() < 128);
  return std::string({static_cast<char>(number << 3 | 2), static_cast<char>(value.size())}) + value;
}

}  // namespace

TEST_CASE("A message survives the way through its bytes") {
  v1::ForwardRequest request, parsed;
  request.set_model("tiny");
  request.set_layer(3);
  for (v1::Tensor* tensor : {request.mutable_hidden(), request.mutable_top_k()->mutable_ids()}) {
    tensor->set_dtype(v1::DTYPE_F32);
    for (int i = 0; i < 8; ++i) tensor->add_shape(int64_t{1} << (7 * i));
    tensor->set_data(std::string(100'000, 'x'));
  }
  request.set_return_routing(true);
  REQUIRE(Parse(request.SerializeAsString(), &parsed).ok());
  CHECK(parsed.SerializeAsString() == request.SerializeAsString());
  CHECK(Parse("", &parsed).ok());
}

TEST_CASE("A shape of more than 8 entries is refused, packed, unpacked, or in pieces") {
  CheckRefused(Field(3, Field(2, std::string(9, '\1'))), "hidden.shape: wanted at most 8 entries");
  std::string unpacked;
  for (int i = 0; i < 9; ++i) unpacked += "\x10\x01";
  CheckRefused(Field(3, unpacked), "hidden.shape: wanted at most 8 entries");
  const std::string piece = Field(4, Field(2, Field(2, std::string(5, '\1'))));
  CheckRefused(piece + piece, "top_k.weights.shape: wanted at most 8 entries");
}

TEST_CASE("Unknown fields, other types, groups and cut messages are refused") {
  CheckRefused(Field(15, "a"), "field 15");
  CheckRefused(Field(3, Field(7, "a")), "moe.v1.Tensor");
  CheckRefused(Field(2, "a"), "field 2");  // layer is a number
  CheckRefused("\x1b\x1c", "field 3");     // a group where a message should be
  CheckRefused(Field(3, "\x1a\x20"), "cannot be parsed");
  CheckRefused("\x1a\x7f", "cannot be parsed");
  CheckRefused(std::string(1, '\0'), "cannot be parsed");
}

TEST_CASE("Random bytes never pass as a request of any kind") {
  std::mt19937 random(3);
  v1::StatusRequest status;
  v1::ExplainRequest explain;
  v1::SelfCheckRequest self_check;
  int passed = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string bytes(256, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    for (google::protobuf::Message* message : {static_cast<google::protobuf::Message*>(&status),
                                               static_cast<google::protobuf::Message*>(&explain),
                                               static_cast<google::protobuf::Message*>(&self_check)}) {
      if (!absl::IsInvalidArgument(Parse(bytes, message))) ++passed;
    }
  }
  CHECK(passed == 0);
}

TEST_CASE("The budget refuses what exceeds it, with the numbers, and takes it when room was made") {
  ByteBudget budget(100);
  REQUIRE(budget.Take(60).ok());
  const absl::Status status = budget.Take(41);
  CHECK(absl::IsResourceExhausted(status));
  for (const char* number : {"100", "60", "41"}) CHECK_THAT(std::string(status.message()), Contains(number));
  CHECK(budget.Take(40).ok());
  budget.Give(60);
  CHECK(budget.Take(41).ok());
}

}  // namespace moed
