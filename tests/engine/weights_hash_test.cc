// What a model's hash depends on, and what it does not.
#include <catch2/catch.hpp>

#include <algorithm>
#include <string>

#include "engine/engine.h"
#include "kernels/backends.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the builder's vocabulary

CheckpointBuilder TwoLayers(ExpertFormat format) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = 64, .intermediate = 32, .num_experts = 4};
  spec.experts = {.format = format, .group = 32};
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  return builder;
}

// The hash that an engine tells once it has loaded what `builder` writes; before, it must tell none.
std::string HashOf(const CheckpointBuilder& builder, int shards = 1, EngineOptions options = {}) {
  TempDir dir;
  REQUIRE(builder.Write(dir.path(), shards).ok());
  options.threads = 1;
  options.device = ThisDevice();
  Engine engine(options, LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  CHECK(engine.Status()[0].weights_hash.empty());
  REQUIRE(engine.Load("m", {}).ok());
  return engine.Status()[0].weights_hash;
}

std::string AfterChange(const std::string& tensor, size_t byte, uint8_t change) {
  CheckpointBuilder builder = TwoLayers(ExpertFormat::kGptq);
  BuilderTensor* const found = builder.Find(tensor);
  REQUIRE(found != nullptr);
  found->bytes[byte] ^= change;
  return HashOf(builder);
}

}  // namespace

TEST_CASE("The hash is 32 hexadecimal digits, the same for files, experts held and backends of every kind") {
  const CheckpointBuilder builder = TwoLayers(ExpertFormat::kGptq);
  const std::string hash = HashOf(builder);
  CHECK(hash.size() == 32);
  CHECK(hash.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(HashOf(builder) == hash);
  CHECK(HashOf(builder, 3) == hash);
  EngineOptions half;
  half.first_expert = 1, half.end_expert = 3;
  CHECK(HashOf(builder, 1, half) == hash);
  EngineOptions reference;
  reference.policy = *Policy::Parse("require:reference");
  CHECK(HashOf(builder, 1, reference) == hash);
}

TEST_CASE("Other weights have another hash: of an expert, a scale, a gate, whichever layer, in another format, in another order") {
  const std::string hash = HashOf(TwoLayers(ExpertFormat::kGptq));
  CHECK(AfterChange("model.layers.0.mlp.experts.2.up_proj.qweight", 3, 0x10) != hash);
  CHECK(AfterChange("model.layers.1.mlp.experts.3.down_proj.scales", 0, 1) != hash);
  CHECK(AfterChange("model.layers.1.mlp.gate.weight", 0, 1) != hash);
  CHECK(HashOf(TwoLayers(ExpertFormat::kBf16)) != hash);
  CheckpointBuilder swapped = TwoLayers(ExpertFormat::kGptq);
  swapped.RenameAll("layers.0.mlp", "layers.x.mlp");
  swapped.RenameAll("layers.1.mlp", "layers.0.mlp");
  swapped.RenameAll("layers.x.mlp", "layers.1.mlp");
  CHECK(HashOf(swapped) != hash);
}

TEST_CASE("Answers tell whose weights they are of by the first 16 digits of the hash, merged ones too") {
  TempDir dir;
  REQUIRE(TwoLayers(ExpertFormat::kGptq).Write(dir.path()).ok());
  EngineOptions options;
  options.threads = 1;
  options.device = ThisDevice();
  Engine engine(options, LinkedBackends());
  REQUIRE(engine.Plan("m", dir.path()).ok());
  REQUIRE(engine.Load("m", {}).ok());
  const uint64_t want = std::stoull(engine.Status()[0].weights_hash.substr(0, 16), nullptr, 16);
  const std::vector<float> x(2 * 64, 0.25f);
  std::vector<ForwardPart> parts(2);
  std::vector<std::vector<float>> outs(2, std::vector<float>(2 * 64));
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].call.layer = 1;
    parts[i].call.hidden = {x.data(), DType::kF32, 2, 64};
    parts[i].out = {outs[i].data(), DType::kF32, 2, 64};
  }
  engine.Forward("m", parts);
  for (const ForwardPart& part : parts) {
    CHECK(part.status.ok());
    CHECK(part.info.batch_rows == 4);
    CHECK(part.info.weights_id == want);
  }
}

TEST_CASE("What a model's MoE layers do not use does not count") {
  CheckpointBuilder builder = TwoLayers(ExpertFormat::kGptq);
  const std::string hash = HashOf(builder);
  const std::vector<float> values(16, 0.5f);
  builder.AddFloats("model.norm.weight", StDtype::kBf16, {16}, values);
  CHECK(HashOf(builder) == hash);
}

}  // namespace moed
