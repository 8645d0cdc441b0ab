// Every container of quantized matrices: a tensor that is wrong in one place is refused with that place named.
#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "engine/container_parts.h"
#include "tests/engine/container_bench.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

// A good projection "m.p" [16, 64] of `spec`, changed; the refusal's text has every one of `words`.
void CheckRefused(const ExpertSpec& spec, const std::function<void(CheckpointBuilder&)>& change,
                  const std::vector<std::string>& words, const std::function<void(DeclaredScheme&)>& redeclare = {}) {
  Bench bench;
  AddProjection(&bench.builder, "m.p", 16, 64, spec, Weights(7, 64));
  change(bench.builder);
  REQUIRE(bench.Open().ok());
  DeclaredScheme declared = DeclaredFor(spec);
  if (redeclare) redeclare(declared);
  const absl::StatusOr<LinearWeights> got = bench.Read(declared, "m.p", 16, 64);
  INFO(got.status().ToString());
  REQUIRE_FALSE(got.ok());
  for (const std::string& word : words) {
    INFO(word);
    CHECK(got.status().ToString().find(word) != std::string::npos);
  }
}

std::function<void(CheckpointBuilder&)> SetByte(const std::string& name, size_t at, uint8_t byte) {
  return [=](CheckpointBuilder& b) {
    REQUIRE(b.Find(name) != nullptr);
    b.Find(name)->bytes.at(at) = byte;
  };
}

}  // namespace

TEST_CASE("B22: NaN codes, NaN and negative scales, and scales that are not finite are refused with tensor and index") {
  CheckRefused({.format = ExpertFormat::kFp8}, SetByte("m.p.weight", 200, 0x7F), {"m.p.weight", "element 200", "0x7f"});
  CheckRefused({.format = ExpertFormat::kMxfp8}, SetByte("m.p.weight", 1023, 0xFF), {"m.p.weight", "element 1023", "0xff"});
  CheckRefused({.format = ExpertFormat::kMxfp8}, SetByte("m.p.weight_scale", 31, 0xFF),
               {"m.p.weight_scale", "scale 31", "0xFF"});
  CheckRefused({.format = ExpertFormat::kMxfp4}, SetByte("m.p.weight_scale", 5, 0xFF), {"m.p.weight_scale", "scale 5"});
  for (uint8_t byte : {0x7F, 0xFF, 0x80, 0xB8}) {
    CheckRefused({.format = ExpertFormat::kNvfp4}, SetByte("m.p.weight_scale", 17, byte), {"m.p.weight_scale", "scale 17"});
  }
  for (float value : {NAN, INFINITY, -INFINITY}) {
    const auto put = [value](const std::string& name) {
      return [name, value](CheckpointBuilder& b) {
        std::memcpy(b.Find(name)->bytes.data() + b.Find(name)->bytes.size() - 4, &value, 4);
      };
    };
    CheckRefused({.format = ExpertFormat::kFp8, .scale_dtype = StDtype::kF32}, put("m.p.weight_scale"),
                 {"scale 15", "finite"});
    CheckRefused({.format = ExpertFormat::kQuarkTwoStage}, put("m.p.weight_scale_2"), {"m.p.weight_scale_2", "scale 15"});
    CheckRefused({.format = ExpertFormat::kNvfp4}, put("m.p.weight_scale_2"), {"m.p.weight_scale_2", "finite"});
    CheckRefused({.format = ExpertFormat::kNvfp4Packed}, put("m.p.weight_global_scale"),
                 {"m.p.weight_global_scale", "above 0"});
  }
  // the largest and smallest legal bytes pass
  CHECK(CheckFp8Codes(std::vector<uint8_t>(10000, 0xFE)).ok());
  CHECK(CheckScaleValues(ScaleType::kE8m0, std::vector<uint8_t>{0, 254}).ok());
  CHECK(CheckScaleValues(ScaleType::kE4m3, std::vector<uint8_t>{0, 1, 0x7E}).ok());
  const int16_t negative = static_cast<int16_t>(0xBC00);
  std::vector<uint8_t> bytes(2);
  std::memcpy(bytes.data(), &negative, 2);
  CHECK(CheckScaleValues(ScaleType::kF16, bytes).ok());
}

TEST_CASE("Zero points of a symmetric scheme must stand for zero") {
  const ExpertSpec bytes = {.format = ExpertFormat::kInt8, .bits = 8};
  const auto add = [](uint8_t last) {
    return [last](CheckpointBuilder& b) {
      std::vector<uint8_t> zeros(16, 0);
      zeros[15] = last;
      b.Add("m.p.weight_zero_point", StDtype::kI8, {16}, zeros);
    };
  };
  CheckRefused(bytes, add(1), {"m.p.weight_zero_point", "element 15", "symmetric"});
  Bench good;
  AddProjection(&good.builder, "m.p", 16, 64, bytes, Weights(7, 64));
  add(0)(good.builder);
  REQUIRE(good.Open().ok());
  CHECK(good.Read(DeclaredFor(bytes), "m.p", 16, 64).ok());
  CheckRefused({.format = ExpertFormat::kQuarkInt4, .group = 32, .twos_complement = true},
               SetByte("m.p.weight_zero_point", 4, 0x10), {"m.p.weight_zero_point", "want 0"});
  CheckRefused({.format = ExpertFormat::kQuarkTwoStage}, SetByte("m.p.weight_zero_point_2", 7, 1),
               {"m.p.weight_zero_point_2"});
  CheckRefused(
      {.format = ExpertFormat::kAwq, .group = 32}, [](CheckpointBuilder&) {}, {"m.p.qzeros", "want 8"},
      [](DeclaredScheme& d) { d.linear.weights.zero_points = false; });
  CheckRefused({.format = ExpertFormat::kGptq, .bits = 8, .group = 32}, SetByte("m.p.qzeros", 9, 0x80),
               {"m.p.qzeros", "is 129, want 128", "sym"});
}

TEST_CASE("Int4 values outside -8 .. 7 in a byte are refused with their place") {
  CheckRefused({.format = ExpertFormat::kInt8}, SetByte("m.p.weight", 3 * 64 + 5, 8), {"m.p.weight", "element 197", "is 8"});
  CheckRefused({.format = ExpertFormat::kInt8}, SetByte("m.p.weight", 0, 0xF7), {"m.p.weight", "element 0", "is -9"});
}

TEST_CASE("A tensor of the wrong dtype, the wrong shape or of another scheme is refused by name") {
  const auto reshape = [](const std::string& name, std::vector<int64_t> shape) {
    return [=](CheckpointBuilder& b) { b.Find(name)->shape = shape; };
  };
  const auto retype = [](const std::string& name, StDtype dtype) {
    return [=](CheckpointBuilder& b) { b.Find(name)->dtype = dtype; };
  };
  CheckRefused({.format = ExpertFormat::kAwq, .group = 32}, reshape("m.p.qweight", {8, 16}),
               {"m.p.qweight", "[8, 16]", "want [64, 2]"});
  CheckRefused({.format = ExpertFormat::kInt8}, reshape("m.p.weight_scale", {1, 16}), {"m.p.weight_scale", "want [16, 1]"});
  CheckRefused({.format = ExpertFormat::kFp8}, retype("m.p.weight", StDtype::kU8),
               {"m.p.weight", "dtype is U8, want F8_E4M3"});
  CheckRefused(
      {.format = ExpertFormat::kMxfp8}, [](CheckpointBuilder&) {}, {"m.p.weight_scale", "dtype is U8"},
      [](DeclaredScheme& d) { d.linear.weights.scale = ScaleType::kF32; });
  CheckRefused({.format = ExpertFormat::kMxfp4}, retype("m.p.weight_scale", StDtype::kF8E4m3),
               {"m.p.weight_scale", "F8_E4M3"});
  CheckRefused({.format = ExpertFormat::kNvfp4}, retype("m.p.weight_scale", StDtype::kU8),
               {"m.p.weight_scale", "want F8_E4M3"});
  CheckRefused({.format = ExpertFormat::kNvfp4}, [](CheckpointBuilder& b) { b.Remove("m.p.weight_scale_2"); },
               {"m.p.weight_scale_2"});
  CheckRefused({.format = ExpertFormat::kInt8, .asymmetric = true},
               [](CheckpointBuilder& b) { b.Remove("m.p.weight_zero_point"); }, {"m.p.weight_zero_point"});
  CheckRefused({.format = ExpertFormat::kFp8}, [](CheckpointBuilder& b) { AddScalar(b, "m.p.weight_scale_inv", 1.0f, {1}); },
               {"m.p.weight_scale_inv and m.p.weight_scale"});
  CheckRefused({.format = ExpertFormat::kFp8}, [](CheckpointBuilder& b) { b.Remove("m.p.weight_scale"); },
               {"m.p.weight_scale"});
  CheckRefused(
      {.format = ExpertFormat::kFp8}, [](CheckpointBuilder&) {}, {"m.p", "stored as .weight F8_E4M3", "GPTQ"},
      [](DeclaredScheme& d) {
        d = Declared(Kind::kGptq, ElementType::kInt4, ScaleType::kF16, {1, 32});
      });
  CheckRefused(
      {.format = ExpertFormat::kFp8}, [](CheckpointBuilder&) {}, {"m.p", "unquantized"},
      [](DeclaredScheme& d) { d = DeclaredScheme{}; });
  CheckRefused(
      {.format = ExpertFormat::kMxfp4}, [](CheckpointBuilder&) {}, {"fp6_e2m3", "bit order"},
      [](DeclaredScheme& d) { d.linear.weights.element = ElementType::kFp6E2m3; });
}

TEST_CASE("Act-order: every projection has its own group index, in range; -1 means not set in packed files only") {
  ExpertSpec spec = {.format = ExpertFormat::kGptq, .group = 16, .vary_groups = true, .group_index = GroupIndex::kShuffled};
  Bench bench;
  const std::vector<float> want = AddProjection(&bench.builder, "m.p", 16, 64, spec, Weights(5, 64));
  REQUIRE(bench.Open().ok());
  DeclaredScheme declared = DeclaredFor(spec);
  declared.linear.weights.act_order = true;
  const absl::StatusOr<LinearWeights> got = bench.Read(declared, "m.p", 16, 64);
  REQUIRE(got.ok());
  CHECK(got->scheme.act_order);
  CHECK(SameBits(Values(*got), want));
  const auto act_order = [](DeclaredScheme& d) { d.linear.weights.act_order = true; };
  CheckRefused(spec, SetByte("m.p.g_idx", 4 * 9, 4), {"m.p.g_idx", "entry 9 is 4", "0 .. 3"}, act_order);
  CheckRefused(
      spec, [](CheckpointBuilder& b) { std::memset(b.Find("m.p.g_idx")->bytes.data() + 8, 0xFF, 4); },
      {"m.p.g_idx", "entry 2 is -1"}, act_order);
  CheckRefused(spec, [](CheckpointBuilder&) {}, {"m.p.g_idx", "desc_act"});

  Bench packed;
  const ExpertSpec plain = {.format = ExpertFormat::kPacked, .group = 16};
  const std::vector<float> contiguous = AddProjection(&packed.builder, "m.p", 16, 64, plain, Weights(5, 64));
  std::vector<int32_t> index(64, 3);
  index[40] = -1;
  packed.builder.AddInt32("m.p.weight_g_idx", {64}, index);
  REQUIRE(packed.Open().ok());
  declared = DeclaredFor(plain);
  declared.linear.weights.act_order = true;
  const absl::StatusOr<LinearWeights> unset = packed.Read(declared, "m.p", 16, 64);
  REQUIRE(unset.ok());
  CHECK(SameBits(Values(*unset), contiguous));
  // declared, but one group or no tensor: not act-order
  Bench without;
  AddProjection(&without.builder, "m.p", 16, 64, plain, Weights(5, 64));
  REQUIRE(without.Open().ok());
  const absl::StatusOr<LinearSource> source = without.Find(declared, "m.p", 16, 64);
  REQUIRE(source.ok());
  CHECK_FALSE(source->linear().weights.act_order);
}

}  // namespace moed
