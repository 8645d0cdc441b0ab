// Routings of the GPU benchmark: random ones are what they claim to be, those of a file are checked.
#include <catch2/catch.hpp>

#include <numeric>
#include <set>

#include "bench/gpu_routing.h"
#include "tests/support/temp_dir.h"

namespace moed::bench {
namespace {

using testing::TempDir;

template <typename T>
std::span<const uint8_t> BytesOf(const std::vector<T>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T)};
}

// A file with one routing of two tokens and two slots, "small.m2.r1".
Routings Written(const TempDir& dir, const std::vector<int32_t>& ids) {
  const std::string path = dir.File("routing.safetensors");
  const absl::StatusOr<std::unique_ptr<SafetensorsWriter>> file =
      SafetensorsWriter::Create(path, {{"small.m2.r1.ids", StDtype::kI32, {2, 2}}, {"small.m2.r1.weights", StDtype::kF32, {2, 2}}});
  REQUIRE(file.ok());
  REQUIRE((*file)->Append(BytesOf(ids)).ok());
  REQUIRE((*file)->Append(BytesOf(std::vector<float>{0.25f, 0.75f, 0.5f, 0.5f})).ok());
  REQUIRE((*file)->Finish().ok());
  absl::StatusOr<Routings> routings = Routings::Open(path);
  REQUIRE(routings.ok());
  return *std::move(routings);
}

std::string Ending(const absl::StatusOr<Routing>& routing) {
  const std::string text(routing.status().message());
  return text.substr(text.find("routing.safetensors"));
}

}  // namespace

TEST_CASE("random routings choose different experts a row with weights that add up to 1, the same for the same key") {
  const RoutingKey key = {"any", 50, 3, 16, 8};
  const Routing routing = Routings().Get(key).value();
  REQUIRE(routing.ids.size() == 50 * 8);
  REQUIRE(routing.weights.size() == 50 * 8);
  std::set<int32_t> all;
  for (size_t row = 0; row < 50; ++row) {
    const auto first = routing.ids.begin() + static_cast<std::ptrdiff_t>(row * 8);
    const std::set<int32_t> experts(first, first + 8);
    CHECK(experts.size() == 8);
    CHECK(*experts.begin() >= 0);
    CHECK(*experts.rbegin() < 16);
    all.insert(experts.begin(), experts.end());
    float sum = 0.0f;
    for (size_t slot = 0; slot < 8; ++slot) sum += routing.weights[row * 8 + slot];
    CHECK(sum == Approx(1.0f));
  }
  CHECK(all.size() == 16);
  CHECK(Routings().Get(key)->ids == routing.ids);
  CHECK_FALSE(Routings().Get({"any", 50, 4, 16, 8})->ids == routing.ids);
}

TEST_CASE("the rows of experts are the slots that name them") {
  CHECK(RowsOfExperts({{3, 0, 3, 1}, {}}, 5) == std::vector<int32_t>{1, 1, 0, 2, 0});
  const std::vector<int32_t> rows = RowsOfExperts(Routings().Get({"any", 50, 3, 16, 8}).value(), 16);
  CHECK(std::accumulate(rows.begin(), rows.end(), 0) == 50 * 8);
}

TEST_CASE("a file's routing is found by shape, tokens and index") {
  const TempDir dir;
  const Routings routings = Written(dir, {3, 0, 1, 2});
  const absl::StatusOr<Routing> routing = routings.Get({"small", 2, 1, 4, 2});
  REQUIRE(routing.ok());
  CHECK(routing->ids == std::vector<int32_t>{3, 0, 1, 2});
  CHECK(routing->weights == std::vector<float>{0.25f, 0.75f, 0.5f, 0.5f});
}

TEST_CASE("a routing that a file does not have, or has in another shape or with other experts, is refused by its name") {
  const TempDir dir;
  const Routings routings = Written(dir, {3, 0, 1, 4});
  const absl::StatusOr<Routing> missing = routings.Get({"small", 2, 0, 8, 2});
  CHECK(missing.status().code() == absl::StatusCode::kNotFound);
  CHECK(Ending(missing) == "routing.safetensors has no tensor small.m2.r0.ids");
  CHECK(Ending(routings.Get({"small", 2, 1, 8, 4})) == "routing.safetensors: small.m2.r1.ids: wanted I32 [2, 4], got I32 [2, 2]");
  CHECK(Ending(routings.Get({"small", 2, 1, 4, 2})) ==
        "routing.safetensors: small.m2.r1.ids: row 1: wanted ids from 0 to 3, got 4");
  CHECK(routings.Get({"small", 2, 1, 5, 2}).ok());
}

}  // namespace moed::bench
