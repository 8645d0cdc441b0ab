// The checkpoint builder's own promises: what it says a loader must see is what its files decode to.
#include "tests/support/checkpoint_builder.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint.h"
#include "kernels/number_formats.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

template <typename T>
std::vector<T> Values(CheckpointBuilder& builder, const std::string& name) {
  const BuilderTensor* tensor = builder.Find(name);
  REQUIRE(tensor != nullptr);
  std::vector<T> values(tensor->bytes.size() / sizeof(T));
  std::memcpy(values.data(), tensor->bytes.data(), tensor->bytes.size());
  return values;
}

float Weight(int64_t index) { return static_cast<float>(R(42, static_cast<uint64_t>(index))); }

}  // namespace

TEST_CASE("R is the stream of the acceptance cases") {
  CHECK(R(1, 0) == Approx(0.108201).margin(1e-6));
  CHECK(R(1, 1) == Approx(0.325160).margin(1e-6));
  CHECK(R(1, 2) == Approx(-0.441322).margin(1e-6));
  CHECK(R(1, 3) == Approx(-0.169404).margin(1e-6));
  CHECK(R(2, 0) == Approx(-0.451443).margin(1e-6));
}

TEST_CASE("A GPTQ projection decodes to its reference by the rule of the format") {
  constexpr int64_t kRows = 16, kCols = 96;
  for (const int bits : {4, 8}) {
    for (const int group : {-1, 32, 64}) {  // 64: a short last group
      for (const GroupIndex index : {GroupIndex::kTrivial, GroupIndex::kNone, GroupIndex::kShuffled}) {
        for (const bool v2 : {false, true}) {
          CAPTURE(bits, group, v2);
          CheckpointBuilder builder;
          const ExpertSpec spec{.format = ExpertFormat::kGptq,
                                .bits = bits,
                                .group = group,
                                .vary_groups = true,
                                .group_index = index,
                                .gptq_v2 = v2};
          const std::vector<float> reference = AddProjection(&builder, "p", kRows, kCols, spec, Weight);
          const auto words = Values<uint32_t>(builder, "p.qweight");
          const auto zeros = Values<uint32_t>(builder, "p.qzeros");
          const auto scales = Values<uint16_t>(builder, "p.scales");
          CHECK(builder.Find("p.qweight")->shape == std::vector<int64_t>{kCols * bits / 32, kRows});
          const int64_t groups = group < 0 ? 1 : (kCols + group - 1) / group;
          CHECK(builder.Find("p.qzeros")->shape == std::vector<int64_t>{groups, kRows * bits / 32});
          CHECK((builder.Find("p.g_idx") == nullptr) == (index == GroupIndex::kNone));
          if (bits == 4) CHECK(zeros[0] == (v2 ? 0x88888888u : 0x77777777u));
          if (bits == 8) CHECK(zeros[0] == (v2 ? 0x80808080u : 0x7F7F7F7Fu));
          const int64_t pack = 32 / bits;
          const uint32_t mask = (1u << bits) - 1;
          bool equal = true;
          for (int64_t n = 0; n < kRows; ++n) {
            for (int64_t k = 0; k < kCols; ++k) {
              int64_t g = group < 0 ? 0 : k / group;
              if (index != GroupIndex::kNone) g = Values<int32_t>(builder, "p.g_idx")[k];
              const int code = static_cast<int>(words[k / pack * kRows + n] >> (bits * (k % pack)) & mask);
              const int zero =
                  static_cast<int>(zeros[g * (kRows / pack) + n / pack] >> (bits * (n % pack)) & mask) + (v2 ? 0 : 1);
              equal =
                  equal && static_cast<float>(code - zero) * F16ToFloat(scales[g * kRows + n]) == reference[n * kCols + k];
            }
          }
          CHECK(equal);
        }
      }
    }
  }
}

TEST_CASE("A packed projection decodes to its reference by the rule of the format") {
  constexpr int64_t kRows = 5, kCols = 64;
  for (const int group : {-1, 32}) {
    CAPTURE(group);
    CheckpointBuilder builder;
    const ExpertSpec spec{.format = ExpertFormat::kPacked, .group = group};
    const std::vector<float> reference = AddProjection(&builder, "p", kRows, kCols, spec, Weight);
    const auto words = Values<uint32_t>(builder, "p.weight_packed");
    const auto scales = Values<uint16_t>(builder, "p.weight_scale");
    CHECK(Values<int64_t>(builder, "p.weight_shape") == std::vector<int64_t>{kRows, kCols});
    const int64_t groups = group < 0 ? 1 : kCols / group;
    CHECK(builder.Find("p.weight_scale")->shape == std::vector<int64_t>{kRows, groups});
    for (int64_t at = 0; at < kRows * kCols; ++at) {
      const int code = static_cast<int>(words[at / 8] >> (4 * (at % 8)) & 0xF) - 8;
      const float scale = Bf16ToFloat(scales[at / kCols * groups + at % kCols / (group < 0 ? kCols : group)]);
      REQUIRE(static_cast<float>(code) * scale == reference[at]);
      REQUIRE(std::abs(reference[at] - Weight(at)) <= 0.51f * scale);
    }
  }
}

TEST_CASE("Probe weights stay exact when quantized with a divisor of 4") {
  for (const ExpertFormat format : {ExpertFormat::kGptq, ExpertFormat::kPacked}) {
    CheckpointBuilder builder;
    const ExpertSpec spec{.format = format, .group = 32, .scale_divisor = 4};
    const auto experts = AddExperts(&builder, "l.", ExpertNames::kMlp, 1, 64, 32, spec, PcWeights(64, 32, 24.0f, -32.0f));
    CHECK(experts[0].gate[0] == 24.0f);
    CHECK(experts[0].up[64] == -32.0f);
    CHECK(experts[0].gate[1] == 0.0f);
    CHECK(experts[0].down[7] == 1.0f / 32);
  }
}

TEST_CASE("The fused layout interleaves gate and up along the last dimension") {
  CheckpointBuilder builder;
  const auto experts =
      AddExperts(&builder, "model.layers.0.", ExpertNames::kGptOssFused, 2, 8, 4, ExpertSpec{}, RcWeights(8, 4),
                 [](int e, int p, int64_t i) { return static_cast<float>(e + 10 * p + 100 * i); });
  const auto gate_up = Values<uint16_t>(builder, "model.layers.0.mlp.experts.gate_up_proj");
  const auto down = Values<uint16_t>(builder, "model.layers.0.mlp.experts.down_proj");
  const auto bias = Values<uint16_t>(builder, "model.layers.0.mlp.experts.gate_up_proj_bias");
  CHECK(builder.Find("model.layers.0.mlp.experts.gate_up_proj")->shape == std::vector<int64_t>{2, 8, 8});
  CHECK(builder.Find("model.layers.0.mlp.experts.down_proj")->shape == std::vector<int64_t>{2, 4, 8});
  for (int e = 0; e < 2; ++e) {
    for (int i = 0; i < 4; ++i) {
      for (int h = 0; h < 8; ++h) {
        REQUIRE(Bf16ToFloat(gate_up[(e * 8 + h) * 8 + 2 * i]) == experts[e].gate[i * 8 + h]);
        REQUIRE(Bf16ToFloat(gate_up[(e * 8 + h) * 8 + 2 * i + 1]) == experts[e].up[i * 8 + h]);
        REQUIRE(Bf16ToFloat(down[(e * 4 + i) * 8 + h]) == experts[e].down[h * 4 + i]);
      }
      REQUIRE(Bf16ToFloat(bias[e * 8 + 2 * i]) == experts[e].gate_bias[i]);
      REQUIRE(Bf16ToFloat(bias[e * 8 + 2 * i + 1]) == experts[e].up_bias[i]);
    }
  }
}

TEST_CASE("Every family writes a checkpoint that opens, with the names of its files") {
  struct Case {
    ModelSpec spec;
    std::vector<std::string> names;
  };
  const ExpertSpec gptq{.format = ExpertFormat::kGptq, .group = 32}, packed{.format = ExpertFormat::kPacked, .group = 32};
  const std::vector<Case> cases = {
      {{.family = ModelFamily::kMixtral, .hidden = 64, .intermediate = 32},
       {"model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.block_sparse_moe.experts.3.w2.weight"}},
      {{.family = ModelFamily::kMixtral, .hidden = 64, .intermediate = 32, .experts = gptq, .mlp_names = true},
       {"model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.down_proj.g_idx"}},
      {{.family = ModelFamily::kQwen3Moe, .num_layers = 2, .hidden = 64, .intermediate = 32, .experts = packed},
       {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.0.up_proj.weight_packed"}},
      {{.family = ModelFamily::kDeepseekV3, .hidden = 64, .intermediate = 32, .experts = packed},
       {"model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.shared_experts.down_proj.weight"}},
      {{.family = ModelFamily::kGptOss, .hidden = 64, .intermediate = 32},
       {"model.layers.0.mlp.router.bias", "model.layers.0.mlp.experts.gate_up_proj"}},
  };
  for (const Case& c : cases) {
    TempDir dir;
    CheckpointBuilder builder;
    const std::vector<LayerReference> reference = AddModel(c.spec, &builder);
    CHECK(reference.size() == static_cast<size_t>(c.spec.num_layers));
    CHECK(reference[0].experts.size() == 4);
    REQUIRE(builder.Write(dir.path(), 2).ok());
    const auto checkpoint = Checkpoint::Open(dir.path());
    REQUIRE(checkpoint.ok());
    for (const std::string& name : c.names) {
      CAPTURE(name);
      CHECK((*checkpoint)->Find(name));
    }
    CHECK_THAT(ReadFile(dir.File("config.json")), Catch::Matchers::Contains("hidden_size"));
  }
}

TEST_CASE("Tensors can be renamed, replaced and removed before writing") {
  CheckpointBuilder builder;
  AddModel(ModelSpec{.hidden = 32, .intermediate = 32}, &builder);
  CHECK(builder.RenameAll("experts.2.", "expertz.2.") == 3);
  CHECK(builder.Find("model.layers.0.block_sparse_moe.expertz.2.w1.weight") != nullptr);
  CHECK(builder.Remove("model.layers.0.block_sparse_moe.gate.weight") == 1);
  CHECK(builder.Remove("model.layers.0.block_sparse_moe.gate.weight") == 0);
}

}  // namespace moed::testing
