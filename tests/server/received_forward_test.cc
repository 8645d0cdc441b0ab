// Forward requests whose hidden states are kept out of the parse: the same requests as the ordinary parse gives, with the same
// errors, whatever the bytes and however they are cut into slices.
#include <catch2/catch.hpp>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/moe/v1/moe.pb.h"
#include "server/received_forward.h"
#include "server/request.h"
#include "server/wire.h"

namespace moed {
namespace {

namespace v1 = moe::v1;

constexpr int kHidden = 4;
constexpr int kRows = 3;
constexpr size_t kHiddenBytes = kRows * kHidden * 2;

ModelTable OneModel() {
  ModelStatus model;
  model.name = "tiny";
  model.hidden = kHidden;
  model.num_experts = 4;
  model.top_k = 2;
  model.layers.resize(1);
  return ModelTable({model});
}

std::string Field(int number, const std::string& value) {
  REQUIRE(value.size() < 128);
  return std::string({static_cast<char>(number << 3 | 2), static_cast<char>(value.size())}) + value;
}

const std::string kType = "\x08\x02", kShape = "\x12\x02\x03\x04", kLayer = std::string("\x10\x00", 2), kRoutedOnly = "\x38\x01";
const std::string kModel = "\x0a\x04tiny", kId = "\x4a\x05" "an id";

std::string Values() {
  std::string values(kHiddenBytes, '\0');
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<char>(i * 37 + 1);
  return values;
}
std::string Data() { return Field(3, Values()); }

v1::ForwardRequest Good() {
  v1::ForwardRequest request;
  request.set_model("tiny");
  request.set_request_id("an id");
  const auto set = [](v1::DType dtype, int64_t cols, size_t bytes, v1::Tensor* tensor) {
    tensor->set_dtype(dtype);
    tensor->add_shape(kRows);
    tensor->add_shape(cols);
    tensor->set_data(bytes == kHiddenBytes ? Values() : std::string(bytes, '\0'));
  };
  set(v1::DTYPE_BF16, kHidden, kHiddenBytes, request.mutable_hidden());
  set(v1::DTYPE_I32, 1, kRows * 4, request.mutable_top_k()->mutable_ids());
  set(v1::DTYPE_F32, 1, kRows * 4, request.mutable_top_k()->mutable_weights());
  return request;
}

// `bytes` in slices that end at `cuts`, which ascend.
grpc::ByteBuffer Cut(const std::string& bytes, std::vector<size_t> cuts) {
  cuts.push_back(bytes.size());
  std::vector<grpc::Slice> slices;
  size_t at = 0;
  for (size_t cut : cuts) {
    slices.emplace_back(bytes.data() + at, cut - at);
    at = cut;
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

struct Outcome {
  absl::Status status;
  std::string message;  // serialised, whole
  size_t held_back = 0;
  absl::Status checked;
};

Outcome Ordinary(const std::string& bytes) {
  grpc::ByteBuffer buffer = Cut(bytes, {});
  v1::ForwardRequest request;
  Outcome outcome;
  outcome.status = ParseRequest(&buffer, &request);
  if (!outcome.status.ok()) return outcome;
  outcome.message = request.SerializeAsString();
  outcome.checked = CheckForward(request, OneModel()).status();
  return outcome;
}

Outcome HeldBack(const std::string& bytes, const std::vector<size_t>& cuts) {
  grpc::ByteBuffer buffer = Cut(bytes, cuts);
  ReceivedForward received;
  Outcome outcome;
  outcome.status = ParseRequest(&buffer, &received);
  if (!outcome.status.ok()) return outcome;
  outcome.held_back = received.hidden_bytes();
  const absl::StatusOr<CheckedForward> checked = CheckForward(received.message(), OneModel(), received.hidden_bytes());
  outcome.checked = checked.status();
  v1::ForwardRequest whole = received.message();
  if (outcome.held_back > 0) {
    CHECK(whole.hidden().data().empty());
    CHECK((!checked.ok() || checked->call.hidden.data == nullptr));
    std::string data(outcome.held_back, '\0');
    received.PlaceHidden(reinterpret_cast<std::byte*>(data.data()));
    CHECK(received.WaitPast(data.size() - 1) == data.size());
    whole.mutable_hidden()->set_data(data);
  }
  outcome.message = whole.SerializeAsString();
  return outcome;
}

// Whether both ways agree; returns the second.
Outcome Compare(const std::string& bytes, const std::vector<size_t>& cuts = {}) {
  const Outcome want = Ordinary(bytes);
  Outcome got = HeldBack(bytes, cuts);
  CHECK(got.status == want.status);
  CHECK(got.checked == want.checked);
  CHECK(got.message == want.message);
  return got;
}

// A request by hand, which is as good as any.
void CheckHeldBack(const std::string& bytes) {
  const Outcome got = Compare(bytes);
  CHECK(got.status.ok());
  CHECK(got.checked.ok());
  CHECK(got.held_back == kHiddenBytes);
}

void CheckNotHeldBack(const std::string& bytes) {
  const Outcome got = Compare(bytes);
  INFO(got.status.ToString());
  CHECK(got.status.ok());
  CHECK(got.held_back == 0);
}

void CheckRefused(const std::string& bytes) {
  const Outcome got = Compare(bytes);
  CHECK(absl::IsInvalidArgument(got.status));
}

// No message, or one that no call can be made of.
void CheckUnfit(const std::string& bytes) {
  const Outcome got = Compare(bytes);
  CHECK((!got.status.ok() || !got.checked.ok()));
}

}  // namespace

TEST_CASE("The hidden states are held back wherever the message is cut") {
  const std::string bytes = Good().SerializeAsString();
  for (size_t first = 0; first <= bytes.size(); ++first) {
    for (size_t second = first; second <= bytes.size(); ++second) {
      const Outcome got = HeldBack(bytes, {first, second});
      if (got.message == bytes && got.held_back == kHiddenBytes && got.checked.ok()) continue;
      FAIL_CHECK("cut at " << first << " and " << second);
    }
  }
  for (size_t step : {1, 2, 3, 7, 23, 24, 40}) {
    std::vector<size_t> cuts;
    for (size_t at = step; at < bytes.size(); at += step) cuts.push_back(at);
    CHECK(HeldBack(bytes, cuts).message == bytes);
    CHECK(HeldBack(bytes, cuts).held_back == kHiddenBytes);
  }
}

TEST_CASE("The hidden states are held back in any order of the fields") {
  const std::string hidden = Field(3, kType + kShape + Data());
  CheckHeldBack(hidden + kModel + kLayer + kRoutedOnly + kId);
  CheckHeldBack(kModel + kLayer + kRoutedOnly + kId + hidden);
  CheckHeldBack(kId + kModel + hidden + kRoutedOnly);
  CheckHeldBack(hidden);
  CheckHeldBack(Field(3, Data() + kType + kShape));
  CheckHeldBack(Field(3, kType + Data() + kShape));
}

TEST_CASE("Hidden twice, in pieces, with data twice, empty or padded takes the ordinary parse") {
  const std::string body = kType + kShape + Data();
  CheckNotHeldBack(Field(3, body) + Field(3, kType + Data()));
  CheckNotHeldBack(Field(3, kType + kShape) + kModel + Field(3, Data()));
  CheckNotHeldBack(Field(3, Data()) + Field(3, kType + kShape));
  CheckNotHeldBack(Field(3, kType + kShape + Field(3, "other") + Data()));
  CheckNotHeldBack(Field(3, body + Field(3, "")));
  CheckNotHeldBack(Field(3, kType + kShape + Field(3, "")));
  CheckNotHeldBack(Field(3, kType + kShape));
  CheckNotHeldBack(Field(3, ""));
  CheckNotHeldBack(kModel);
  CheckNotHeldBack("");
  // The same numbers in more bytes than they need.
  const std::string long_length = std::string("\x1a\x98", 2) + std::string("\0", 1) + Values();
  CheckNotHeldBack(Field(3, kType + kShape + long_length));
  CheckNotHeldBack(Field(3, kType + kShape + std::string("\x9a\x80\x00\x18", 4) + Values()));
  CheckNotHeldBack(std::string("\x1a", 1) + static_cast<char>(body.size() | 0x80) + std::string("\0", 1) + body);
}

TEST_CASE("Lengths in more bytes than 32 bits take are refused or taken as by the ordinary parse") {
  const std::string body = kType + kShape + Data();
  for (size_t padding : {1, 2, 3, 4, 5, 8, 9}) {
    const std::string zeros = std::string(padding - 1, '\x80') + std::string("\0", 1);
    const std::string data = std::string("\x1a\x98", 2) + zeros + Values();
    Compare(Field(3, kType + kShape + data));
    Compare(std::string("\x1a", 1) + static_cast<char>(body.size() | 0x80) + zeros + body);
    Compare(Field(3, kType + kShape + std::string("\x9a", 1) + zeros + "\x18" + Values()));
  }
}

TEST_CASE("Unknown fields, other types, cut messages and lengths that lie are refused beside held-back hidden states") {
  const std::string body = kType + kShape + Data(), hidden = Field(3, body);
  CheckRefused(hidden + Field(15, "a"));
  CheckRefused(Field(15, "a") + hidden);
  CheckRefused(Field(3, body + Field(7, "a")));
  CheckRefused(hidden + Field(2, "a"));
  CheckRefused(hidden + "\x1b\x1c");
  CheckRefused(hidden + Field(1, "\xff"));  // a name that is no UTF-8
  const std::string bytes = kModel + hidden;
  for (size_t size = kModel.size() + 1; size < bytes.size(); ++size) CheckRefused(bytes.substr(0, size));
  for (int by : {-1, 1, 2, 100}) {
    std::string lie = bytes;
    lie[kModel.size() + 1] = static_cast<char>(lie[kModel.size() + 1] + by);  // hidden's length
    CheckUnfit(lie);
    lie = bytes;
    lie[bytes.size() - kHiddenBytes - 1] = static_cast<char>(kHiddenBytes + static_cast<size_t>(by));  // data's
    CheckUnfit(lie);
  }
}

TEST_CASE("Shape against bytes, and data beside device memory, are checked without the bytes") {
  const auto error = [](const std::string& tensor) { return std::string(Compare(Field(3, tensor)).checked.message()); };
  CHECK_THAT(error(kType + "\x12\x02\x04\x04" + Data()), Catch::Matchers::Contains("wanted 32 bytes") &&
                                                          Catch::Matchers::Contains("got 24 bytes"));
  CHECK_THAT(error(kType + kShape + Data() + Field(4, Field(1, std::string(64, 'h')))), Catch::Matchers::Contains("got several"));
}

TEST_CASE("Thousands of mutations come out as by the ordinary parse") {
  std::mt19937 random(17);
  const auto below = [&](size_t bound) { return bound == 0 ? size_t{0} : static_cast<size_t>(random()) % bound; };
  const std::string good = Good().SerializeAsString();
  int held_back = 0, whole = 0, refused = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good;
    for (size_t changes = 1 + below(3); changes > 0; --changes) {
      const size_t at = below(bytes.size()), length = below(bytes.size() - at);
      switch (below(6)) {
        case 0: bytes[at] = static_cast<char>(random()); break;
        case 1: bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8))); break;
        case 2: bytes.erase(at, 1 + below(4)); break;
        case 3: bytes.insert(at, 1 + below(4), static_cast<char>(random())); break;
        case 4: bytes += bytes.substr(at, length); break;
        case 5: bytes += Field(3, std::vector<std::string>{kType, kShape, Data(), ""}[below(4)]); break;
      }
      if (bytes.empty()) bytes = good;
    }
    std::vector<size_t> cuts(below(6));
    for (size_t& cut : cuts) cut = below(bytes.size() + 1);
    std::sort(cuts.begin(), cuts.end());
    const Outcome got = Compare(bytes, cuts);
    ++(!got.status.ok() ? refused : got.held_back > 0 ? held_back : whole);
  }
  CHECK(held_back > 1000);
  CHECK(whole > 1000);
  CHECK(refused > 1000);
}

namespace {

// A request of 3 MiB of hidden states; its slices count themselves.
struct Large {
  Large() : data(size_t{3} << 20, '\0') {
    std::mt19937 random(5);
    for (size_t i = 0; i < data.size(); i += 4) data[i] = static_cast<char>(random());
    v1::ForwardRequest request;
    request.mutable_hidden()->set_data(data);
    bytes = request.SerializeAsString();
  }
  // In slices of `step` bytes.
  std::shared_ptr<ReceivedForward> Receive(size_t step) {
    std::vector<grpc::Slice> slices;
    for (size_t at = 0; at < bytes.size(); at += step) {
      ++alive;
      const auto gone = [](void* count) { --*static_cast<std::atomic<int>*>(count); };
      slices.emplace_back(bytes.data() + at, std::min(step, bytes.size() - at), gone, &alive);
    }
    grpc::ByteBuffer buffer(slices.data(), slices.size());
    slices.clear();
    auto received = std::make_shared<ReceivedForward>();
    REQUIRE(received->Parse(&buffer).ok());
    REQUIRE(received->hidden_bytes() == data.size());
    return received;
  }

  std::string data, bytes;
  std::atomic<int> alive{0};
};

}  // namespace

TEST_CASE("Several threads copy the hidden states together, what is said to be there is there, and the slices go when told") {
  Large large;
  for (size_t step : {size_t{10'000}, size_t{200'000}, large.bytes.size()}) {
    for (int round = 0; round < 20; ++round) {
      const std::shared_ptr<ReceivedForward> received = large.Receive(step);
      CHECK(large.alive > 0);
      std::string copy(large.data.size(), '\0');
      received->PlaceHidden(reinterpret_cast<std::byte*>(copy.data()));
      int parts = 0, wrong = 0;
      std::thread helper([&] { received->TakePart(); });
      std::thread reader([&] {
        for (size_t read = 0; read < copy.size(); ++parts) {
          const size_t there = received->WaitPast(read);
          wrong += there <= read || there > copy.size() || copy.compare(read, there - read, large.data, read, there - read) != 0;
          read = std::max(read + 1, there);
        }
        wrong += received->WaitPast(0) != copy.size() || received->WaitPast(copy.size()) != copy.size();
      });
      received->TakePart();
      received->LetGo();
      CHECK(large.alive == 0);
      CHECK(copy == large.data);  // LetGo waited for the others
      helper.join();
      reader.join();
      CHECK(wrong == 0);
      CHECK(parts >= 1);
    }
  }
}

TEST_CASE("Who waits for a part of the hidden states gets them in order, without any other thread, and copies no more than that") {
  Large large;
  const std::shared_ptr<ReceivedForward> received = large.Receive(65536);
  std::string copy(large.data.size(), '\0');
  received->PlaceHidden(reinterpret_cast<std::byte*>(copy.data()));
  for (const size_t past : {size_t{0}, size_t{100'000}, size_t{100'000}, size_t{2} << 20}) {
    const size_t there = received->WaitPast(past);
    CHECK(there > past);
    CHECK(there <= past + (size_t{64} << 10));
    CHECK(copy.compare(0, there, large.data, 0, there) == 0);
    CHECK(std::all_of(copy.begin() + static_cast<ptrdiff_t>(there), copy.end(), [](char c) { return c == 0; }));
  }
  CHECK(large.alive > 0);
}

TEST_CASE("Hidden states that nobody wanted any more go with the last who holds them, also while others copy") {
  Large large;
  for (int round = 0; round < 20; ++round) {
    struct Job {
      std::shared_ptr<ReceivedForward> request;
      std::string copy;
    };
    auto job = std::make_shared<Job>(Job{large.Receive(65536), std::string(large.data.size(), '\0')});
    job->request->PlaceHidden(reinterpret_cast<std::byte*>(job->copy.data()));
    std::vector<std::thread> helpers;
    for (int i = 0; i < 2; ++i) {
      helpers.emplace_back([held = std::shared_ptr<SharedCopy>(job, job->request.get())] { held->TakePart(); });
    }
    if (round % 2 == 0) job->request->WaitPast(0);
    job.reset();  // a call that failed
    for (std::thread& helper : helpers) helper.join();
    helpers.clear();
    CHECK(large.alive == 0);
  }
}

}  // namespace moed
