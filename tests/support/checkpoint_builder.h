// Checkpoints for tests: collect tensors, generate whole layers in the formats that real tools write, write a directory.
//
// A model in three lines; the answer holds the weights that a loader must see, exactly:
//   ModelSpec spec{.family = ModelFamily::kQwen3Moe, .experts = {.format = ExpertFormat::kGptq, .group = 64}};
//   CheckpointBuilder builder;
//   std::vector<LayerReference> reference = AddModel(spec, &builder);
//   REQUIRE(builder.Write(dir.path()).ok());
// Single tensors can then be replaced, renamed or removed before Write to make a checkpoint that is wrong in one place.
// Everything here is a pure function of its arguments; not thread-safe.
#ifndef MOED_TESTS_SUPPORT_CHECKPOINT_BUILDER_H_
#define MOED_TESTS_SUPPORT_CHECKPOINT_BUILDER_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "engine/safetensors.h"

namespace moed::testing {

// ---- Weights of cases.md ------------------------------------------------------------------------------------------

// The number stream R(s, i), in [-0.5, 0.5).
double R(uint32_t s, uint64_t i);

// A weight before quantization: expert e, projection (below), row-major index of a plain [N, K] matrix.
enum Projection : int { kGate = 0, kUp = 1, kDown = 2 };
using WeightFn = std::function<float(int expert, int projection, int64_t index)>;

// RC(E, H, I): R(1000 + 3e + p, n) * 8 / sqrt(columns).
WeightFn RcWeights(int64_t hidden, int64_t intermediate);
// PC(a, b): gate column 0 = a, up column 0 = b, all else 0, down = 1 / I everywhere; the same for each expert. Quantized,
// a and b stay exact with ExpertSpec::scale_divisor = 4 when a / 4 and b / 4 are exact in the scale's type.
WeightFn PcWeights(int64_t hidden, int64_t intermediate, float a, float b);
// x[t][h] = 4 * R(7, t * H + h), [tokens, hidden], before rounding to the I/O type.
std::vector<float> CaseHidden(int64_t tokens, int64_t hidden);
// logits[t][e] = 8 * R(9, t * E + e), [tokens, experts].
std::vector<float> CaseLogits(int64_t tokens, int experts);

// ---- Tensors and files --------------------------------------------------------------------------------------------

struct BuilderTensor {
  std::string name;
  StDtype dtype = StDtype::kU8;
  std::vector<int64_t> shape;
  std::vector<uint8_t> bytes;  // little-endian, dense
};

class CheckpointBuilder {
 public:
  void Add(const std::string& name, StDtype dtype, const std::vector<int64_t>& shape, std::vector<uint8_t> bytes);
  // Rounds to `dtype` (F32, F16 or BF16), to nearest even.
  void AddFloats(const std::string& name, StDtype dtype, const std::vector<int64_t>& shape, std::span<const float> values);
  void AddInt32(const std::string& name, const std::vector<int64_t>& shape, std::span<const int32_t> values);
  void AddInt64(const std::string& name, const std::vector<int64_t>& shape, std::span<const int64_t> values);

  // Null when there is no such tensor; valid until the next Add or Remove.
  BuilderTensor* Find(const std::string& name);
  // The number of tensors removed (0 or 1).
  int Remove(const std::string& name);
  // Replaces `from` by `to` in every name that contains it; the number of names changed.
  int RenameAll(const std::string& from, const std::string& to);
  const std::vector<BuilderTensor>& tensors() const { return tensors_; }

  void SetConfig(std::string text) { SetFile("config.json", std::move(text)); }
  // A further text file of the directory, such as quantize_config.json; replaces one of the same name.
  void SetFile(const std::string& name, std::string text);
  // Empty when there is none.
  std::string GetFile(const std::string& name) const;

  // Writes into the directory, which must exist: model.safetensors when `shards` is 1, else model-0000K-of-0000N.safetensors
  // with model.safetensors.index.json. Tensor t goes to shard t % shards, so the pieces of one weight are in different
  // files.
  absl::Status Write(const std::string& directory, int shards = 1) const;

 private:
  std::vector<BuilderTensor> tensors_;
  std::vector<std::pair<std::string, std::string>> files_;
};

// ---- Expert layers ------------------------------------------------------------------------------------------------

enum class ExpertFormat : uint8_t {
  kBf16, kF16, kF32,  // plain `weight`
  kGptq,              // qweight, qzeros, scales (f16), g_idx; symmetric
  kPacked,            // compressed-tensors pack-quantized: weight_packed, weight_scale (bf16), weight_shape; symmetric
  // The following ones are written by AddProjection and AddExperts; configs for them are the test's.
  kAwq,               // qweight and qzeros along N in the order 0 2 4 6 1 3 5 7, scales (f16); asymmetric
  kInt8,              // weight I8 (bits 8, or 4: one value a byte), weight_scale; with zero points if asymmetric
  kFp8,               // weight F8_E4M3, weight_scale, or weight_scale_inv for blocks
  kMxfp8,             // weight F8_E4M3, weight_scale U8 [N, K/32]
  kMxfp4,             // weight U8, weight_scale U8 [N, K/32]
  kMxfp4Packed,       // weight_packed U8, weight_scale U8
  kMxfp4Short,        // weight I8, scale F8_E8M0: deepseek v4
  kNvfp4,             // ModelOpt: weight U8, weight_scale F8_E4M3 [N, K/16], weight_scale_2
  kNvfp4Packed,       // compressed-tensors: weight_packed U8, weight_scale, weight_global_scale
  kQuarkInt4,         // weight I32 [K, N/8], weight_scale (bf16) [G, N], weight_zero_point [G, N/8]
  kQuarkTwoStage,     // weight I32 [N, K/8], weight_scale [], weight_scale_2 [N], weight_zero_point_2
};

enum class ExpertNames : uint8_t {
  kW123,       // block_sparse_moe.experts.E.w1 (gate), .w3 (up), .w2 (down): mixtral
  kMlp,        // mlp.experts.E.gate_proj, .up_proj, .down_proj: qwen3_moe, deepseek_v3, and mixtral as written by GPTQModel
  kGptOssFused,  // mlp.experts.gate_up_proj [E,H,2I] interleaved and transposed, down_proj [E,I,H]: plain formats only
};

enum class GroupIndex : uint8_t {
  kTrivial,   // g_idx[k] = k / g
  kNone,      // no g_idx tensor
  kShuffled,  // act-order: g_idx[k] = ((s k) mod K) / g; every group keeps its number of columns when K is a power of two
};

// How the matrices of experts are stored.
struct ExpertSpec {
  ExpertFormat format = ExpertFormat::kBf16;
  int bits = 4;              // quantized formats: 4 or 8
  int group = -1;            // quantized formats: columns of one scale, -1: all; kGptq allows a short last group
  // Scale of a group: absmax / scale_divisor, rounded to the scale's type (1 for a group of zeros). 0: 2^(bits-1) - 1, the
  // largest code.
  int scale_divisor = 0;
  bool vary_groups = false;  // the scale of group j is stored times 2^-(j mod 4), so that no two neighbours agree
  GroupIndex group_index = GroupIndex::kTrivial;  // kGptq only
  int shuffle = 37;          // the odd number s of kShuffled
  bool bf16_scales = false;  // kGptq: scales are BF16 and not F16
  bool gptq_v2 = false;      // zero points stored as they are (0x88888888) and not minus one (0x77777777)
  // Integers with zero points that run through all values, 0 included; kAwq always, kGptq and kPacked too when set.
  bool asymmetric = false;
  bool per_tensor = false;   // kInt8, kFp8, kPacked: one scale, stored as [1]
  int block_rows = 0;        // kInt8, kFp8: one scale for block_rows x group elements
  bool flat_scales = false;  // kInt8, kFp8 per channel: [N] and not [N, 1]; per tensor: [] and not [1]
  StDtype scale_dtype = StDtype::kBf16;  // kInt8, kFp8
  bool awq_order = true;     // kQuarkInt4, kQuarkTwoStage
  bool twos_complement = false;  // kQuarkInt4; kQuarkTwoStage always is
};

// The weights that a loader must see: row-major plain [N, K], exactly dequantized.
struct ExpertReference {
  std::vector<float> gate;  // [I, H]
  std::vector<float> up;    // [I, H]
  std::vector<float> down;  // [H, I]
  std::vector<float> gate_bias, up_bias, down_bias;  // [I], [I], [H]; empty when the layer has none
};

struct LayerReference {
  int layer = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  std::vector<ExpertReference> experts;
  std::vector<float> router;           // [E, H], as stored
  std::vector<float> router_bias;      // [E], gpt_oss only
  std::vector<float> correction_bias;  // [E], deepseek_v3 only
  bool has_shared = false;
  int64_t shared_intermediate = 0;
  ExpertReference shared;
};

// One projection `prefix`.weight / .qweight ... of shape [rows, cols] with weights `weight(row-major index)`; the answer is
// what it dequantizes to. Packed formats need cols * bits to be a multiple of 32, kGptq rows * bits too.
std::vector<float> AddProjection(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols,
                                 const ExpertSpec& spec, const std::function<float(int64_t)>& weight);

// The same for the formats from kAwq on, and for asymmetric or per-tensor ones before; called by AddProjection.
std::vector<float> AddOtherFormat(CheckpointBuilder* builder, const std::string& prefix, int64_t rows, int64_t cols,
                                  const ExpertSpec& spec, const std::function<float(int64_t)>& weight);

// All routed experts of a layer below `layer_prefix` ("model.layers.0."). `biases` (kGptOssFused only, may be empty: 0) has
// the signature of weights, index counting output features.
std::vector<ExpertReference> AddExperts(CheckpointBuilder* builder, const std::string& layer_prefix, ExpertNames names,
                                        int num_experts, int64_t hidden, int64_t intermediate, const ExpertSpec& spec,
                                        const WeightFn& weights, const WeightFn& biases = {});

// ---- Models -------------------------------------------------------------------------------------------------------

enum class ModelFamily : uint8_t { kMixtral, kQwen3Moe, kDeepseekV3, kGptOss };

struct ModelSpec {
  ModelFamily family = ModelFamily::kMixtral;
  int num_layers = 1;  // deepseek_v3: one more in the file, since its layer 0 is dense
  int64_t hidden = 256;
  int64_t intermediate = 128;
  int num_experts = 4;
  int top_k = 2;
  ExpertSpec experts;
  std::vector<ExpertSpec> layer_experts;  // one for each layer, where they differ; empty: `experts`
  WeightFn weights;               // empty: RcWeights; layer l uses expert number l * num_experts + e
  bool mlp_names = false;         // mixtral: kMlp and mlp.gate, as GPTQModel writes
  bool biases = true;             // gpt_oss: biases R(500 + ...), else zeros
  int num_shared_experts = 1;     // deepseek_v3; 0: none
  ExpertSpec shared;              // deepseek_v3
  int n_group = 1;                // deepseek_v3
  int topk_group = 1;
  double routed_scaling = 2.5;    // deepseek_v3
  bool norm_topk_prob = true;     // qwen3_moe, deepseek_v3
  double swiglu_limit = 7.0;      // gpt_oss
  StDtype router_dtype = StDtype::kBf16;
  bool keep_reference = true;     // false: LayerReference::experts stays empty, for models too large to hold as floats
  std::string quantization;       // quantization_config as JSON text; empty: what `experts` asks for, if it is quantized
};

// quantization_config of a GPTQ checkpoint, as GPTQModel writes it.
std::string GptqConfigText(const ExpertSpec& spec);
// quantization_config of a compressed-tensors checkpoint: all Linear layers packed, but for `ignore` and the router.
std::string PackedConfigText(const ExpertSpec& spec, const std::vector<std::string>& ignore);

// config.json of the model. Keys as transformers writes them; pass the text through a JSON parser to change one.
std::string ConfigText(const ModelSpec& spec);

// Adds config.json and, for each MoE layer, experts, router and (deepseek_v3) shared experts; a dense layer 0 gets its
// tensors too. One reference per MoE layer.
std::vector<LayerReference> AddModel(const ModelSpec& spec, CheckpointBuilder* builder);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_CHECKPOINT_BUILDER_H_
