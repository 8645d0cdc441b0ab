// Writes the seeds of one fuzz target into the folder OUT: make_seeds TARGET OUT DICTIONARY CHECKPOINT...
//
// DICTIONARY is config.dict. Seeds are real files cut down to what decides: a config keeps the keys of
// config.dict, a safetensors file one tensor of each kind with small dimensions, so that an input is some hundred bytes.
#include <cstdio>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "engine/checkpoint.h"
#include "engine/model_config.h"
#include "engine/recorded_call.h"
#include "engine/safetensors.h"
#include "engine/text_file.h"
#include "engine/weights.h"
#include "nlohmann/json.hpp"
#include "proto/moe/v1/moe.pb.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/temp_dir.h"

namespace moed::fuzz {
namespace {

using nlohmann::json;
namespace v1 = moe::v1;

class Seeds {
 public:
  Seeds(std::string target, std::string out) : target_(std::move(target)), out_(std::move(out)) {}

  bool For(const std::string& target) const { return target == target_; }
  // Nothing unless the seeds are for `target`.
  void Write(const std::string& target, const std::string& name, const std::string& bytes) {
    if (For(target)) testing::WriteFile(out_ + "/" + name, bytes);
  }

 private:
  const std::string target_;
  const std::string out_;
};

// ---- Real files, cut down -------------------------------------------------------------------------------------------

// The quoted words of a dictionary in libFuzzer's form, as far as they are keys: "\"bits\"".
std::set<std::string> KeysOf(const std::string& dictionary) {
  std::set<std::string> keys;
  std::ifstream lines(dictionary);
  const std::string open = "\"\\\"", close = "\\\"\"";
  for (std::string line; std::getline(lines, line);) {
    const bool key = line.size() > 6 && line.rfind(open, 0) == 0 && line.compare(line.size() - 3, 3, close) == 0;
    if (key) keys.insert(line.substr(3, line.size() - 6));
  }
  return keys;
}

// Without keys that nothing reads, and with short lists of names. Below `free_keys` keys are names of modules.
json Lean(const json& value, const std::set<std::string>& keys, bool free_keys = false) {
  static const std::set<std::string> maps = {"config_groups", "dynamic", "extra_config", "layer_quant_config", "modules"};
  if (value.is_array() && value.size() > 3 && value.front().is_string()) return json(value.begin(), value.begin() + 3);
  if (!value.is_object()) return value;
  json lean = json::object();
  for (const auto& item : value.items()) {
    if (!free_keys && keys.count(item.key()) == 0) continue;
    if (free_keys && lean.size() == 3) break;
    lean[item.key()] = Lean(item.value(), keys, maps.count(item.key()) > 0);
  }
  return lean;
}

// One tensor of each dtype and rank, with dimensions of at most 2, as a file of its own; the names go to `names`.
std::string SmallFile(const Checkpoint& checkpoint, std::vector<std::string>* names) {
  const std::map<std::string, TensorRef> sorted(checkpoint.tensors().begin(), checkpoint.tensors().end());
  std::set<std::pair<StDtype, size_t>> kinds;
  testing::CheckpointBuilder builder;
  for (const auto& [name, tensor] : sorted) {
    if (!kinds.emplace(tensor.info->dtype, tensor.info->shape.size()).second) continue;
    TensorInfo small = *tensor.info;
    int64_t bits = StDtypeBits(small.dtype);
    for (int64_t& dimension : small.shape) bits *= dimension = std::min<int64_t>(dimension, 2);
    builder.Add(name, small.dtype, small.shape, std::vector<uint8_t>(static_cast<size_t>(bits / 8)));
    names->push_back(name);
  }
  const testing::TempDir dir;
  if (!builder.Write(dir.path()).ok()) return "";
  return testing::ReadFile(dir.File("model.safetensors"));
}

constexpr char kBorder = '\0';  // between the pieces of an input (pieces.h)

std::string IndexOf(const std::vector<std::string>& names) {
  json map = {{"b", "b.safetensors"}, {"c", "b.safetensors"}};
  for (const std::string& name : names) map[name] = "a.safetensors";
  return json({{"metadata", {{"total_size", 4}}}, {"weight_map", map}}).dump();
}

// ---- Small models ---------------------------------------------------------------------------------------------------

struct Format {
  const char* name;
  testing::ExpertSpec experts;
  std::string quantization;  // empty: the builder knows it
};

std::vector<Format> Formats() {
  using testing::ExpertFormat;
  const std::string compressed = R"({"quant_method":"compressed-tensors","format":")";
  const std::string groups = R"(","config_groups":{"group_0":{"targets":["Linear"],"weights":{)";
  return {
      {"bf16", {.format = ExpertFormat::kBf16}, ""},
      {"gptq", {.format = ExpertFormat::kGptq, .group = 16}, ""},
      {"gptq-actorder", {.format = ExpertFormat::kGptq, .group = 16, .group_index = testing::GroupIndex::kShuffled}, ""},
      {"packed", {.format = ExpertFormat::kPacked, .group = 16}, ""},
      {"awq", {.format = ExpertFormat::kAwq, .group = 16},
       R"({"quant_method":"awq","bits":4,"group_size":16,"zero_point":true,"version":"gemm"})"},
      {"int8", {.format = ExpertFormat::kInt8, .bits = 8},
       compressed + "int-quantized" + groups + R"("num_bits":8,"type":"int","strategy":"channel","symmetric":true}}}})"},
      {"fp8-blocks", {.format = ExpertFormat::kFp8, .bits = 8, .group = 16, .block_rows = 16},
       R"({"quant_method":"fp8","activation_scheme":"dynamic","weight_block_size":[16,16]})"},
      {"nvfp4", {.format = ExpertFormat::kNvfp4, .group = 16},
       R"({"quant_method":"modelopt","quant_algo":"NVFP4","kv_cache_quant_algo":null,"group_size":16,"exclude_modules":[]})"},
      {"mxfp4", {.format = ExpertFormat::kMxfp4Packed, .group = 32},
       compressed + "mxfp4-pack-quantized" + groups +
           R"("num_bits":4,"type":"float","strategy":"group","group_size":32,"symmetric":true}}}})"},
  };
}

// A small model of one layer: config, border, file. Empty when the builder cannot write it.
std::string MakeModel(const testing::ModelSpec& spec) {
  testing::CheckpointBuilder builder;
  testing::AddModel(spec, &builder);
  const testing::TempDir dir;
  if (!builder.Write(dir.path()).ok()) return "";
  const std::string config = json::parse(builder.GetFile("config.json")).dump();
  return config + kBorder + testing::ReadFile(dir.File("model.safetensors"));
}

// Whether a loader accepts the first layer of `model`.
bool Loads(const std::string& model) {
  const size_t border = model.find(kBorder);
  const auto config = ParseModelConfig(model.substr(0, border));
  if (!config.ok()) return false;
  const testing::TempDir dir;
  testing::WriteFile(dir.File("model.safetensors"), model.substr(border + 1));
  const auto checkpoint = Checkpoint::Open(dir.path());
  return checkpoint.ok() && PlanLayer(*config, **checkpoint, config->moe_layers.front()).ok();
}

// Small models with the quantization that a real file describes, in whatever storage fits it, found by trying.
void AddDescribed(const std::string& name, const json& description, Seeds* seeds) {
  using testing::ExpertFormat;
  constexpr int kFirst = static_cast<int>(ExpertFormat::kGptq), kLast = static_cast<int>(ExpertFormat::kQuarkTwoStage);
  for (int format = kFirst; format <= kLast; ++format) {
    for (const int group : {16, 32, -1}) {
      for (const int bits : {4, 8}) {
        testing::ModelSpec spec{.hidden = 32, .intermediate = 32, .num_experts = 2, .top_k = 1};
        spec.experts = {.format = static_cast<ExpertFormat>(format), .bits = bits, .group = group};
        spec.quantization = description.dump();
        const std::string model = MakeModel(spec);
        if (model.empty() || !Loads(model)) continue;
        seeds->Write("weights", name + "-" + std::to_string(format), model);
      }
    }
  }
}

void AddModels(Seeds* seeds) {
  using testing::ModelFamily;
  for (const Format& format : Formats()) {
    for (const ModelFamily family :
         {ModelFamily::kMixtral, ModelFamily::kQwen3Moe, ModelFamily::kDeepseekV3, ModelFamily::kGptOss}) {
      if (family == ModelFamily::kGptOss && format.experts.format != testing::ExpertFormat::kBf16) continue;
      testing::ModelSpec spec{.family = family, .hidden = 32, .intermediate = 32, .num_experts = 2, .top_k = 1};
      spec.experts = format.experts;
      spec.shared = format.experts;
      spec.quantization = format.quantization;
      const std::string name = std::string(format.name) + "-" + std::to_string(static_cast<int>(family));
      const std::string model = MakeModel(spec);
      seeds->Write("weights", name, model);
      seeds->Write("config", "made-" + name, model.substr(0, model.find(kBorder)));
    }
  }
}

// ---- What each target gets ------------------------------------------------------------------------------------------

void AddCheckpoint(const std::string& path, const std::set<std::string>& keys, Seeds* seeds) {
  const std::string name = path.substr(path.find_last_of('/') + 1);
  const auto text = ReadTextFile(path + "/config.json", 1 << 20);
  if (!text.ok()) return;
  const json config = json::parse(*text, nullptr, false);
  if (config.is_discarded()) return;
  const std::string lean = Lean(config, keys).dump();
  seeds->Write("config", name, lean);
  if (seeds->For("weights") && config.contains("quantization_config")) {
    AddDescribed(name, Lean(config["quantization_config"], keys), seeds);
  }
  constexpr const char* kSideFiles[] = {"hf_quant_config.json", "quantize_config.json", "quant_config.json",
                                        "quantization_config.json"};
  for (char i = 0; i < 4; ++i) {
    const auto side = ReadTextFile(path + "/" + kSideFiles[static_cast<int>(i)], 1 << 20);
    if (!side.ok()) continue;
    json plain = config;
    plain.erase("quantization_config");
    const json described = json::parse(*side, nullptr, false);
    if (described.is_discarded()) continue;
    const std::string rest = std::string(1, kBorder) + static_cast<char>('@' + i) + Lean(described, keys).dump();
    seeds->Write("config", name + "-side", Lean(plain, keys).dump() + rest);
  }
  const auto checkpoint = Checkpoint::Open(path);
  if (!checkpoint.ok()) return;
  std::vector<std::string> names;
  const std::string file = SmallFile(**checkpoint, &names);
  seeds->Write("safetensors", name, file);
  seeds->Write("index", name, IndexOf(names) + kBorder + file);
}

void FillTensor(v1::DType dtype, int64_t rows, int64_t cols, int element_bytes, v1::Tensor* out) {
  out->set_dtype(dtype);
  out->add_shape(rows);
  out->add_shape(cols);
  out->set_data(std::string(static_cast<size_t>(rows * cols * element_bytes), '\0'));
}

void AddRequests(Seeds* seeds) {
  v1::ForwardRequest request;
  for (const auto& [dtype, bytes] : {std::pair(v1::DTYPE_F32, 4), std::pair(v1::DTYPE_BF16, 2), std::pair(v1::DTYPE_F16, 2)}) {
    request.Clear();
    FillTensor(dtype, 2, 4, bytes, request.mutable_hidden());
    seeds->Write("wire", "gate-" + std::to_string(dtype), request.SerializeAsString());
    request.set_model("tiny");
    request.set_layer(3);
    FillTensor(v1::DTYPE_I32, 2, 2, 4, request.mutable_top_k()->mutable_ids());
    FillTensor(v1::DTYPE_F32, 2, 2, 4, request.mutable_top_k()->mutable_weights());
    request.set_routed_only(true);
    seeds->Write("wire", "ids-" + std::to_string(dtype), request.SerializeAsString());
    FillTensor(v1::DTYPE_F32, 2, 4, 4, request.mutable_router_logits());
    request.set_output_dtype(v1::DTYPE_F32);
    request.set_return_routing(true);
    request.set_request_id("one");
    seeds->Write("wire", "logits-" + std::to_string(dtype), request.SerializeAsString());
  }
  v1::SelfCheckRequest self_check;
  self_check.set_model("tiny");
  self_check.set_tokens(64);
  seeds->Write("wire", "self-check", self_check.SerializeAsString());
}

// Recordings of every payload and routing.
void AddRecordings(Seeds* seeds) {
  using Routing = RecordedCall::Routing;
  const testing::TempDir dir;
  const std::string path = dir.File("call");
  for (const StDtype dtype : {StDtype::kF32, StDtype::kBf16, StDtype::kF16, StDtype::kF8E4m3, StDtype::kI8}) {
    for (const Routing routing : {Routing::kGate, Routing::kIds, Routing::kLogits}) {
      RecordedCall call;
      call.rows = 2, call.columns = 2;
      call.hidden_dtype = dtype;
      call.hidden.resize(static_cast<size_t>(4 * StDtypeBits(dtype) / 8));
      if (StDtypeBits(dtype) == 8) call.scales.resize(2);
      call.routing = routing;
      if (routing == Routing::kIds) call.top_k = 2, call.ids.resize(4), call.weights.resize(4);
      if (routing == Routing::kLogits) call.num_experts = 3, call.logits.resize(6);
      call.per_slot = routing == Routing::kIds && dtype == StDtype::kI8;
      call.output.resize(static_cast<size_t>(call.output_rows() * call.columns * 2));
      const std::string name = std::to_string(static_cast<int>(dtype)) + "-" + std::to_string(static_cast<int>(routing));
      if (WriteRecordedCall(path, call).ok()) seeds->Write("recording", name, testing::ReadFile(path));
    }
  }
}

void AddTexts(Seeds* seeds) {
  const std::string module = std::string(1, kBorder) + "model.layers.0.mlp.experts.3.gate_proj";
  const std::vector<std::string> texts = {
      "p.*experts\\.[0-9]+\\.(gate|up)_proj$" + module,
      "p^(?!.*(lm_head|mlp\\.gate$)).*" + module,
      "p(?:a{2,5}|[^b-d\\w]+?)*\\b\\Z" + module,
      "gmodel.layers.*.mlp.experts.[!0-2].*_proj" + module,
      "nre:.*mlp\\.gate$" + module,
      "nblock_sparse_moe.experts.3.w1" + module,
      "n*.experts.*" + module,
      "oauto,layers:3-5=require:cpu_avx2,scheme:int4=prefer:cpu_generic",
      R"(d{"name":"box","isa":["avx2","fma","f16c"],"cores":8,"memory_bytes":1024,"gpu":{"compute_capability":"8.9","multiprocessors":142,"free_bytes":1}})",
      R"(c{"model":["tiny=/m"],"listen":"127.0.0.1:0","threads":8,"deterministic":true,"experts":"0:4","policy":"auto","memory-limit":9,"cpu-features":"-avx2"})",
      "m-avx512f,-avx2,-amx_tile",
  };
  for (size_t i = 0; i < texts.size(); ++i) seeds->Write("text", texts[i].substr(0, 1) + std::to_string(i), texts[i]);
}

}  // namespace
}  // namespace moed::fuzz

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "make_seeds: wanted TARGET OUT DICTIONARY CHECKPOINT..., got %d arguments\n", argc - 1);
    return 2;
  }
  moed::fuzz::Seeds seeds(argv[1], argv[2]);
  const std::set<std::string> keys = moed::fuzz::KeysOf(argv[3]);
  for (int i = 4; i < argc; ++i) moed::fuzz::AddCheckpoint(argv[i], keys, &seeds);
  moed::fuzz::AddModels(&seeds);
  moed::fuzz::AddRequests(&seeds);
  moed::fuzz::AddRecordings(&seeds);
  moed::fuzz::AddTexts(&seeds);
  return 0;
}
