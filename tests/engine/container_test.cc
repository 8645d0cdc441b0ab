// Every container of quantized matrices: what is written element by element is read back to the bit.
#include <catch2/catch.hpp>

#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/number_formats.h"
#include "tests/engine/container_bench.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

// Three projections of one format, each with weights of its own, come back to the bit; every tensor of the file is used.
void CheckRoundTrip(const ExpertSpec& spec, int64_t rows, int64_t cols) {
  Bench bench;
  const std::string modules[] = {"m.experts.0.gate_proj", "m.experts.0.up_proj", "m.experts.1.gate_proj"};
  std::vector<std::vector<float>> want;
  for (uint32_t at = 0; at < 3; ++at) {
    want.push_back(AddProjection(&bench.builder, modules[at], rows, cols, spec, Weights(100 + at, cols)));
  }
  REQUIRE(bench.Open().ok());
  size_t used = 0;
  for (size_t at = 0; at < 3; ++at) {
    const absl::StatusOr<LinearWeights> got = bench.Read(DeclaredFor(spec), modules[at], rows, cols);
    INFO(got.status().ToString());
    REQUIRE(got.ok());
    CHECK(SameBits(Values(*got), want[at]));
    used += bench.used.size();
  }
  CHECK(used == bench.builder.tensors().size());
}

}  // namespace

TEST_CASE("GPTQ of 4 and 8 bits, versions 1 and 2, with zero points of every value decodes to the bit") {
  for (int bits : {4, 8}) {
    for (bool version2 : {false, true}) {
      for (int group : {32, 64, -1}) {
        CheckRoundTrip({.format = ExpertFormat::kGptq,
                        .bits = bits,
                        .group = group,
                        .group_index = GroupIndex::kNone,
                        .gptq_v2 = version2,
                        .asymmetric = true},
                       40, 192);
      }
    }
    CheckRoundTrip({.format = ExpertFormat::kGptq, .bits = bits, .group = 64}, 40, 192);
    CheckRoundTrip({.format = ExpertFormat::kGptq, .bits = bits, .group = 64, .asymmetric = true}, 40,
                   160);  // short last group
  }
}

TEST_CASE("Packed words of 4 and 8 bits with zero points along N and with every granularity decode to the bit") {
  for (int bits : {4, 8}) {
    for (bool asymmetric : {false, true}) {
      CheckRoundTrip({.format = ExpertFormat::kPacked, .bits = bits, .group = 32, .asymmetric = asymmetric}, 40, 128);
      CheckRoundTrip({.format = ExpertFormat::kPacked, .bits = bits, .asymmetric = asymmetric}, 40, 128);
      CheckRoundTrip({.format = ExpertFormat::kPacked, .bits = bits, .asymmetric = asymmetric, .per_tensor = true}, 40, 128);
    }
  }
}

TEST_CASE("AWQ and Quark int4 along N decode to the bit in either nibble order, signed or not") {
  CheckRoundTrip({.format = ExpertFormat::kAwq, .group = 32}, 136, 96);
  CheckRoundTrip({.format = ExpertFormat::kAwq, .group = 64}, 24, 100);
  CheckRoundTrip({.format = ExpertFormat::kAwq}, 24, 99);
  for (bool awq_order : {false, true}) {
    for (bool asymmetric : {false, true}) {
      for (bool is_signed : {false, true}) {
        CheckRoundTrip({.format = ExpertFormat::kQuarkInt4,
                        .group = 32,
                        .asymmetric = asymmetric,
                        .awq_order = awq_order,
                        .twos_complement = is_signed},
                       48, 96);
      }
    }
    CheckRoundTrip({.format = ExpertFormat::kQuarkTwoStage, .awq_order = awq_order}, 20, 96);
  }
}

TEST_CASE("Integers one a byte decode to the bit with scales of every shape and type") {
  for (int bits : {4, 8}) {
    for (bool asymmetric : {false, true}) {
      for (StDtype dtype : {StDtype::kBf16, StDtype::kF16, StDtype::kF32}) {
        const ExpertSpec base = {
            .format = ExpertFormat::kInt8, .bits = bits, .asymmetric = asymmetric, .scale_dtype = dtype};
        ExpertSpec spec = base;
        CheckRoundTrip(spec, 20, 65);
        spec.flat_scales = true;
        CheckRoundTrip(spec, 20, 64);
        spec.per_tensor = true;
        CheckRoundTrip(spec, 20, 64);
        spec.flat_scales = false;
        CheckRoundTrip(spec, 20, 64);
        spec = base;
        spec.group = 32;
        CheckRoundTrip(spec, 20, 96);
        spec.block_rows = 16;
        CheckRoundTrip(spec, 40, 80);  // partial blocks at both ends
      }
    }
  }
}

TEST_CASE("FP8 with scales per tensor, channel, group and partial block, and MXFP8, decode to the bit") {
  for (StDtype dtype : {StDtype::kBf16, StDtype::kF16, StDtype::kF32}) {
    const ExpertSpec base = {.format = ExpertFormat::kFp8, .scale_dtype = dtype};
    for (bool flat : {false, true}) {
      ExpertSpec spec = base;
      spec.flat_scales = flat;
      CheckRoundTrip(spec, 20, 65);
      spec.per_tensor = true;
      CheckRoundTrip(spec, 20, 65);
    }
    ExpertSpec spec = base;
    spec.group = 32;
    CheckRoundTrip(spec, 20, 96);
    spec.block_rows = 16;
    CheckRoundTrip(spec, 40, 80);
  }
  CheckRoundTrip({.format = ExpertFormat::kMxfp8}, 20, 96);
}

TEST_CASE("FP4 in its five containers decodes to the bit") {
  for (ExpertFormat format : {ExpertFormat::kMxfp4, ExpertFormat::kMxfp4Packed, ExpertFormat::kMxfp4Short,
                              ExpertFormat::kNvfp4, ExpertFormat::kNvfp4Packed}) {
    CheckRoundTrip({.format = format}, 20, 96);
  }
}

TEST_CASE("Four-dimensional block scales and E8M0 block scales are the same blocks") {
  const ExpertSpec spec = {.format = ExpertFormat::kFp8, .group = 32, .block_rows = 8};
  Bench bench;
  const std::vector<float> want = AddProjection(&bench.builder, "m.p", 16, 64, spec, Weights(3, 64));
  bench.builder.Find("m.p.weight_scale_inv")->shape = {2, 1, 2, 1};
  AddProjection(&bench.builder, "m.q", 16, 64, spec, Weights(3, 64));
  bench.builder.Remove("m.q.weight_scale_inv");
  bench.builder.Add("m.q.scale", StDtype::kF8E8m0, {2, 2}, {127, 128, 126, 0});
  REQUIRE(bench.Open().ok());
  const absl::StatusOr<LinearWeights> four = bench.Read(DeclaredFor(spec), "m.p", 16, 64);
  REQUIRE(four.ok());
  CHECK(SameBits(Values(*four), want));
  const absl::StatusOr<LinearWeights> powers = bench.Read(DeclaredFor(spec), "m.q", 16, 64);
  REQUIRE(powers.ok());
  CHECK(powers->scheme.scale == ScaleType::kE8m0);
  CHECK(Values(*powers)[0] == E4m3ToFloat(powers->codes[0]));
  CHECK(Values(*powers)[32] == 2.0f * E4m3ToFloat(powers->codes[32]));
  CHECK(Values(*powers)[8 * 64] == 0.5f * E4m3ToFloat(powers->codes[8 * 64]));
}

TEST_CASE("Fused scales beside weights per expert reach the right expert, projection and rows") {
  // I = 24 in blocks of 16: the second row of scales covers gate's last 8 rows and up's first 8.
  Bench bench;
  const std::vector<uint8_t> ones(24 * 32, 0x38);  // 1.0
  for (const char* module : {"m.experts.0.gate_proj", "m.experts.1.gate_proj", "m.experts.1.up_proj"}) {
    bench.builder.Add(std::string(module) + ".weight", StDtype::kF8E4m3, {24, 32}, ones);
  }
  bench.builder.Add("m.experts.1.down_proj.weight", StDtype::kF8E4m3, {32, 24}, ones);
  const std::vector<float> gate_up = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, down = {20, 21, 22, 23, 24, 25, 26, 27};
  bench.builder.AddFloats("m.experts.gate_up_proj_scale_inv", StDtype::kF32, {2, 3, 2}, gate_up);
  bench.builder.AddFloats("m.experts.down_proj_scales_inv", StDtype::kF32, {2, 2, 2}, down);
  REQUIRE(bench.Open().ok());
  const DeclaredScheme declared = Declared(Kind::kFp8, ElementType::kFp8E4m3, ScaleType::kF32, {16, 16});
  const absl::StatusOr<LinearWeights> gate = bench.Read(declared, "m.experts.1.gate_proj", 24, 32);
  const absl::StatusOr<LinearWeights> up = bench.Read(declared, "m.experts.1.up_proj", 24, 32);
  const absl::StatusOr<LinearWeights> last = bench.Read(declared, "m.experts.1.down_proj", 32, 24);
  INFO(gate.status().ToString() << up.status().ToString() << last.status().ToString());
  REQUIRE((gate.ok() && up.ok() && last.ok()));
  CHECK(gate->scheme.group == GroupShape{8, 16});
  CHECK(gate->scheme == up->scheme);
  const std::vector<float> g = Values(*gate), u = Values(*up), d = Values(*last);
  CHECK(g[0] == 7);
  CHECK(g[15 * 32 + 16] == 8);
  CHECK(g[16 * 32] == 9);
  CHECK(u[0] == 9);
  CHECK(u[7 * 32 + 31] == 10);
  CHECK(u[8 * 32] == 11);
  CHECK(u[23 * 32 + 31] == 12);
  CHECK(d[0] == 24);
  CHECK(d[16 * 24 + 23] == 27);
  // without a scale anywhere the weights are refused
  const absl::StatusOr<LinearWeights> none = bench.Read(declared, "m.experts.0.w9", 24, 32);
  CHECK_FALSE(none.ok());
}

TEST_CASE("What the tensors tell completes the scheme, and int4 may come as bytes or words") {
  const ExpertSpec channel = {.format = ExpertFormat::kFp8, .scale_dtype = StDtype::kF16};
  Bench bench;
  const std::vector<float> want = AddProjection(&bench.builder, "m.p", 16, 64, channel, Weights(5, 64));
  const ExpertSpec bytes = {.format = ExpertFormat::kInt8, .group = 32};
  const std::vector<float> ints = AddProjection(&bench.builder, "m.i", 16, 64, bytes, Weights(6, 64));
  const std::vector<float> floats(16 * 64, 0.5f);
  bench.builder.AddFloats("m.f.weight", StDtype::kBf16, {16, 64}, floats);
  REQUIRE(bench.Open().ok());
  const absl::StatusOr<LinearWeights> got =
      bench.Read(Declared(Kind::kFp8, ElementType::kFp8E4m3, ScaleType::kF32, {0, 0}), "m.p", 16, 64);
  REQUIRE(got.ok());
  CHECK(got->scheme.group == GroupShape{1, 0});
  CHECK(got->scheme.scale == ScaleType::kF16);
  CHECK(SameBits(Values(*got), want));
  DeclaredScheme packed = DeclaredFor(bytes);
  packed.container = Kind::kPacked;
  const absl::StatusOr<LinearWeights> swapped = bench.Read(packed, "m.i", 16, 64);
  REQUIRE(swapped.ok());
  CHECK(SameBits(Values(*swapped), ints));
  DeclaredScheme quantized = DeclaredFor(bytes);
  quantized.linear.input.mode = ActivationMode::kDynamic;
  const absl::StatusOr<LinearSource> plain = bench.Find(quantized, "m.f", 16, 64);
  REQUIRE(plain.ok());
  CHECK(plain->linear() == LinearScheme{});
  CHECK(bench.note.find("unquantized") != std::string::npos);
}

TEST_CASE("The activations' stored number is each projection's own; ModelOpt stores its inverse") {
  DeclaredScheme declared = DeclaredFor({.format = ExpertFormat::kInt8, .bits = 8});
  declared.linear.input.mode = ActivationMode::kStatic;
  declared.linear.input.group = {0, 0};
  Bench bench;
  for (const char* module : {"m.p", "m.q", "m.r"}) {
    AddProjection(&bench.builder, module, 16, 64, {.format = ExpertFormat::kInt8, .bits = 8}, Weights(5, 64));
  }
  AddScalar(bench.builder, "m.p.input_scale", 0.25f);
  AddScalar(bench.builder, "m.q.input_scale", 0.5f, {1});
  bench.builder.Add("m.p.input_zero_point", StDtype::kI8, {}, {0});
  AddProjection(&bench.builder, "m.n", 16, 64, {.format = ExpertFormat::kNvfp4}, Weights(5, 64));
  AddProjection(&bench.builder, "m.c", 16, 64, {.format = ExpertFormat::kNvfp4Packed}, Weights(5, 64));
  AddScalar(bench.builder, "m.n.input_scale", 0.125f);
  AddScalar(bench.builder, "m.c.input_global_scale", 3.0f, {1});
  REQUIRE(bench.Open().ok());
  CHECK(bench.Read(declared, "m.p", 16, 64)->input_scale == 0.25f);
  CHECK(bench.Read(declared, "m.q", 16, 64)->input_scale == 0.5f);
  const absl::StatusOr<LinearWeights> missing = bench.Read(declared, "m.r", 16, 64);
  REQUIRE_FALSE(missing.ok());
  CHECK(missing.status().ToString().find("m.r.input_scale") != std::string::npos);
  DeclaredScheme nvfp4 = DeclaredFor({.format = ExpertFormat::kNvfp4});
  nvfp4.linear.input = {ActivationMode::kDynamic, ElementType::kFp4E2m1, ScaleType::kE4m3, {1, 16}};
  nvfp4.linear.input.global_scale = true;
  CHECK(bench.Read(nvfp4, "m.n", 16, 64)->input_scale == 8.0f);
  nvfp4.linear.weights.global_scale = GlobalScale::kDivisor;
  CHECK(bench.Read(nvfp4, "m.c", 16, 64)->input_scale == 3.0f);
}

TEST_CASE("Golden bytes: MXFP4, NVFP4 and FP8 as the specification lists them") {
  Bench bench;
  std::vector<uint8_t> codes(16, 0);
  codes[0] = 0x21;
  codes[1] = 0xF9;
  bench.builder.Add("m.x.weight", StDtype::kU8, {1, 16}, codes);
  bench.builder.Add("m.x.weight_scale", StDtype::kU8, {1, 1}, {0x80});
  bench.builder.Add("m.n.weight", StDtype::kU8, {1, 8}, {0x95, 0, 0, 0, 0, 0, 0, 0x80});
  bench.builder.Add("m.n.weight_scale", StDtype::kF8E4m3, {1, 1}, {0x38});
  AddScalar(bench.builder, "m.n.weight_scale_2", 0.002f);
  bench.builder.Add("m.f.weight", StDtype::kF8E4m3, {1, 8}, {0x01, 0x08, 0x38, 0x3C, 0x77, 0x7E, 0x80, 0xFE});
  AddScalar(bench.builder, "m.f.weight_scale", 1.0f);
  bench.builder.Add("m.s.weight", StDtype::kU8, {1, 16}, {0x21, 0x07, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  bench.builder.Add("m.s.weight_scale", StDtype::kU8, {1, 1}, {0x00});
  REQUIRE(bench.Open().ok());
  const DeclaredScheme mx = DeclaredFor({.format = ExpertFormat::kMxfp4});
  const std::vector<float> x = Values(*bench.Read(mx, "m.x", 1, 32));
  CHECK(std::vector<float>(x.begin(), x.begin() + 4) == std::vector<float>{1.0f, 2.0f, -1.0f, -12.0f});
  const std::vector<float> s = Values(*bench.Read(mx, "m.s", 1, 32));
  CHECK((std::bit_cast<uint32_t>(s[0]) == 0x00200000u && std::bit_cast<uint32_t>(s[1]) == 0x00400000u));
  CHECK(std::bit_cast<uint32_t>(s[2]) == 0x01400000u);
  const std::vector<float> n = Values(*bench.Read(DeclaredFor({.format = ExpertFormat::kNvfp4}), "m.n", 1, 16));
  CHECK((n[0] == 3.0f * 0.002f && n[1] == -0.5f * 0.002f));
  CHECK(std::signbit(n[15]));  // -0 is kept
  const std::vector<float> f =
      Values(*bench.Read(DeclaredFor({.format = ExpertFormat::kFp8, .per_tensor = true}), "m.f", 1, 8));
  CHECK(f == std::vector<float>{0x1p-9f, 0x1p-6f, 1.0f, 1.5f, 240.0f, 448.0f, -0.0f, -448.0f});
}

}  // namespace moed
