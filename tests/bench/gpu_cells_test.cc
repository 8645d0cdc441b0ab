// Cells of the GPU benchmark: what a file may say, what its names mean, and how recorded times are scaled.
#include <catch2/catch.hpp>

#include <set>

#include "bench/gpu_cells.h"

namespace moed::bench {
namespace {

constexpr const char* kCell =
    R"({"shape": "qwen3", "scheme": "int8_w8a8", "tokens": 8, "experts_touched": 51.0, "flops": 603979776.0,
    "best_peer": "other", "best_peer_ms": 0.084, "floor_ms": 0.052, "goal_ms": 0.061, "limit_ms": 0.059,
    "rotations": 2, "weight_sets": 3})";

std::string FileOf(const std::string& cells) {
  return R"({"device": "some GPU", "read_ceiling_GBs": 4000, "bf16_TFLOPS": 800.0, "fp8_TFLOPS": 1400, "cells": [)" + cells + "]}";
}

std::string Refusal(const std::string& text) {
  const absl::StatusOr<GpuCells> cells = ParseGpuCells(text);
  CHECK(cells.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(cells.status().message());
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  return text.replace(text.find(from), from.size(), to);
}

double BytesOfExpert(const char* shape, const char* scheme) { return ExpertBytes(GpuDescOf(shape, scheme).value()); }

GpuCells Recorded() { return {4000.0, 800.0, 1400.0, {}}; }

// Of 1 token or of many: what memory bounds, and what arithmetic does.
GpuCell MakeCell(const char* scheme, double flops, double limit_ms) {
  GpuCell cell;
  cell.shape = "mixtral";
  cell.scheme = scheme;
  cell.tokens = 8;
  cell.flops = flops;
  cell.peer = "other";
  cell.peer_ms = 3.0;
  cell.limit_ms = limit_ms;
  cell.goal_ms = 2.0;
  return cell;
}

Row Compared(const GpuCell& cell, const MeasuredGpu& measured) {
  Row row;
  row.backend = "cuda_generic";
  row.ms = 4.0;
  Compare(Recorded(), cell, measured, &row);
  return row;
}

}  // namespace

TEST_CASE("a file of cells tells the recorded ceilings, and of each cell what is timed and what it is compared with") {
  const absl::StatusOr<GpuCells> cells = ParseGpuCells(FileOf(kCell));
  REQUIRE(cells.ok());
  CHECK(cells->read_gbs == 4000.0);
  CHECK(cells->bf16_tflops == 800.0);
  CHECK(cells->fp8_tflops == 1400.0);
  REQUIRE(cells->cells.size() == 1);
  CHECK(cells->cells[0] == GpuCell{"qwen3", "int8_w8a8", 8, 603979776.0, "other", 0.084, 0.059, 0.061, 2, 3});
}

TEST_CASE("a file of cells that is wrong in one place is refused with that place named") {
  const auto with = [](const std::string& from, const std::string& to) {
    return Refusal(FileOf(std::string(kCell) + "," + Replaced(kCell, from, to)));
  };
  CHECK(Refusal("[") == "wanted a JSON object, got text that is no JSON");
  CHECK(Refusal("[]") == "wanted a JSON object, got a array");
  CHECK(Refusal(Replaced(FileOf(""), "4000", "0")) == "read_ceiling_GBs: wanted a number above 0, got 0");
  CHECK(Refusal(Replaced(FileOf(""), "\"cells\"", "\"sells\"")) == "cells: wanted a list, got nothing");
  CHECK(Refusal(FileOf("7")) == "cell 0: wanted an object, got a number");
  CHECK(with("\"qwen3\"", "\"qwen\"") == "cell 1: shape: wanted one of dsv3, gptoss, mixtral, qwen3, got \"qwen\"");
  CHECK(with("int8_w8a8", "int8") ==
        "cell 1: scheme: wanted one of bf16, fp8_block, int4_w4a16_g128, int8_w8a16, int8_w8a8, mxfp4_w4a16, got \"int8\"");
  CHECK(with("\"tokens\": 8", "\"tokens\": 0") == "cell 1: tokens: wanted an integer from 1 to 1048576, got 0");
  CHECK(with("\"best_peer\": \"other\", ", "") == "cell 1: best_peer: wanted a name, got nothing");
  CHECK(with("0.059", "\"fast\"") == "cell 1: limit_ms: wanted a number above 0, got \"fast\"");
  CHECK(with("\"rotations\": 2", "\"rotations\": 2.5") == "cell 1: rotations: wanted an integer from 1 to 1024, got 2.5");
  CHECK(with("\"weight_sets\": 3", "\"weight_sets\": 18446744073709551615").find("cell 1: weight_sets: wanted") == 0);
}

TEST_CASE("a file of cells that cannot be read is named") {
  const absl::StatusOr<GpuCells> cells = ReadGpuCells("no/such.json");
  CHECK(cells.status().code() == absl::StatusCode::kNotFound);
  CHECK(std::string(cells.status().message()) == "peers: cannot read no/such.json");
}

TEST_CASE("schemes have as many bytes as other programs' weights of their names") {
  // Bytes of the experts that one token touches, as measured programs held them.
  CHECK(8 * BytesOfExpert("dsv3", "bf16") == 704643072.0);
  CHECK(8 * BytesOfExpert("dsv3", "fp8_block") == 352407552.0);
  CHECK(8 * BytesOfExpert("dsv3", "int4_w4a16_g128") == 181665792.0);
  CHECK(8 * BytesOfExpert("dsv3", "int8_w8a16") == 357826560.0);
  CHECK(8 * BytesOfExpert("dsv3", "int8_w8a8") == 352681984.0);
  CHECK(8 * BytesOfExpert("dsv3", "mxfp4_w4a16") == 187170816.0);
  CHECK(4 * BytesOfExpert("gptoss", "bf16") == 199065600.0);
  CHECK(4 * BytesOfExpert("gptoss", "int8_w8a16") == 99671040.0);
  CHECK(4 * BytesOfExpert("gptoss", "mxfp4_w4a16") == 52876800.0);
  CHECK(2 * BytesOfExpert("mixtral", "int8_w8a8") == 352583680.0);
  CHECK(8 * BytesOfExpert("qwen3", "int4_w4a16_g128") == 19464192.0);
}

TEST_CASE("eight-bit schemes of whole arithmetic quantize activations as published models do, the others leave them alone") {
  const ActivationScheme fp8 = GpuDescOf("dsv3", "fp8_block")->scheme.down.input;
  CHECK(fp8.mode == ActivationMode::kDynamic);
  CHECK(fp8.element == ElementType::kFp8E4m3);
  CHECK(fp8.group == GroupShape{1, 128});
  const ActivationScheme int8 = GpuDescOf("dsv3", "int8_w8a8")->scheme.gate.input;
  CHECK(int8.element == ElementType::kInt8);
  CHECK(int8.group == GroupShape{1, 0});
  for (const char* scheme : {"bf16", "int4_w4a16_g128", "int8_w8a16", "mxfp4_w4a16"}) {
    CHECK(GpuDescOf("dsv3", scheme)->scheme.gate.input.mode == ActivationMode::kNone);
  }
}

TEST_CASE("gpt-oss has biases and the clamped activation, the others have neither") {
  for (const Shape& shape : GpuShapes()) {
    const MoeDesc desc = GpuDescOf(shape.name, "bf16").value();
    const bool gptoss = std::string(shape.name) == "gptoss";
    CHECK(desc.biases == gptoss);
    CHECK((desc.activation.kind == Activation::Kind::kSwigluOai) == gptoss);
    CHECK(desc.activation.clamped == gptoss);
  }
}

TEST_CASE("a limit that arithmetic makes scales with the GEMM, any other with the read stream") {
  // 0.93 x 800 TFLOPS: 744e9 operations take a millisecond; with 8-bit factors 0.93 x 1400.
  const GpuCell read = MakeCell("bf16", 744e9, 2.5), arithmetic = MakeCell("bf16", 744e9, 1.0),
                eight = MakeCell("int8_w8a8", 1302e9, 1.0);
  CHECK_FALSE(BoundByArithmetic(Recorded(), read));
  CHECK(BoundByArithmetic(Recorded(), arithmetic));
  CHECK(BoundByArithmetic(Recorded(), eight));
  CHECK_FALSE(BoundByArithmetic(Recorded(), MakeCell("int8_w8a8", 744e9, 1.0)));

  const MeasuredGpu measured = {2000.0, 1900.0, 400.0};
  const Row by_read = Compared(read, measured);
  CHECK(by_read.ceiling == "read stream");
  CHECK(by_read.ceiling_value == 2000.0);
  CHECK(by_read.peer_ms == 6.0);
  CHECK(by_read.goal_ms == 4.0);
  CHECK(by_read.fraction == 5.0 / 4.0);
  CHECK(by_read.peer_ratio() == 1.5);
  const Row by_gemm = Compared(arithmetic, {4000.0, 1900.0, 400.0});
  CHECK(by_gemm.ceiling == "bf16 GEMM");
  CHECK(by_gemm.ceiling_value == 400.0);
  CHECK(by_gemm.peer_ms == 6.0);
  CHECK(by_gemm.fraction == 0.5);
}

TEST_CASE("without a measured GEMM times that arithmetic bounds stay as recorded, and the ceiling says so") {
  const Row row = Compared(MakeCell("bf16", 744e9, 1.0), {2000.0, 1900.0, std::nullopt});
  CHECK(row.ceiling == "recorded bf16 GEMM");
  CHECK(row.ceiling_value == 800.0);
  CHECK(row.peer_ms == 3.0);
  CHECK(row.fraction == 0.25);
}

TEST_CASE("a row has its cell's names and operations, and no peer or goal where none is known") {
  GpuCell cell = MakeCell("bf16", 744e9, 2.5);
  cell.peer.clear();
  cell.goal_ms.reset();
  const Row row = Compared(cell, {4000.0, 3900.0, std::nullopt});
  CHECK(row.bench == "gpu");
  CHECK(row.shape == "mixtral");
  CHECK(row.scheme == "bf16");
  CHECK(row.tokens == 8);
  CHECK(row.operations == 744e9);
  CHECK_FALSE(row.peer_ratio().has_value());
  CHECK_FALSE(row.goal_ms.has_value());
}

TEST_CASE("the usual cells are every layer at seven sizes, with cold weights and limits that grow with the tokens") {
  const GpuCells cells = UsualGpuCells();
  CHECK(cells.cells.size() == GpuShapes().size() * GpuSchemes().size() * 7);
  std::set<std::string> layers;
  for (size_t at = 0; at < cells.cells.size(); ++at) {
    const GpuCell& cell = cells.cells[at];
    layers.insert(cell.shape + "/" + cell.scheme);
    const MoeDesc desc = GpuDescOf(cell.shape, cell.scheme).value();
    INFO(cell.shape << "/" << cell.scheme << "/" << cell.tokens);
    CHECK(cell.peer.empty());
    CHECK(cell.rotations >= 1);
    CHECK(cell.weight_sets * desc.num_experts * ExpertBytes(desc) >= 1e9);
    const bool same_layer = at > 0 && cells.cells[at - 1].shape == cell.shape && cells.cells[at - 1].scheme == cell.scheme;
    if (same_layer) CHECK(cell.limit_ms >= cells.cells[at - 1].limit_ms);
  }
  CHECK(layers.size() == GpuShapes().size() * GpuSchemes().size());
}

TEST_CASE("shapes and sizes choose among the cells, and a shape that is none is refused") {
  const GpuCells all = UsualGpuCells();
  CHECK(ChooseGpuCells(all, {}, {})->size() == all.cells.size());
  const std::vector<GpuCell> some = ChooseGpuCells(all, {"qwen3", "gptoss"}, {8}).value();
  CHECK(some.size() == 2 * GpuSchemes().size());
  for (const GpuCell& cell : some) {
    CHECK((cell.shape == "qwen3" || cell.shape == "gptoss"));
    CHECK(cell.tokens == 8);
  }
  CHECK(ChooseGpuCells(all, {}, {9})->empty());
  CHECK(std::string(ChooseGpuCells(all, {"qwen"}, {}).status().message()) ==
        "shapes: wanted names of dsv3, gptoss, mixtral, qwen3, got \"qwen\"");
}

}  // namespace moed::bench
