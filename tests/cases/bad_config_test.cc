// Configs and indexes that lie: refused by key or tensor, at the cost of what is in the files and not of what they claim.
#include <catch2/catch.hpp>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "tests/cases/bad_files.h"

namespace moed::testing {
namespace {

using nlohmann::json;

// The sound model with some keys of its config replaced (null: removed).
std::function<void(const TempDir&)> WithKeys(const json& keys, const ModelSpec& spec = SmallSpec()) {
  return Model(spec, [=](CheckpointBuilder& builder) {
    json config = json::parse(builder.GetFile("config.json"), nullptr, false);
    for (const auto& [key, value] : keys.items()) {
      config.erase(key);
      if (!value.is_null()) config[key] = value;
    }
    builder.SetConfig(config.dump());
  });
}

// config.json with `text` as one more member.
std::function<void(const TempDir&)> WithText(const std::string& text) {
  return Model(SmallSpec(), [=](CheckpointBuilder& builder) {
    std::string config = builder.GetFile("config.json");
    config.resize(config.find_last_of('}'));
    builder.SetConfig(absl::StrCat(config, ", ", text, "}"));
  });
}

BadFile Key(const std::string& key, const json& value) {
  return {absl::StrCat(key, " = ", value.dump().substr(0, 60)), WithKeys({{key, value}}), {"config.json", key}};
}

ModelSpec Quantized(ExpertFormat format, int group) {
  ModelSpec spec = SmallSpec();
  spec.experts = {.format = format, .group = group};
  return spec;
}

// The sound model in a quantized format, but for one member of the description.
std::function<void(const TempDir&)> WithQuant(const ModelSpec& spec, const std::string& pointer, const json& value) {
  return Model(spec, [=](CheckpointBuilder& builder) {
    json config = json::parse(builder.GetFile("config.json"), nullptr, false);
    config[json::json_pointer("/quantization_config" + pointer)] = value;
    builder.SetConfig(config.dump());
  });
}

std::function<void(const TempDir&)> Ignoring(const json& list) {
  return WithQuant(Quantized(ExpertFormat::kPacked, 32), "/ignore", list);
}

std::function<void(const TempDir&)> Index(const std::string& text) {
  return [=](const TempDir& dir) {
    Model(SmallSpec(), {}, 2)(dir);
    WriteFile(dir.File("model.safetensors.index.json"), text);
  };
}

std::string MapText(const std::string& entries) { return absl::StrCat("{\"weight_map\": {", entries, "}}"); }

}  // namespace

TEST_CASE("B35: sizes in a config that are no sizes, or that the tensors contradict, are refused by key") {
  std::vector<BadFile> table;
  const std::vector<json> bad_sizes = {
      0,         -1,         -64,  1.5, 64.0, "64", true, json::array({64}), int64_t{1} << 31, int64_t{1} << 40,
      INT64_MAX, UINT64_MAX, 1e300};
  for (const char* key :
       {"num_experts", "num_experts_per_tok", "num_hidden_layers", "hidden_size", "moe_intermediate_size"}) {
    for (const json& value : bad_sizes) table.push_back(Key(key, value));
    table.push_back({absl::StrCat("no ", key), WithKeys({{key, nullptr}}), {"config.json", key}});
  }
  table.push_back(Key("num_hidden_layers", 1000000000));
  table.push_back(Key("num_experts_per_tok", 5));
  table.push_back(Key("decoder_sparse_step", 0));
  table.push_back(Key("decoder_sparse_step", 1000000000));
  table.push_back(Key("mlp_only_layers", json::array({-1})));
  table.push_back(Key("hidden_act", "gelu_of_nobody"));
  table.push_back({"no such family",
                   WithKeys({{"model_type", "no_such_family"}, {"architectures", nullptr}}),
                   {"config.json", "no_such_family"}});
  table.push_back(Key("model_type", 7));
  CheckRefused(table);
}

TEST_CASE("Sizes within the limits that the file does not have cost nothing and name what is missing") {
  // Every expert, layer and column that a config may claim, in a file of 40 KiB.
  const std::string shape = "experts.0.gate_proj.weight: shape is [32, 64]";
  CheckRefused({
      {"65,535 experts", WithKeys({{"num_experts", 65535}}), {"mlp.gate.weight: shape is [4, 64], want [65535, 64]"}},
      {"10,000 layers", WithKeys({{"num_hidden_layers", 10000}}), {"layer 1", "model.layers.1.mlp"}},
      {"both", WithKeys({{"num_experts", 65535}, {"num_hidden_layers", 10000}}), {"layers.0.mlp.gate.weight", "65535"}},
      {"65,535 experts, all of a token",
       WithKeys({{"num_experts", 65535}, {"num_experts_per_tok", 65535}}),
       {"mlp.gate.weight"}},
      {"a hidden size of 2^20", WithKeys({{"hidden_size", 1 << 20}}), {shape, "1048576"}},
      {"an intermediate size of 2^20", WithKeys({{"moe_intermediate_size", 1 << 20}}), {shape, "1048576"}},
      {"fewer experts than the file has",
       WithKeys({{"num_experts", 3}}),
       {"mlp.gate.weight: shape is [4, 64], want [3, 64]"}},
      {"fewer experts than the file has, but for its router",
       Model(SmallSpec(),
             [](CheckpointBuilder& builder) {
               builder.RenameAll("experts.3", "experts.4");
               builder.Find("model.layers.0.mlp.gate.weight")->shape = {4, 64};
             }),
       {"3 tensors are missing: model.layers.0.mlp.experts.3.gate_proj.weight"}},
      {"fewer layers than the file has",
       Model(SmallSpec(),
             [](CheckpointBuilder& builder) { builder.RenameAll("layers.0.mlp.experts", "layers.3.mlp.experts"); }),
       {"missing"}},
      {"65,535 int4 experts with a router for as many",
       Model(Quantized(ExpertFormat::kPacked, 32),
             [](CheckpointBuilder& builder) {
               json config = json::parse(builder.GetFile("config.json"), nullptr, false);
               config["num_experts"] = 65535;
               builder.SetConfig(config.dump());
               builder.Remove("model.layers.0.mlp.gate.weight");
               builder.AddFloats("model.layers.0.mlp.gate.weight", StDtype::kBf16, {65535, 64},
                                 std::vector<float>(65535 * 64));
             }),
       {"layer 0", "mlp.experts.4.gate_proj.weight_packed", "589779 tensors are missing", "and 589769 more"}},
      {"65,535 interleaved experts",
       [](const TempDir& dir) {
         ModelSpec spec{.family = ModelFamily::kGptOss, .hidden = 64, .intermediate = 32, .num_experts = 2};
         WithKeys({{"num_local_experts", 65535}}, spec)(dir);
       },
       {"gate_up_proj", "65535"}},
  });
}

TEST_CASE("Groups of a size that the tensors do not have are refused by key or tensor") {
  std::vector<BadFile> table;
  const ModelSpec gptq = Quantized(ExpertFormat::kGptq, 32), packed = Quantized(ExpertFormat::kPacked, 32);
  const std::string weights = "/config_groups/group_0/weights";
  for (const json& group : std::vector<json>{0, -2, 64.5, "32", int64_t{1} << 40}) {
    const std::string what = absl::StrCat("group_size ", group.dump());
    table.push_back({"gptq " + what, WithQuant(gptq, "/group_size", group), {"config.json", "group_size"}});
    table.push_back({"packed " + what, WithQuant(packed, weights + "/group_size", group), {"config.json", "group_size"}});
  }
  for (int group : {1, 3, 16, 64, 1 << 20}) {
    const std::string what = absl::StrCat("group_size ", group, " over scales of 32");
    table.push_back({"gptq " + what, WithQuant(gptq, "/group_size", group), {"experts.0.gate_proj"}});
    table.push_back(
        {"packed " + what, WithQuant(packed, weights + "/group_size", group), {"experts.0.gate_proj.weight_scale"}});
  }
  for (const json& bits : std::vector<json>{0, 3, 5, 64, -4, "4", int64_t{1} << 40}) {
    table.push_back({"gptq bits " + bits.dump(), WithQuant(gptq, "/bits", bits), {"bits"}});
    table.push_back({"packed bits " + bits.dump(), WithQuant(packed, weights + "/num_bits", bits), {"num_bits"}});
  }
  table.push_back({"no method", WithQuant(gptq, "/quant_method", "none_such"), {"quant_method", "none_such"}});
  table.push_back({"groups that are a list", WithQuant(packed, "/config_groups", json::array()), {"config_groups"}});
  table.push_back({"no groups", WithQuant(packed, "/config_groups", json::object()), {"experts.0"}});
  CheckRefused(table);
}

TEST_CASE(
    "Patterns that would take exponential time or memory are refused, or matched in time that grows with their length") {
  // A packed model whose experts are in the ignore list is contradicted by its tensors: each list below is bad, or harmless.
  const std::string nested = absl::StrCat("re:", std::string(100, '('), "a*", Times(100, ")*"), "b");
  const std::string alternatives = absl::StrCat("re:(", Times(200, "a|"), "a)*c");
  std::vector<json> lists = {json::array({"re:(a*)*b"}),
                             json::array({"re:" + std::string(101, '(')}),
                             json::array({"re:(((.*){1000}){1000}){1000}"}),
                             json::array({"re:" + std::string(1001, 'a')}),
                             json::array({"re:(?=" + Times(20, "(?=") + "a"}),
                             json::array({"re:(a)\\1"}),
                             json::array({"re:["})};
  std::vector<BadFile> table;
  for (const json& list : lists) {
    if (list == json::array({"re:(a*)*b"})) continue;
    table.push_back({list.dump().substr(0, 80), Ignoring(list), {"config.json", "ignore"}});
  }
  json many = json::array(), numbers = json::array();
  for (int i = 0; i < 4000; ++i) many.push_back(absl::StrCat("re:((", i % 10, "|.){0,60}.*){0,9}x"));
  table.push_back({"4000 patterns of thousands of steps", Ignoring(many), {"config.json", "ignore", "too large together"}});
  table.push_back({"a list of numbers", Ignoring(json::array({1, 2})), {"config.json", "ignore"}});
  CheckRefused(table);

  for (const std::string& pattern :
       {std::string("re:(a*)*b"), nested, alternatives, std::string("re:(.*.*.*.*)*x(.*.*)*y")}) {
    TempDir dir;
    Ignoring(json::array({pattern}))(dir);
    const LoadOutcome outcome = LoadInChild(dir.path());
    INFO(pattern << ": " << outcome.trouble << outcome.error);
    REQUIRE(outcome.finished);
    // Matches nothing: the model is what it was; or the pattern itself is refused.
    CHECK((outcome.ok || outcome.error.find("ignore") != std::string::npos));
    if (!kAddressSanitizer) CHECK(outcome.peak < kRefusalBytes);
  }
}

TEST_CASE("A config that is no JSON object, or too much of one, is refused with the file") {
  const auto config = [](const std::string& text) {
    return Model(SmallSpec(), [=](CheckpointBuilder& builder) { builder.SetConfig(text); });
  };
  const std::string file = "config.json";
  CheckRefused({
      {"empty", config(""), {file}},
      {"a list", config("[]"), {file, "wanted an object"}},
      {"null", config("null"), {file, "wanted an object"}},
      {"no JSON", config("hidden_size: 64"), {file, "byte"}},
      {"cut", config("{\"hidden_size\": 64"), {file, "byte"}},
      {"NaN", config("{\"hidden_size\": NaN}"), {file, "byte"}},
      {"a number of 10^6 digits", WithText("\"a\": 1" + std::string(1000000, '0')), {file}},
      {"lists nested 10^6 deep", config(absl::StrCat("{\"a\":", std::string(1000000, '['))), {file, "nested"}},
      {"objects nested 10^6 deep", config(Times(1000000, "{\"a\":")), {file, "nested"}},
      {"a key twice", WithText("\"hidden_size\": 64"), {file, "hidden_size", "twice"}},
      {"17 MiB", WithText(absl::StrCat("\"a\": \"", std::string(17 * kMiB, 'x'), "\"")), {file, "16777216"}},
      {"8 million empty lists", WithText(absl::StrCat("\"a\": [[]", Times(5000000, ",[]"), "]")), {file}},
      {"8 million numbers", WithText(absl::StrCat("\"a\": [0", Times(8000000, ",0"), "]")), {file}},
      {"10^6 keys",
       [=](const TempDir& dir) {
         std::string keys = "\"k\": 0";
         for (int i = 0; i < 1000000; ++i) absl::StrAppend(&keys, ",\"", i, "\":{}");
         WithText(keys)(dir);
       },
       {file}},
      {"10^6 names to ignore",
       [=](const TempDir& dir) {
         json names = json::array();
         for (int i = 0; i < 1000000; ++i) names.push_back(absl::StrCat("m", i));
         Ignoring(names)(dir);
       },
       {file}},
  });
}

TEST_CASE("B30: an index that lies is refused with file and tensor") {
  const std::string index = "model.safetensors.index.json", shard = "model-00001-of-00002.safetensors";
  const std::string tensor = "model.layers.0.mlp.experts.0.gate_proj.weight";
  std::vector<BadFile> table = {
      {"empty", Index(""), {index}},
      {"no JSON", Index("weight_map"), {index}},
      {"no map", Index("{}"), {index, "weight_map"}},
      {"a map of nothing", Index(MapText("")), {index, "weight_map"}},
      {"a list", Index("{\"weight_map\": []}"), {index, "weight_map"}},
      {"null", Index("{\"weight_map\": null}"), {index, "weight_map"}},
      {"the map twice", Index("{\"weight_map\": {\"a\": \"b\"}, \"weight_map\": {}}"), {index, "twice"}},
      {"a name twice",
       Index(MapText(absl::StrCat("\"a\": \"", shard, "\", \"a\": \"", shard, "\""))),
       {index, "\"a\"", "twice"}},
      {"a number for a file", Index(MapText("\"a\": 7")), {index, "\"a\""}},
      {"an object for a file", Index(MapText("\"a\": {}")), {index, "\"a\""}},
      {"no name for a file", Index(MapText("\"a\": \"\"")), {index, "\"a\""}},
      {"a file above", Index(MapText("\"a\": \"../x.safetensors\"")), {index, "\"a\""}},
      {"a file anywhere", Index(MapText("\"a\": \"/etc/passwd\"")), {index, "\"a\""}},
      {"the folder itself", Index(MapText("\"a\": \".\"")), {index, "\"a\""}},
      {"a file that is no safetensors", Index(MapText("\"a\": \"config.json\"")), {"config.json"}},
      {"a file that is not there",
       Index(MapText("\"a\": \"model-00009-of-00002.safetensors\"")),
       {"model-00009-of-00002.safetensors"}},
      {"a tensor that its file lacks",
       Index(MapText(absl::StrCat("\"lacking\": \"", shard, "\""))),
       {index, "lacking", shard}},
      {"one tensor of many", Index(MapText(absl::StrCat("\"", tensor, "\": \"", shard, "\""))), {index, tensor}},
      {"lists nested 10^6 deep", Index("{\"metadata\": " + std::string(1000000, '[')), {index}},
      {"65 MiB", Index(absl::StrCat("{\"metadata\": \"", std::string(65 * kMiB, 'x'), "\"}")), {index, "67108864"}},
      {"a name of 32 MiB", Index(MapText(absl::StrCat("\"", std::string(32 * kMiB, 'x'), "\": 7"))), {index}},
      {"10^6 names that are bad at the end",
       [=](const TempDir& dir) {
         std::string map = "\"x\": \"" + shard + "\"";
         for (int i = 0; i < 1000000; ++i) absl::StrAppend(&map, ",\"model.layers.0.expert.", i, "\":\"", shard, "\"");
         Index(MapText(map + ",\"end\":7"))(dir);
       },
       {index}},
      {"10^6 files",
       [=](const TempDir& dir) {
         std::string map = "\"x\": \"" + shard + "\"";
         for (int i = 0; i < 1000000; ++i) absl::StrAppend(&map, ",\"", i, "\":\"", i, ".safetensors\"");
         Index(MapText(map))(dir);
       },
       {}},
  };
  CheckRefused(table);
}

}  // namespace moed::testing
