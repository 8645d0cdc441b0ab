// What the GPU's reference says about layers and machines, and how it orders rows: nothing here needs a GPU.
#include <catch2/catch.hpp>

#include <set>
#include <string>

#include "kernels/cuda/reference.h"
#include "kernels/cuda/reference_rows.h"
#include "tests/support/random_layer.h"
#include "tests/support/schemes.h"

namespace moed {
namespace {

using cuda::SortedRows;
using cuda::SortRows;
using testing::MakeDesc;

MoeDesc PlainDesc() { return MakeDesc(3, 2, 96, 160, testing::PlainScheme(ElementType::kBf16)); }

DeviceInfo Hopper() {
  DeviceInfo device;
  device.has_gpu = true;
  device.cuda_major = 9;
  return device;
}

// Codes of all reasons, but for that of a build without CUDA.
std::set<std::string> Codes(const Verdict& verdict) {
  std::set<std::string> codes;
  for (const Reason& reason : verdict.reasons) codes.insert(reason.code);
  codes.erase("not_built");
  return codes;
}

}  // namespace

TEST_CASE("The GPU's reference is used only when its name is asked for, and takes memory of the GPU") {
  const Backend& backend = cuda::ReferenceBackend();
  CHECK(backend.Name() == "cuda_reference");
  CHECK_FALSE(backend.Automatic());
  CHECK(backend.OnGpu());
}

TEST_CASE("The GPU's reference runs every scheme on a GPU of compute capability 9.0, and tells every reason against others") {
  const Backend& backend = cuda::ReferenceBackend();
  for (const WeightScheme& weights : testing::WeightSchemes()) {
    LinearScheme linear;
    linear.weights = weights;
    CHECK(Codes(backend.Check(MakeDesc(3, 2, 96, 160, UniformScheme(linear)), Hopper())).empty());
  }
  for (const ActivationScheme& input : testing::InputSchemes()) {
    LinearScheme linear;
    linear.input = input;
    CHECK(Codes(backend.Check(MakeDesc(3, 2, 96, 160, UniformScheme(linear)), Hopper())).empty());
  }
  MoeDesc desc = PlainDesc();
  CHECK(Codes(backend.Check(desc, DeviceInfo())) == std::set<std::string>{"gpu_missing"});
  DeviceInfo older = Hopper();
  older.cuda_major = 8;
  CHECK(Codes(backend.Check(desc, older)) == std::set<std::string>{"capability_unsupported"});
  desc.max_tokens_per_expert = -1;
  desc.scheme.down.input = testing::Int8(ActivationMode::kDynamic, 1);
  desc.scheme.down.input.zero_points = true;
  const std::set<std::string> all = {"gpu_missing", "scheme_unsupported", "shape_unsupported"};
  CHECK(Codes(backend.Check(desc, DeviceInfo())) == all);
}

TEST_CASE("The GPU's reference holds float32 weights, biases and an input scale for each projection") {
  MoeDesc desc = PlainDesc();
  const size_t weights = size_t{3} * 3 * 96 * 160, scales = 3 * 3;
  CHECK(cuda::ReferenceBackend().PreparedBytes(desc) == 4 * (weights + scales));
  desc.biases = true;
  CHECK(cuda::ReferenceBackend().PreparedBytes(desc) == 4 * (weights + scales + 3 * (160 + 160 + 96)));
  CHECK(cuda::ReferenceBackend().WorkspaceBytes(desc) == 0);
}

TEST_CASE("Rows are sorted by expert, each slot once, and a tile holds rows of one expert") {
  const std::vector<int32_t> ids = {2, 0, -1, 2, 0, 0, -1, -1, 2, 2};  // [5, 2]
  const std::vector<float> weights = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  const SortedRows sorted = SortRows(ids, weights, 2, 4);
  CHECK(sorted.sources == std::vector<int32_t>{0, 2, 2, 0, 1, 4, 4});
  CHECK(sorted.experts == std::vector<int32_t>{0, 0, 0, 2, 2, 2, 2});
  CHECK(sorted.weights == std::vector<float>{1, 4, 5, 0, 3, 8, 9});
  CHECK(sorted.positions == std::vector<int32_t>{3, 0, -1, 4, 1, 2, -1, -1, 5, 6});
  REQUIRE(sorted.tiles.size() == 2);
  CHECK((sorted.tiles[0].expert == 0 && sorted.tiles[0].first == 0 && sorted.tiles[0].rows == 3));
  CHECK((sorted.tiles[1].expert == 2 && sorted.tiles[1].first == 3 && sorted.tiles[1].rows == 4));
  CHECK(SortRows({}, {}, 2, 4).tiles.empty());
}

TEST_CASE("Tiles cover the rows of an expert one after another, whole ones first") {
  const std::vector<int32_t> ids(2 * cuda::kTileRows + 1, 1);
  const SortedRows sorted = SortRows(ids, std::vector<float>(ids.size(), 1.0f), 1, 2);
  REQUIRE(sorted.tiles.size() == 3);
  int32_t first = 0;
  for (const cuda::RowTile& tile : sorted.tiles) {
    CHECK((tile.expert == 1 && tile.first == first));
    first += tile.rows;
  }
  CHECK((sorted.tiles[0].rows == cuda::kTileRows && sorted.tiles[2].rows == 1 && first == static_cast<int32_t>(ids.size())));
}

}  // namespace moed
