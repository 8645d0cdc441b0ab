// The checkpoints with golden outputs that tests can use, and which rows of a golden routing are decided clearly enough to
// be demanded from another implementation. Pure functions over files; errors fail the test.
#ifndef MOED_TESTS_CLIENT_GOLDEN_MODELS_H_
#define MOED_TESTS_CLIENT_GOLDEN_MODELS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace moed::testing {

struct GoldenModel {
  std::string name;  // of the folder
  std::string path;
  std::vector<int> layers;  // with golden outputs, ascending

  std::string GoldenFile() const { return path + "/golden.safetensors"; }
  // Whether the golden file has the tensor "LAYER.NAME".
  bool Has(int layer, const std::string& tensor) const;
  // Bytes of all tensors of the layer's experts, the shared one included, as they lie in the checkpoint.
  uint64_t ExpertBytes(int layer) const;
};

// Every folder below tests/data; where MOED_MODELS names a folder, also those of its models that have another name.
std::vector<GoldenModel> GoldenModels();
// One of tests/data by name.
GoldenModel CheckedInModel(const std::string& name);

// Rows whose choice of experts hangs by less than `gap`: the k-th choice score is that close to the (k+1)-th, or the last
// kept group's score to the first dropped one's. The choice score is what the family compares: softmax over all experts
// (mixtral, qwen3_moe), the logit (gpt_oss), sigmoid plus correction bias (deepseek_v3).
std::vector<int64_t> RowsDecidedByLess(const GoldenModel& model, int layer, double gap);
// As an argument of --skip-rows, "3,17"; empty when there are none.
std::string RowsText(const std::vector<int64_t>& rows);

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<float> values;  // bf16 and f32, widened; i32 converted
};
GoldenTensor ReadGolden(const std::string& file, const std::string& name);

}  // namespace moed::testing

#endif  // MOED_TESTS_CLIENT_GOLDEN_MODELS_H_
