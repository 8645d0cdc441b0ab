// Acceptance cases about groups along K in GPTQ files: every size and width of code, and act-order with a group index of its
// own for each projection.
#include <catch2/catch.hpp>
#include <set>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

struct Shape {
  int64_t hidden;
  int64_t intermediate;
  std::vector<int> groups;
};

CaseScheme Gptq(int bits, int group) {
  return {.name = "GPTQ int" + std::to_string(bits) + " g" + std::to_string(group),
          .experts = {.format = ExpertFormat::kGptq, .bits = bits, .group = group, .vary_groups = true}};
}

// Every backend that takes the layer, M = 1, 4, 16, 64; the name of the automatic one.
std::string CheckEveryBackend(const CaseScheme& scheme, int64_t hidden, int64_t intermediate) {
  const CaseModel model(SpecOf(scheme, 2, 2, hidden, intermediate), scheme);
  const CaseInput input = RoutedInput(64, hidden, 2, 2);
  const std::vector<int64_t> judged = {0, 3, 15, 63};
  const std::vector<float> want = ExactRows(model.layer(), input.Pick(judged));
  for (const std::string& backend : model.Backends()) {
    CaseEngine engine(model, backend);
    for (int64_t rows : {1, 4, 16, 64}) {
      if (backend == "reference" && rows > 4) continue;  // slow
      INFO(scheme.name << ", H = " << hidden << ", I = " << intermediate << ", " << backend << ", M = " << rows);
      std::vector<int64_t> here;
      for (int64_t row : judged) {
        if (row < rows) here.push_back(row);
      }
      const std::vector<float> y = engine.Rows(input.Part(0, rows));
      CheckWithin(PickRows(y, hidden, here), {want.begin(), want.begin() + static_cast<int64_t>(here.size()) * hidden}, hidden,
                  scheme.bound);
    }
  }
  CaseEngine chosen(model);
  return chosen.engine().Status()[0].layers[0].backend;
}

// A layer of four GPTQ experts with H = I; up and down are scattered by numbers of their own.
struct ActOrder {
  int64_t size;  // H and I, a power of two
  ExpertSpec experts;
  int up_shuffle = 37;
  int down_shuffle = 37;
};

ModelSpec SpecOf(const ActOrder& order) {
  ModelSpec spec{.family = ModelFamily::kQwen3Moe, .hidden = order.size, .intermediate = order.size, .num_experts = 4};
  spec.experts = order.experts;
  return spec;
}

// The checkpoint, and what it stands for.
class ActOrderModel {
 public:
  explicit ActOrderModel(const ActOrder& order, const std::string& patch = "{}")
      : model(SpecOf(order), {}, [&](CheckpointBuilder& builder) {
          Scatter(order, &builder);
          PatchConfig(&builder, patch);
        }) {
    layer = model.layer();
    for (size_t expert = 0; expert < scattered_.size(); ++expert) {
      layer.experts[expert].up = scattered_[expert].up;
      layer.experts[expert].down = scattered_[expert].down;
    }
  }

 private:
  // Stores up and down again.
  void Scatter(const ActOrder& order, CheckpointBuilder* builder) {
    if (order.experts.group_index != GroupIndex::kShuffled) return;
    const WeightFn weights = RcWeights(order.size, order.size);
    for (int expert = 0; expert < 4; ++expert) {
      const auto again = [&](const char* name, int projection, int shuffle) {
        const std::string module = "model.layers.0.mlp.experts." + std::to_string(expert) + "." + name;
        for (const char* suffix : {".qweight", ".qzeros", ".scales", ".g_idx"}) REQUIRE(builder->Remove(module + suffix) == 1);
        ExpertSpec own = order.experts;
        own.shuffle = shuffle;
        return AddProjection(builder, module, order.size, order.size, own,
                             [&](int64_t index) { return weights(expert, projection, index); });
      };
      scattered_.push_back(
          {.up = again("up_proj", kUp, order.up_shuffle), .down = again("down_proj", kDown, order.down_shuffle)});
    }
  }

  std::vector<ExpertReference> scattered_;  // before `model`, whose constructor fills it

 public:
  CaseModel model;
  LayerReference layer;
};

}  // namespace

TEST_CASE("B12: GPTQ of 4 and 8 bits in groups of 32 to 256 is within the bound, by the same backend for every group size") {
  const std::vector<Shape> shapes = {
      {1024, 128, {32, 64, 128}}, {512, 256, {16, 32, 64, 128, 256, -1}}, {288, 96, {32, 96, 8}}};
  for (int bits : {4, 8}) {
    std::set<std::string> chosen;
    for (const Shape& shape : shapes) {
      for (int group : shape.groups) chosen.insert(CheckEveryBackend(Gptq(bits, group), shape.hidden, shape.intermediate));
    }
    CHECK(chosen.size() == 1);
  }
}

TEST_CASE("B12: K = 1344 and 2048 in groups of 32 and 64 is within the bound") {
  for (int bits : {4, 8}) {
    for (int group : {32, 64}) CheckEveryBackend(Gptq(bits, group), 2048, 1344);
  }
}

TEST_CASE("B12: codes of a width that is not served, and groups that the file does not have, are refused with the numbers") {
  const CaseScheme scheme = Gptq(4, 32);
  const auto refusal = [&](const std::string& quantization) {
    const CaseModel model(SpecOf(scheme, 2, 2, 512, 256), scheme, [&](CheckpointBuilder& builder) {
      PatchConfig(&builder, R"({"quantization_config": )" + quantization + "}");
    });
    const LoadResult result = TryLoad(model.path());
    INFO(quantization << ": " << result.status.ToString());
    REQUIRE_FALSE(result.status.ok());
    CHECK(result.models.empty());
    return result.status;
  };
  for (const char* bits : {"2", "3", "16"}) {
    CHECK(Mentions(refusal(std::string(R"({"bits": )") + bits + "}"), std::string("bits: ") + bits));
  }
  // The scales of 512 columns in groups of 32 are 16 rows.
  CHECK(Mentions(refusal(R"({"group_size": 64})"), "[16, 256], want [8, 256]"));
  CHECK(Mentions(refusal(R"({"group_size": 16})"), "[16, 256], want [32, 256]"));
  CHECK(Mentions(refusal(R"({"group_size": 0})"), "group_size"));
  CHECK(Mentions(refusal(R"({"bits": 8})"), "[64, 256], want [128, 256]"));
}

TEST_CASE("B12: the scales of one group are not those of its neighbour: a reference that swaps two of them fails") {
  const CaseScheme scheme = Gptq(4, 32);
  const CaseModel model(SpecOf(scheme, 2, 2, 512, 256), scheme);
  const CaseInput input = RoutedInput(4, 512, 2, 2);
  LayerReference swapped = model.layer();
  for (size_t n = 0; n < 256; ++n) {
    for (size_t k = 0; k < 32; ++k) {
      swapped.experts[0].gate[n * 512 + k] *= 0.5f;  // group 1 has half of group 0's scale
      swapped.experts[0].gate[n * 512 + 32 + k] *= 2.0f;
    }
  }
  CaseEngine engine(model);
  const std::vector<float> y = engine.Rows(input);
  CheckWithin(y, ExactRows(model.layer(), input), 512, 0.01);
  const std::vector<float> wrong = ExactRows(swapped, input);
  double difference = 0.0, norm = 0.0;
  for (size_t at = 0; at < y.size(); ++at) {
    difference += (y[at] - wrong[at]) * (y[at] - wrong[at]);
    norm += wrong[at] * wrong[at];
  }
  CHECK(difference > 0.05 * 0.05 * norm);
}

TEST_CASE("B14: no g_idx, a trivial one, and a trivial one under desc_act give the same bits") {
  const char* const desc_act = R"({"quantization_config": {"desc_act": true}})";
  for (bool bf16_scales : {false, true}) {
    for (int bits : {4, 8}) {
      ActOrder order = {.size = 256,
                        .experts = {.format = ExpertFormat::kGptq, .bits = bits, .group = 64, .bf16_scales = bf16_scales}};
      const ActOrderModel trivial(order), declared(order, desc_act);
      order.experts.group_index = GroupIndex::kNone;
      const ActOrderModel none(order), none_declared(order, desc_act);
      for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
        CaseInput input = RoutedInput(9, 256, 4, 2);
        input.dtype = dtype;
        for (const char* backend : {"cpu_generic", "reference"}) {
          INFO(bits << " bits, " << backend);
          const std::vector<float> want = CaseEngine(trivial.model, backend).Rows(input);
          CheckWithin(want, ExactRows(trivial.layer, input), 256, 0.01);
          for (const ActOrderModel* other : {&declared, &none, &none_declared}) {
            CHECK((CaseEngine(other->model, backend).Rows(input) == want));
          }
        }
      }
    }
  }
}

TEST_CASE("B14: without scattered groups every file gets the same backend, whatever it says of act-order") {
  ActOrder order = {.size = 256, .experts = {.format = ExpertFormat::kGptq, .group = 64}};
  const ActOrderModel trivial(order);
  order.experts.group_index = GroupIndex::kNone;
  const ActOrderModel none(order, R"({"quantization_config": {"desc_act": true}})");
  const auto backend_of = [](const ActOrderModel& model) {
    return CaseEngine(model.model).engine().Status()[0].layers[0].backend;
  };
  CHECK(backend_of(none) == backend_of(trivial));
}

TEST_CASE("B14: scattered groups are looked up by g_idx, which gate, up and down each have for themselves") {
  for (int64_t size : {256, 128}) {
    for (int group : {64, 32}) {
      for (int bits : {4, 8}) {
        for (bool bf16_scales : {false, true}) {
          const ActOrder order = {.size = size,
                                  .experts = {.format = ExpertFormat::kGptq,
                                              .bits = bits,
                                              .group = group,
                                              .vary_groups = true,
                                              .group_index = GroupIndex::kShuffled,
                                              .bf16_scales = bf16_scales},
                                  .up_shuffle = 91,
                                  .down_shuffle = 13};
          const ActOrderModel scattered(order);
          for (DType dtype : {DType::kBf16, DType::kF16}) {
            CaseInput input = RoutedInput(9, size, 4, 2);
            input.dtype = dtype;
            const std::vector<float> want = ExactRows(scattered.layer, input);
            for (const std::string& backend : scattered.model.Backends()) {
              INFO(bits << " bits, H = I = " << size << ", g" << group << ", " << backend);
              CaseEngine engine(scattered.model, backend);
              CheckWithin(engine.Rows(input), want, size, 0.01);
            }
          }
        }
      }
    }
  }
}

TEST_CASE("B14: scattered groups in a file that says desc_act false are refused by tensor") {
  const ActOrder order = {.size = 128,
                          .experts = {.format = ExpertFormat::kGptq, .group = 32, .group_index = GroupIndex::kShuffled}};
  const ActOrderModel scattered(order, R"({"quantization_config": {"desc_act": false}})");
  const LoadResult result = TryLoad(scattered.model.path());
  INFO(result.status.ToString());
  CHECK(result.status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(Mentions(result.status, ".g_idx"));
  CHECK(Mentions(result.status, "desc_act"));
}

}  // namespace moed
