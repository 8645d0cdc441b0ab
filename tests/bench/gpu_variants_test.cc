// Variants of the GPU benchmark: what they change, which cells have them, and what their ratios come to.
#include <catch2/catch.hpp>

#include <fstream>
#include <iterator>
#include <set>

#include "bench/gpu_variants.h"
#include "tests/support/temp_dir.h"

namespace moed::bench {
namespace {

const Variant& Find(const std::vector<Variant>& variants, const std::string& name) {
  for (const Variant& variant : variants) {
    if (variant.name == name) return variant;
  }
  FAIL("no variant " << name);
  return variants.front();
}

Row RowOf(const char* variant, const char* shape, int64_t tokens, double ratio) {
  Row row;
  row.bench = "gpu-variant";
  row.shape = shape;
  row.scheme = "int4_w4a16_g128";
  row.variant = variant;
  row.tokens = tokens;
  row.ms = 2.0;
  row.base_ratio = ratio;
  return row;
}

GpuCell CellOf(const char* shape, const char* scheme, int64_t tokens, int rotations) {
  GpuCell cell;
  cell.shape = shape;
  cell.scheme = scheme;
  cell.tokens = tokens;
  cell.rotations = rotations;
  return cell;
}

// "shape/scheme", once for every stretch of cells of one layer.
std::vector<std::string> Layers(const std::vector<GpuCell>& cells) {
  std::vector<std::string> layers;
  for (const GpuCell& cell : cells) {
    const std::string layer = cell.shape + "/" + cell.scheme;
    if (layers.empty() || layers.back() != layer) layers.push_back(layer);
  }
  return layers;
}

}  // namespace

TEST_CASE("each variant changes one thing of the base, the same in all three projections") {
  const MoeDesc base = GpuDescOf("qwen3", "int8_w8a16").value();
  const std::vector<Variant> variants = VariantsOf(base);
  std::set<std::string> names;
  for (const Variant& variant : variants) {
    INFO(variant.name);
    names.insert(variant.name);
    CHECK(variant.desc.scheme.gate == variant.desc.scheme.down);
    CHECK(variant.desc.scheme.gate == variant.desc.scheme.up);
    CHECK(variant.desc.hidden == base.hidden);
    CHECK(variant.desc.deterministic == (std::string(variant.name) == "deterministic"));
    CHECK(variant.batched == (variant.desc.max_tokens_per_expert > 0));
    CHECK(variant.equal_orders == (std::string(variant.name) != "act-order-unequal"));
  }
  CHECK(names.size() == variants.size());
  CHECK(std::string(variants.front().name) == "base");
  for (const char* same : {"base", "batched", "deterministic"}) CHECK(Find(variants, same).desc.scheme == base.scheme);
  WeightScheme weights = base.scheme.gate.weights;
  weights.group.cols = 32;
  CHECK(Find(variants, "group-32").desc.scheme.gate.weights == weights);
  weights = base.scheme.gate.weights;
  weights.act_order = true;
  CHECK(Find(variants, "act-order").desc.scheme.gate.weights == weights);
  CHECK(Find(variants, "act-order-unequal").desc.scheme.gate.weights == weights);
  weights = base.scheme.gate.weights;
  weights.zero_points = true;
  CHECK(Find(variants, "asymmetric").desc.scheme.gate.weights == weights);
  CHECK(Find(variants, "batched").batched);
}

TEST_CASE("integer layers in groups of 128 have variants, per channel or with other weights or activations they have none") {
  CHECK(HasVariants(GpuDescOf("gptoss", "int4_w4a16_g128").value()));
  CHECK(HasVariants(GpuDescOf("dsv3", "int8_w8a16").value()));
  CHECK_FALSE(HasVariants(GpuDescOf("gptoss", "int8_w8a16").value()));  // 2880 inputs are no whole number of groups
  for (const char* scheme : {"bf16", "fp8_block", "int8_w8a8", "mxfp4_w4a16"}) {
    CHECK_FALSE(HasVariants(GpuDescOf("qwen3", scheme).value()));
  }
}

TEST_CASE("cells of variants are a file's, the usual ones of layers that it lacks, together for each layer") {
  GpuCells recorded = UsualGpuCells();
  recorded.cells = {CellOf("qwen3", "int8_w8a16", 8, 5), CellOf("qwen3", "int4_w4a16_g128", 8, 3),
                    CellOf("qwen3", "int4_w4a16_g128", 1, 4), CellOf("qwen3", "bf16", 8, 1), CellOf("dsv3", "int8_w8a16", 1, 2)};
  const std::vector<GpuCell> cells = VariantCells(recorded, {"qwen3", "gptoss"}, {1, 8}).value();
  CHECK(Layers(cells) == std::vector<std::string>{"gptoss/int4_w4a16_g128", "qwen3/int4_w4a16_g128", "qwen3/int8_w8a16"});
  REQUIRE(cells.size() == 5);
  CHECK(cells[0].tokens == 1);
  CHECK(cells[1].tokens == 8);
  CHECK(cells[0].rotations > 1);
  CHECK(cells[2] == recorded.cells[1]);
  CHECK(cells[3] == recorded.cells[2]);
  CHECK(cells[4] == recorded.cells[0]);
  CHECK(Layers(VariantCells(UsualGpuCells(), {}, {32}).value()).size() == 7);
  CHECK(VariantCells(recorded, {"dsv3"}, {8})->size() == 1);  // int4's usual one; int8 is recorded with 1 token only
  CHECK(VariantCells(recorded, {"llama"}, {}).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("means are geometric and by variant, the worst is named, act-order counts from 8 tokens on, the base not at all") {
  const std::vector<VariantMean> means = VariantMeans(
      {RowOf("base", "qwen3", 1, 1.0), RowOf("group-32", "qwen3", 1, 1.21), RowOf("act-order", "qwen3", 1, 9.0),
       RowOf("base", "dsv3", 8, 1.0), RowOf("group-32", "dsv3", 8, 1.0), RowOf("act-order", "dsv3", 8, 1.5)});
  REQUIRE(means.size() == 2);
  CHECK(means[0].variant == "group-32");
  CHECK(means[0].cells == 2);
  CHECK(means[0].ratio == Approx(1.1));
  CHECK(means[0].worst == Approx(1.21));
  CHECK(means[0].worst_shape == "qwen3");
  CHECK(means[0].worst_tokens == 1);
  CHECK(means[1].variant == "act-order");
  CHECK(means[1].cells == 1);
  CHECK(means[1].ratio == Approx(1.5));
  CHECK(means[1].worst_shape == "dsv3");
  Row other = RowOf("group-32", "dsv3", 8, 1.3);
  other.scheme = "int8_w8a16";
  CHECK(VariantMeans({RowOf("group-32", "dsv3", 8, 1.0), other}).size() == 2);
}

TEST_CASE("rows of variants say in JSON which they are and their ratio to the base") {
  const testing::TempDir dir;
  const std::string path = dir.File("rows.json");
  REQUIRE(WriteJson({RowOf("asymmetric", "qwen3", 8, 1.5)}, path));
  std::ifstream file(path);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  for (const char* member : {R"("bench": "gpu-variant")", R"("variant": "asymmetric")", R"("base_ratio": 1.5)", R"("ms": 2.0)"}) {
    CHECK(text.find(member) != std::string::npos);
  }
}

}  // namespace moed::bench
