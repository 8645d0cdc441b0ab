// Fused experts of every layout, decoded to the bit; shapes that fit both ways; what is refused.
#include "engine/fused_experts.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using testing::CheckpointBuilder;
using testing::TempDir;

enum Part : uint32_t { kGatePart = 1, kUpPart = 2, kDownPart = 3 };

// The bits of element (n, k) of a projection: different for each place, so that a misplaced one shows.
uint32_t Bits(int expert, Part part, int64_t n, int64_t k) {
  uint32_t hash = static_cast<uint32_t>(expert) * 4u + part;
  for (const int64_t value : {n, k}) hash = (hash ^ static_cast<uint32_t>(value)) * 2654435761u + 12345u;
  return hash;
}

struct Sizes {
  int experts;
  int64_t hidden;
  int64_t intermediate;
};

void Append(std::vector<uint8_t>* bytes, uint32_t bits, int64_t size) {
  const size_t at = bytes->size();
  bytes->resize(at + static_cast<size_t>(size));
  std::memcpy(bytes->data() + at, &bits, static_cast<size_t>(size));
}

// A matrix per expert of rows x cols, element by element.
template <typename Element>
std::vector<uint8_t> Stack(int experts, int64_t rows, int64_t cols, int64_t size, const Element& element) {
  std::vector<uint8_t> bytes;
  for (int e = 0; e < experts; ++e) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) Append(&bytes, element(e, r, c), size);
    }
  }
  return bytes;
}

int64_t SizeOf(StDtype dtype) { return StDtypeBits(dtype) / 8; }

// Gate rows over up rows, [E, 2I, H], and its partner [E, H, I].
void AddRows(CheckpointBuilder* builder, const std::string& gate_up, const std::string& down, const Sizes& s,
             StDtype dtype) {
  builder->Add(gate_up, dtype, {s.experts, 2 * s.intermediate, s.hidden},
               Stack(s.experts, 2 * s.intermediate, s.hidden, SizeOf(dtype), [&](int e, int64_t r, int64_t c) {
                 return r < s.intermediate ? Bits(e, kGatePart, r, c) : Bits(e, kUpPart, r - s.intermediate, c);
               }));
  builder->Add(down, dtype, {s.experts, s.hidden, s.intermediate},
               Stack(s.experts, s.hidden, s.intermediate, SizeOf(dtype),
                     [](int e, int64_t r, int64_t c) { return Bits(e, kDownPart, r, c); }));
}

// Gate columns beside up columns, or in turn, [E, H, 2I], and its partner [E, I, H].
void AddColumns(CheckpointBuilder* builder, const std::string& root, const Sizes& s, StDtype dtype, bool in_turn) {
  builder->Add(root + "gate_up_proj", dtype, {s.experts, s.hidden, 2 * s.intermediate},
               Stack(s.experts, s.hidden, 2 * s.intermediate, SizeOf(dtype), [&](int e, int64_t r, int64_t c) {
                 const bool gate = in_turn ? c % 2 == 0 : c < s.intermediate;
                 const int64_t n = in_turn ? c / 2 : c % s.intermediate;
                 return Bits(e, gate ? kGatePart : kUpPart, n, r);
               }));
  builder->Add(root + "down_proj", dtype, {s.experts, s.intermediate, s.hidden},
               Stack(s.experts, s.intermediate, s.hidden, SizeOf(dtype),
                     [](int e, int64_t r, int64_t c) { return Bits(e, kDownPart, c, r); }));
}

void AddStacked(CheckpointBuilder* builder, const std::string& root, const Sizes& s, StDtype dtype) {
  const auto add = [&](const char* name, Part part, bool transposed) {
    builder->Add(root + name, dtype, {s.experts * s.intermediate, s.hidden},
                 Stack(s.experts, s.intermediate, s.hidden, SizeOf(dtype),
                       [&](int e, int64_t r, int64_t c) { return transposed ? Bits(e, part, c, r) : Bits(e, part, r, c); }));
  };
  add("w1", kGatePart, false);
  add("v1", kUpPart, false);
  add("w2", kDownPart, true);
}

ModelConfig ConfigOf(Family family, FusedLayout layout, const Sizes& s) {
  ModelConfig config;
  config.family = family;
  config.names.layout = layout;
  config.num_experts = s.experts;
  config.hidden = s.hidden;
  config.intermediate = s.intermediate;
  config.moe_layers = {0};
  return config;
}

ExpertNaming NamingOf(const std::string& root, FusedLayout layout) { return {true, root, "", "", "", layout}; }

// An opened checkpoint and what planning one layer of it gave.
struct Planned {
  Planned(const CheckpointBuilder& builder, const ModelConfig& config, const ExpertNaming& naming) {
    REQUIRE(builder.Write(dir.path()).ok());
    absl::StatusOr<std::unique_ptr<Checkpoint>> opened = Checkpoint::Open(dir.path());
    INFO(opened.status().ToString());
    REQUIRE(opened.ok());
    checkpoint = *std::move(opened);
    TensorFinder finder(*checkpoint, &used);
    plan = PlanFusedExperts(config, finder, naming);
    missing = finder.missing();
  }
  std::string Error() const { return std::string(plan.status().message()); }

  TempDir dir;
  std::unique_ptr<Checkpoint> checkpoint;
  std::vector<const TensorInfo*> used;
  std::vector<std::string> missing;
  absl::StatusOr<FusedPlan> plan = absl::UnknownError("not planned");
};

bool Equals(const LinearWeights& got, int expert, Part part, int64_t rows, int64_t cols, int64_t size) {
  if (got.rows != rows || got.cols != cols || got.codes.size() != static_cast<size_t>(rows * cols * size)) return false;
  const auto want = Stack(1, rows, cols, size, [&](int, int64_t r, int64_t c) { return Bits(expert, part, r, c); });
  return got.codes == want && got.scales.empty() && got.zero_points.empty() && got.group_index.empty();
}

void CheckDecodes(const Planned& planned, const Sizes& s, StDtype dtype) {
  INFO(planned.plan.status().ToString());
  REQUIRE(planned.plan.ok());
  REQUIRE(planned.missing.empty());
  REQUIRE(planned.plan->reader != nullptr);
  const ElementType element = FloatElementType(dtype);
  CHECK(planned.plan->scheme.gate.weights.element == element);
  ExpertWeights expert;
  for (int e = s.experts - 1; e >= 0; --e) {  // backwards: reading one does not depend on having read another
    REQUIRE(planned.plan->reader->Read(e, &expert).ok());
    CHECK(expert.gate.scheme.element == element);
    CHECK(Equals(expert.gate, e, kGatePart, s.intermediate, s.hidden, SizeOf(dtype)));
    CHECK(Equals(expert.up, e, kUpPart, s.intermediate, s.hidden, SizeOf(dtype)));
    CHECK(Equals(expert.down, e, kDownPart, s.hidden, s.intermediate, SizeOf(dtype)));
  }
}

const std::vector<StDtype> kDtypes = {StDtype::kBf16, StDtype::kF16, StDtype::kF32};
// Odd sizes, sizes beyond one band of a transposed read, and those at which a shape fits both ways: H == I and H == 2 I.
const std::vector<Sizes> kSizes = {{3, 7, 5}, {2, 300, 129}, {1, 1, 1}, {2, 16, 16}, {2, 16, 8}, {2, 8, 16}, {1, 256, 128}};
const char kRoot[] = "model.layers.0.mlp.experts.";

TEST_CASE("Plain fused experts decode to the bit") {
  for (const Sizes& s : kSizes) {
    for (StDtype dtype : kDtypes) {
      INFO("H " << s.hidden << " I " << s.intermediate << " " << StDtypeName(dtype));
      CheckpointBuilder builder;
      AddRows(&builder, std::string(kRoot) + "gate_up_proj", std::string(kRoot) + "down_proj", s, dtype);
      const Planned planned(builder, ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s),
                            NamingOf(kRoot, FusedLayout::kRows));
      CheckDecodes(planned, s, dtype);
      CHECK(planned.used.size() == 2);
      CHECK(planned.plan->file_bytes == static_cast<uint64_t>(s.experts * s.hidden * s.intermediate * 3 * SizeOf(dtype)));
    }
  }
}

TEST_CASE("Transposed fused experts decode to the bit") {
  for (const Sizes& s : kSizes) {
    for (StDtype dtype : kDtypes) {
      INFO("H " << s.hidden << " I " << s.intermediate << " " << StDtypeName(dtype));
      CheckpointBuilder builder;
      AddColumns(&builder, kRoot, s, dtype, false);
      const Planned planned(builder, ConfigOf(Family::kLlama4, FusedLayout::kColumns, s),
                            NamingOf(kRoot, FusedLayout::kColumns));
      CheckDecodes(planned, s, dtype);
    }
  }
}

TEST_CASE("Interleaved fused experts of gpt-oss decode to the bit, with their biases") {
  for (const Sizes& s : kSizes) {
    CheckpointBuilder builder;
    AddColumns(&builder, kRoot, s, StDtype::kBf16, true);
    std::vector<float> pair, down;
    for (int64_t i = 0; i < s.experts * 2 * s.intermediate; ++i) pair.push_back(static_cast<float>(i % 127));
    for (int64_t i = 0; i < s.experts * s.hidden; ++i) down.push_back(static_cast<float>(i % 113) - 50.0f);
    builder.AddFloats(std::string(kRoot) + "gate_up_proj_bias", StDtype::kF32, {s.experts, 2 * s.intermediate}, pair);
    builder.AddFloats(std::string(kRoot) + "down_proj_bias", StDtype::kBf16, {s.experts, s.hidden}, down);
    ModelConfig config = ConfigOf(Family::kGptOss, FusedLayout::kInterleavedColumns, s);
    config.expert_biases = true;
    const Planned planned(builder, config, NamingOf(kRoot, FusedLayout::kInterleavedColumns));
    CheckDecodes(planned, s, StDtype::kBf16);
    CHECK(planned.used.size() == 4);
    ExpertWeights expert;
    const int last = s.experts - 1;
    REQUIRE(planned.plan->reader->Read(last, &expert).ok());
    REQUIRE(expert.gate.bias.size() == static_cast<size_t>(s.intermediate));
    REQUIRE(expert.down.bias.size() == static_cast<size_t>(s.hidden));
    for (int64_t i = 0; i < s.intermediate; ++i) {
      CHECK(expert.gate.bias[i] == pair[(last * s.intermediate + i) * 2]);
      CHECK(expert.up.bias[i] == pair[(last * s.intermediate + i) * 2 + 1]);
    }
    for (int64_t h = 0; h < s.hidden; ++h) CHECK(expert.down.bias[h] == down[last * s.hidden + h]);
  }
}

TEST_CASE("The linear layers of granitemoe decode to the bit") {
  const std::string root = "model.layers.0.block_sparse_moe.";
  for (const Sizes& s : kSizes) {
    CheckpointBuilder builder;
    AddRows(&builder, root + "input_linear.weight", root + "output_linear.weight", s, StDtype::kBf16);
    const Planned planned(builder, ConfigOf(Family::kGraniteMoe, FusedLayout::kLinear, s),
                          NamingOf(root, FusedLayout::kLinear));
    CheckDecodes(planned, s, StDtype::kBf16);
  }
}

TEST_CASE("The stacked matrices of dbrx decode to the bit, the last one transposed") {
  const std::string root = "transformer.blocks.0.ffn.experts.mlp.";
  for (const Sizes& s : kSizes) {
    for (StDtype dtype : kDtypes) {
      CheckpointBuilder builder;
      AddStacked(&builder, root, s, dtype);
      const Planned planned(builder, ConfigOf(Family::kDbrx, FusedLayout::kStacked, s),
                            NamingOf(root, FusedLayout::kStacked));
      CheckDecodes(planned, s, dtype);
      CHECK(planned.used.size() == 3);
    }
  }
}

TEST_CASE("Where the shapes tell the orientation they decide, against the family's habit") {
  const Sizes s = {2, 12, 5};
  CheckpointBuilder rows, columns;
  AddRows(&rows, std::string(kRoot) + "gate_up_proj", std::string(kRoot) + "down_proj", s, StDtype::kBf16);
  AddColumns(&columns, kRoot, s, StDtype::kBf16, false);
  CheckDecodes(
      Planned(rows, ConfigOf(Family::kQwen3VlMoe, FusedLayout::kColumns, s), NamingOf(kRoot, FusedLayout::kColumns)), s,
      StDtype::kBf16);
  CheckDecodes(Planned(columns, ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s), NamingOf(kRoot, FusedLayout::kRows)), s,
               StDtype::kBf16);
}

TEST_CASE("A shape that fits both ways beside one that contradicts the family is refused, not guessed") {
  // At H == I the down projection fits both ways, at H == 2 I the pair does.
  for (const Sizes& s : {Sizes{2, 8, 8}, Sizes{2, 8, 4}}) {
    CheckpointBuilder columns;
    AddColumns(&columns, kRoot, s, StDtype::kBf16, false);
    const Planned planned(columns, ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s), NamingOf(kRoot, FusedLayout::kRows));
    CHECK(planned.plan.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(planned.Error().find("down_proj: shape is") != std::string::npos);
    CHECK(planned.Error().find("qwen3_5_moe stores experts as rows") != std::string::npos);
  }
}

TEST_CASE("Shapes that fit no orientation are refused with wanted and got") {
  const Sizes s = {2, 12, 5};
  const std::string pair = std::string(kRoot) + "gate_up_proj", down = std::string(kRoot) + "down_proj";
  for (FusedLayout layout : {FusedLayout::kRows, FusedLayout::kColumns, FusedLayout::kInterleavedColumns}) {
    for (const std::string& name : {pair, down}) {
      CheckpointBuilder builder;
      if (layout == FusedLayout::kRows) AddRows(&builder, pair, down, s, StDtype::kBf16);
      if (layout != FusedLayout::kRows) AddColumns(&builder, kRoot, s, StDtype::kBf16, false);
      builder.Find(name)->shape = {static_cast<int64_t>(builder.Find(name)->bytes.size() / 2)};
      const Planned planned(builder, ConfigOf(Family::kLlama4, layout, s), NamingOf(kRoot, layout));
      CHECK(planned.plan.status().code() == absl::StatusCode::kInvalidArgument);
      INFO(planned.Error());
      CHECK(planned.Error().find(name + ": shape is [") != std::string::npos);
      CHECK(planned.Error().find(", want [2, ") != std::string::npos);
    }
  }
  // Another number of experts, as pruned models have it.
  CheckpointBuilder builder;
  AddRows(&builder, pair, down, {3, 12, 5}, StDtype::kBf16);
  const Planned planned(builder, ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s), NamingOf(kRoot, FusedLayout::kRows));
  CHECK(planned.Error().find("shape is [3, 10, 12], want [2, 10, 12]") != std::string::npos);
}

TEST_CASE("gpt-oss experts that are not transposed are refused, whatever their shape would allow") {
  const Sizes s = {2, 12, 5};
  CheckpointBuilder builder;
  AddRows(&builder, std::string(kRoot) + "gate_up_proj", std::string(kRoot) + "down_proj", s, StDtype::kBf16);
  const Planned planned(builder, ConfigOf(Family::kGptOss, FusedLayout::kInterleavedColumns, s),
                        NamingOf(kRoot, FusedLayout::kInterleavedColumns));
  CHECK(planned.Error().find("gate_up_proj: shape is [2, 10, 12], want [2, 12, 10]") != std::string::npos);
}

TEST_CASE("Types other than F32, BF16 and F16, and types that differ, are refused") {
  const Sizes s = {2, 12, 5};
  const std::string pair = std::string(kRoot) + "gate_up_proj", down = std::string(kRoot) + "down_proj";
  const ModelConfig config = ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s);
  for (const std::string& name : {pair, down}) {
    CheckpointBuilder builder;
    AddRows(&builder, pair, down, s, StDtype::kBf16);
    builder.Find(name)->dtype = StDtype::kI16;
    const Planned planned(builder, config, NamingOf(kRoot, FusedLayout::kRows));
    CHECK(planned.Error().find(name + ": dtype is I16, want ") != std::string::npos);
  }
  CheckpointBuilder builder;
  AddRows(&builder, pair, down, s, StDtype::kBf16);
  builder.Find(down)->dtype = StDtype::kF16;
  const Planned planned(builder, config, NamingOf(kRoot, FusedLayout::kRows));
  CHECK(planned.Error().find("down_proj: dtype is F16, want that of the gate, BF16") != std::string::npos);
}

TEST_CASE("Missing tensors are all reported and no reader is made") {
  const Sizes s = {2, 12, 5};
  CheckpointBuilder builder;
  AddStacked(&builder, kRoot, s, StDtype::kBf16);
  REQUIRE(builder.Remove(std::string(kRoot) + "v1") == 1);
  REQUIRE(builder.Remove(std::string(kRoot) + "w2") == 1);
  const Planned stacked(builder, ConfigOf(Family::kDbrx, FusedLayout::kStacked, s), NamingOf(kRoot, FusedLayout::kStacked));
  REQUIRE(stacked.plan.ok());
  CHECK(stacked.plan->reader == nullptr);
  CHECK(stacked.missing == std::vector<std::string>{std::string(kRoot) + "v1", std::string(kRoot) + "w2"});
  CheckpointBuilder plain;
  AddColumns(&plain, kRoot, s, StDtype::kBf16, true);
  ModelConfig config = ConfigOf(Family::kGptOss, FusedLayout::kInterleavedColumns, s);
  config.expert_biases = true;
  const Planned biases(plain, config, NamingOf(kRoot, FusedLayout::kInterleavedColumns));
  REQUIRE(biases.plan.ok());
  CHECK(biases.plan->reader == nullptr);
  CHECK(biases.missing.size() == 2);
  const Planned rows(plain, config, NamingOf(kRoot, FusedLayout::kRows));
  CHECK(rows.Error().find("only the layout of gpt_oss is known") != std::string::npos);
}

TEST_CASE("Buffers of another layer do not show through") {
  const Sizes s = {2, 12, 5};
  CheckpointBuilder builder;
  AddRows(&builder, std::string(kRoot) + "gate_up_proj", std::string(kRoot) + "down_proj", s, StDtype::kBf16);
  const Planned planned(builder, ConfigOf(Family::kQwen35Moe, FusedLayout::kRows, s), NamingOf(kRoot, FusedLayout::kRows));
  REQUIRE(planned.plan.ok());
  ExpertWeights used;
  for (LinearWeights* linear : {&used.gate, &used.up, &used.down}) {
    linear->codes.assign(10000, 0xFF);
    linear->scales.assign(10, 1);
    linear->zero_points.assign(10, 1);
    linear->group_index.assign(10, 1);
    linear->bias.assign(10, 1.0f);
    linear->global_scale = linear->input_scale = 3.0f;
  }
  REQUIRE(planned.plan->reader->Read(1, &used).ok());
  for (const LinearWeights* linear : {&used.gate, &used.up, &used.down}) {
    CHECK(linear->bias.empty());
    CHECK(linear->global_scale == 1.0f);
    CHECK(linear->input_scale == 1.0f);
  }
  CHECK(Equals(used.down, 1, kDownPart, s.hidden, s.intermediate, 2));
}

TEST_CASE("Several threads may read at once") {
  const Sizes s = {4, 130, 33};
  CheckpointBuilder builder;
  AddColumns(&builder, kRoot, s, StDtype::kBf16, false);
  const Planned planned(builder, ConfigOf(Family::kLlama4, FusedLayout::kColumns, s),
                        NamingOf(kRoot, FusedLayout::kColumns));
  REQUIRE(planned.plan.ok());
  std::vector<int> wrong(4, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      ExpertWeights expert;
      for (int round = 0; round < 8; ++round) {
        const int e = (t + round) % s.experts;
        if (!planned.plan->reader->Read(e, &expert).ok() || !Equals(expert.up, e, kUpPart, s.intermediate, s.hidden, 2)) {
          ++wrong[t];
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
}

}  // namespace
}  // namespace moed
