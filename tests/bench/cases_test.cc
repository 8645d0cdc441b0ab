// What the CPU benchmark runs, and the rule that gives each case its ceiling.
#include <catch2/catch.hpp>

#include <set>

#include "bench/cases.h"

namespace moed::bench {
namespace {

QuantScheme SchemeOf(const std::string& name) {
  for (const NamedScheme& named : Schemes()) {
    if (named.name == name) return named.scheme;
  }
  FAIL("no scheme is called " << name);
  return {};
}

std::vector<std::string> Names(const absl::StatusOr<std::vector<Shape>>& shapes) {
  REQUIRE(shapes.ok());
  std::vector<std::string> names;
  for (const Shape& shape : *shapes) names.push_back(shape.name);
  return names;
}

using Strings = std::vector<std::string>;

}  // namespace

TEST_CASE("schemes differ, and their names say how") {
  std::set<std::string> names;
  const std::vector<NamedScheme> all = Schemes();
  for (size_t at = 0; at < all.size(); ++at) {
    names.insert(all[at].name);
    for (size_t other = 0; other < at; ++other) CHECK_FALSE(all[at].scheme == all[other].scheme);
    const bool int8_activations = all[at].name.ends_with("-a8");
    for (const LinearScheme* linear : {&all[at].scheme.gate, &all[at].scheme.up, &all[at].scheme.down}) {
      INFO(all[at].name);
      CHECK((linear->input.mode == ActivationMode::kDynamic) == int8_activations);
      CHECK(linear->input.element == ElementType::kInt8);
      CHECK(linear->weights.zero_points == (all[at].name.find("asymmetric") != std::string::npos));
    }
    if (int8_activations) {
      const QuantScheme weights_only = SchemeOf(all[at].name.substr(0, all[at].name.size() - 3));
      CHECK(weights_only.down.weights == all[at].scheme.down.weights);
    }
  }
  CHECK(names.size() == all.size());
  for (const char* name : {"int4-g128-a8", "int4-g32-a8", "int4-g128-asymmetric-a8", "mxfp4-a8", "int8-a8", "int4-channel"}) {
    CHECK(names.count(name) == 1);
  }
  CHECK(SchemeOf("int4-channel").gate.weights.group == GroupShape{1, 0});
}

TEST_CASE("the layer of gpt-oss clamps at 7 and has biases, the others neither") {
  for (const Shape& shape : Shapes()) {
    const MoeDesc desc = DescOf(shape, SchemeOf("mxfp4"));
    const bool oss = std::string(shape.name) == "gpt-oss-20b";
    CHECK(desc.activation.clamped == oss);
    CHECK(desc.biases == oss);
    CHECK(Describe(desc.activation) == (oss ? "swiglu_oai, limit 7" : "silu"));
    CHECK(desc.max_tokens == kMaxTokens);
  }
}

TEST_CASE("a layer of any shape and scheme stays below 4 GiB") {
  for (const Shape& shape : Shapes()) CHECK(6 * shape.experts * shape.hidden * shape.intermediate < int64_t{4} << 30);
}

TEST_CASE("shapes are those named, else those that the filter names, else one") {
  CHECK(Names(ChooseShapes("", "")) == Strings{"qwen3-30b"});
  CHECK(Names(ChooseShapes("", "int4")) == Strings{"qwen3-30b"});
  CHECK(Names(ChooseShapes("", "gpt-oss")) == Strings{"gpt-oss-20b"});
  CHECK(Names(ChooseShapes("", "mixtral-8x7b/int8/cpu_avx2/1")) == Strings{"mixtral-8x7b"});
  CHECK(Names(ChooseShapes("", "/int8")) == Strings{"qwen3-30b"});
  CHECK(Names(ChooseShapes("", "8")) == Strings{"qwen3-30b"});  // too short to name a shape
  CHECK(Names(ChooseShapes("gpt-oss-20b,mixtral-8x7b", "int8")) == Strings{"gpt-oss-20b", "mixtral-8x7b"});
  CHECK(Names(ChooseShapes("all", "gpt-oss")).size() == Shapes().size());
  for (const NamedScheme& scheme : Schemes()) CHECK(Names(ChooseShapes("", scheme.name)) == Strings{"qwen3-30b"});
}

TEST_CASE("an unknown shape is refused with the known ones") {
  const std::string known = "shapes: wanted all or names of qwen3-30b, mixtral-8x7b, deepseek-v3-slice, gpt-oss-20b; got ";
  for (const auto& [names, got] : {std::pair{"qwen3", "\"qwen3\""}, {"qwen3-30b,", "\"\""}, {"qwen3-30b,all", "\"all\""}}) {
    const absl::StatusOr<std::vector<Shape>> shapes = ChooseShapes(names, "");
    CHECK(shapes.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(std::string(shapes.status().message()) == known + got);
  }
}

TEST_CASE("up to two rows an expert every case is compared with the read stream") {
  for (const NamedScheme& named : Schemes()) {
    for (const char* backend : {"cpu_amx", "cpu_vnni", "cpu_avx512bf16", "cpu_avx2", "cpu_generic"}) {
      CHECK(CeilingOf(named.scheme, backend, 0.0625) == Ceiling::kReadStream);
      CHECK(CeilingOf(named.scheme, backend, 2.0) == Ceiling::kReadStream);
      CHECK(CeilingOf(named.scheme, backend, 2.1) != Ceiling::kReadStream);
    }
  }
}

TEST_CASE("above, int8 activations are compared with int8 arithmetic") {
  for (const char* name : {"int8-a8", "int4-g32-a8", "mxfp4-a8"}) {
    const QuantScheme scheme = SchemeOf(name);
    for (const char* backend : {"cpu_vnni", "cpu_avxvnni", "cpu_avx512", "cpu_avx2"}) {
      CHECK(CeilingOf(scheme, backend, 4.0) == Ceiling::kInt8Dot);
    }
    CHECK(CeilingOf(scheme, "cpu_amx", 4.0) == Ceiling::kTileInt8);
    CHECK(CeilingOf(scheme, "cpu_avx512bf16", 4.0) == Ceiling::kFloatFma);
    CHECK(CeilingOf(scheme, "cpu_generic", 4.0) == Ceiling::kFloatFma);
  }
  QuantScheme fixed = SchemeOf("int8-a8");
  for (LinearScheme* linear : {&fixed.gate, &fixed.up, &fixed.down}) linear->input.mode = ActivationMode::kStatic;
  CHECK(CeilingOf(fixed, "cpu_vnni", 4.0) == Ceiling::kInt8Dot);
}

TEST_CASE("above, 16-bit activations are compared with bf16 arithmetic where the backend has it, else with float FMA") {
  for (const char* name : {"bf16", "int4-g128", "int8", "mxfp4"}) {
    const QuantScheme scheme = SchemeOf(name);
    CHECK(CeilingOf(scheme, "cpu_avx512bf16", 4.0) == Ceiling::kBf16Dot);
    CHECK(CeilingOf(scheme, "cpu_amx", 4.0) == Ceiling::kTileBf16);
    for (const char* backend : {"cpu_vnni", "cpu_avxvnni", "cpu_avx512", "cpu_avx2", "cpu_generic"}) {
      CHECK(CeilingOf(scheme, backend, 4.0) == Ceiling::kFloatFma);
    }
  }
}

TEST_CASE("above, activations in FP8 or of one projection only are compared with float FMA") {
  QuantScheme fp8 = SchemeOf("int8-a8"), mixed = SchemeOf("int8-a8");
  for (LinearScheme* linear : {&fp8.gate, &fp8.up, &fp8.down}) linear->input.element = ElementType::kFp8E4m3;
  mixed.down.input.mode = ActivationMode::kNone;
  for (const char* backend : {"cpu_amx", "cpu_vnni", "cpu_avx512bf16"}) {
    CHECK(CeilingOf(fp8, backend, 4.0) == Ceiling::kFloatFma);
    CHECK(CeilingOf(mixed, backend, 4.0) == Ceiling::kFloatFma);
  }
}

}  // namespace moed::bench
