// Acceptance cases about checkpoints that are wrong in one place: NaN in a code or scale, missing shards and tensors, stray
// files, unknown and unused tensors. What is refused names the place; what goes on answers with the same bits.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

constexpr char kIndex[] = "model.safetensors.index.json";
const std::string kExpert2 = "model.layers.0.mlp.experts.2.";

struct BadByte {
  std::string scheme;
  std::string tensor;  // below expert 2
  size_t at;           // the byte, which is also the element
  uint8_t bad;
  uint8_t good;  // an allowed one that is not there
};

ModelSpec SpecOf(const std::string& scheme) { return SpecOf(CaseSchemeNamed(scheme), 4, 2, 256, 128); }

// The model with one byte set. `zero_codes`: the 16 FP4 codes under that scale are 0.
CaseModel WithByte(const BadByte& bad, uint8_t byte, bool zero_codes = false) {
  return CaseModel(SpecOf(bad.scheme), CaseSchemeNamed(bad.scheme), [&](CheckpointBuilder& builder) {
    builder.Find(kExpert2 + bad.tensor)->bytes.at(bad.at) = byte;
    if (!zero_codes) return;
    std::vector<uint8_t>& codes = builder.Find(kExpert2 + bad.tensor.substr(0, bad.tensor.rfind('.')) + ".weight")->bytes;
    std::fill_n(codes.begin() + static_cast<int64_t>(bad.at) * 8, 8, uint8_t{0});
  });
}

void CheckRefused(const CaseModel& model, const BadByte& bad, const std::string& what) {
  const LoadResult result = TryLoad(model.path());
  INFO(bad.scheme << ", " << bad.tensor << ": " << result.status.ToString());
  CHECK(result.status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(Mentions(result.status, "model.safetensors"));
  CHECK(Mentions(result.status, kExpert2 + bad.tensor));
  CHECK(Mentions(result.status, what + " " + std::to_string(bad.at)));
  REQUIRE(result.models.size() == 1);
  CHECK(result.models[0].state == LayerState::kFailed);
  CHECK(result.models[0].layers[0].state == LayerState::kFailed);
  CHECK(result.models[0].error == MessageOf(result.status));
}

}  // namespace

TEST_CASE("B22: a NaN block scale is refused with tensor and index, whatever the codes under it") {
  for (const BadByte& bad : std::vector<BadByte>{{"nvfp4", "gate_proj.weight_scale", 77, 0x7F, 0x7E},
                                                 {"nvfp4", "gate_proj.weight_scale", 0, 0xFF, 0x7E},
                                                 {"nvfp4 W4A4", "down_proj.weight_scale", 2047, 0x7F, 0x7E},
                                                 {"nvfp4 W4A4", "up_proj.weight_scale", 1024, 0x7F, 0x7E}}) {
    for (bool zero_codes : {true, false}) CheckRefused(WithByte(bad, bad.bad, zero_codes), bad, "scale");
  }
}

TEST_CASE("B22: a NaN weight byte and a NaN exponent are refused with tensor and index") {
  for (const BadByte& bad : std::vector<BadByte>{{"fp8", "gate_proj.weight", 0, 0x7F, 0x7E},
                                                 {"fp8 static", "up_proj.weight", 32767, 0xFF, 0xFE},
                                                 {"fp8 block", "down_proj.weight", 4097, 0x7F, 0x7E},
                                                 {"mxfp8", "gate_proj.weight", 255, 0xFF, 0xFE}}) {
    CheckRefused(WithByte(bad, bad.bad), bad, "element");
  }
  for (const BadByte& bad : std::vector<BadByte>{{"mxfp4", "gate_proj.weight_scale", 5, 0xFF, 0x80},
                                                 {"mxfp4 W4A4", "down_proj.weight_scale", 1023, 0xFF, 0x80},
                                                 {"mxfp8", "up_proj.weight_scale", 1000, 0xFF, 0x80}}) {
    CheckRefused(WithByte(bad, bad.bad), bad, "scale");
  }
}

TEST_CASE("B22: with an allowed byte in its place the file loads, and tokens on the other experts keep their bits") {
  const std::vector<int32_t> ids = {0, 1, 1, 3, 3, 0};  // three rows on experts 0, 1 and 3
  for (const BadByte& bad : std::vector<BadByte>{{"nvfp4", "gate_proj.weight_scale", 77, 0x7F, 0x50},
                                                 {"fp8", "gate_proj.weight", 9, 0x7F, 0x7E},
                                                 {"mxfp4", "gate_proj.weight_scale", 5, 0xFF, 0x80}}) {
    const CaseScheme& scheme = CaseSchemeNamed(bad.scheme);
    const CaseModel clean(SpecOf(bad.scheme), scheme), changed = WithByte(bad, bad.good);
    CaseInput input = RoutedInput(3, 256, 4, 2), on_changed = input;
    input.ids = ids;
    on_changed.ids.assign(6, 2);
    for (const std::string& backend : clean.Backends()) {
      INFO(bad.scheme << ", " << backend);
      CaseEngine before(clean, backend), after(changed, backend);
      CHECK((after.Rows(input) == before.Rows(input)));
      CHECK((after.Rows(on_changed) != before.Rows(on_changed)));
    }
  }
}

namespace {

struct Sharded {
  explicit Sharded(const std::string& scheme, int shards = 2) {
    spec = testing::SpecOf(CaseSchemeNamed(scheme), 8, 2, 256, 128);
    AddModel(spec, &builder);
    REQUIRE(builder.Write(dir.path(), shards).ok());
  }

  nlohmann::json Index() const { return nlohmann::json::parse(ReadFile(dir.File(kIndex))); }
  void SetIndex(const nlohmann::json& index) const { WriteFile(dir.File(kIndex), index.dump()); }

  ModelSpec spec;
  CheckpointBuilder builder;
  TempDir dir;
};

void CheckNotPlanned(const Sharded& sharded, const std::vector<std::string>& parts) {
  const LoadResult result = TryLoad(sharded.dir.path());
  INFO(result.status.ToString());
  CHECK_FALSE(result.status.ok());
  for (const std::string& part : parts) {
    INFO(part);
    CHECK(Mentions(result.status, part));
  }
  CHECK(result.models.empty());
}

// The same names with zeros.
CheckpointBuilder Zeros(const CheckpointBuilder& builder) {
  CheckpointBuilder zeros;
  for (const BuilderTensor& tensor : builder.tensors()) {
    zeros.Add(tensor.name, tensor.dtype, tensor.shape, std::vector<uint8_t>(tensor.bytes.size(), 0));
  }
  return zeros;
}

}  // namespace

TEST_CASE("B30: a shard that is not there is refused by name, whichever it is") {
  for (const char* scheme : {"bf16", "int4", "fp8"}) {
    for (const char* file :
         {"model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"}) {
      const Sharded sharded(scheme, 3);
      REQUIRE(std::filesystem::remove(sharded.dir.File(file)));
      CheckNotPlanned(sharded, {file});
    }
  }
}

TEST_CASE("B30: a tensor that its shard lacks is refused with tensor and shard") {
  const std::string name = "model.layers.0.mlp.experts.5.up_proj.weight";
  Sharded sharded("bf16");
  nlohmann::json index = sharded.Index();
  const std::string own = index["weight_map"][name];
  const std::string other =
      own == "model-00001-of-00002.safetensors" ? "model-00002-of-00002.safetensors" : "model-00001-of-00002.safetensors";
  index["weight_map"][name] = other;
  sharded.SetIndex(index);
  CheckNotPlanned(sharded, {name, other});
  // A tensor that is in no shard, and one that the index forgets.
  index["weight_map"][name] = own;
  index["weight_map"]["model.layers.0.mlp.experts.5.up_proj.ghost"] = own;
  sharded.SetIndex(index);
  CheckNotPlanned(sharded, {"experts.5.up_proj.ghost", own});
  index["weight_map"].erase("model.layers.0.mlp.experts.5.up_proj.ghost");
  index["weight_map"].erase(name);
  sharded.SetIndex(index);
  CheckNotPlanned(sharded, {"1 tensors are missing", name});
}

TEST_CASE("B30: stray files of the same names, all zero, change no bit and are noted") {
  for (const char* scheme_name : {"bf16", "int4", "fp8"}) {
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    CheckpointBuilder builder;
    const ModelSpec spec = testing::SpecOf(scheme, 8, 2, 256, 128);
    const CaseModel clean(spec, scheme), strays(spec, scheme, [&](CheckpointBuilder&written) { builder = written; });
    REQUIRE(builder.Write(strays.path(), 2).ok());  // from here on model.safetensors is none of the index's
    REQUIRE(Zeros(builder).Write(strays.path()).ok());
    std::filesystem::copy(strays.path() + "/model.safetensors", strays.path() + "/consolidated.safetensors");
    const CaseInput input = RoutedInput(9, 256, 8, 2);
    CaseEngine with(strays), without(clean);
    INFO(scheme_name);
    CHECK((with.Rows(input) == without.Rows(input)));
    CaseInput by_gate = input;
    by_gate.ids.clear();
    by_gate.weights.clear();
    CHECK((with.Rows(by_gate) == without.Rows(by_gate)));
    for (const char* file : {"/model.safetensors", "/consolidated.safetensors"}) {
      const std::vector<std::string> notes = with.engine().Status()[0].notes;
      CHECK(std::count_if(notes.begin(), notes.end(),
                          [&](const std::string& note) { return note.find(file) != std::string::npos; }) == 1);
    }
  }
}

TEST_CASE("B32: experts under an unknown name are refused with the count and the first ten names") {
  struct Row {
    const char* scheme;
    const char* count;   // all experts renamed, and what is named of each projection
    const char* of_one;  // expert 2 alone
    const char* first;
  };
  for (const Row& row :
       std::vector<Row>{{"bf16", "12 tensors are missing", "3 tensors are missing", "gate_proj.weight"},
                        {"f32", "12 tensors are missing", "3 tensors are missing", "gate_proj.weight"},
                        {"fp8", "24 tensors are missing", "6 tensors are missing", "gate_proj.weight_scale"}}) {
    const CaseScheme& scheme = CaseSchemeNamed(row.scheme);
    const CaseModel all(SpecOf(row.scheme), scheme,
                        [](CheckpointBuilder& b) { CHECK(b.RenameAll(".experts.", ".expertz.") > 0); });
    LoadResult result = TryLoad(all.path());
    INFO(row.scheme << ": " << result.status.ToString());
    CHECK_FALSE(result.status.ok());
    CHECK(Mentions(result.status, row.count));
    CHECK(Mentions(result.status, "more"));
    CHECK(Mentions(result.status, std::string("experts.0.") + row.first));
    CHECK(result.models.empty());
    const CaseModel one(SpecOf(row.scheme), scheme,
                        [](CheckpointBuilder& b) { CHECK(b.RenameAll(".experts.2.", ".expertz.2.") > 0); });
    result = TryLoad(one.path());
    INFO(result.status.ToString());
    CHECK(Mentions(result.status, row.of_one));
    CHECK(Mentions(result.status, kExpert2 + row.first));
    CHECK(result.models.empty());
  }
}

TEST_CASE("B32: experts under an unknown name are refused in every scheme, all of them or one") {
  for (const CaseScheme& scheme : CaseSchemes()) {
    for (const char* from : {".experts.", ".experts.2.", ".experts.3.down_proj."}) {
      std::string to = from;
      to.replace(1, 7, "expertz");
      const CaseModel model(SpecOf(scheme.name), scheme, [&](CheckpointBuilder& b) { CHECK(b.RenameAll(from, to) > 0); });
      const LoadResult result = TryLoad(model.path());
      INFO(scheme.name << ", " << from << ": " << result.status.ToString());
      CHECK(Mentions(result.status, "tensors are missing"));
      CHECK(Mentions(result.status, std::string("model.layers.0.mlp") + from));
      CHECK(result.models.empty());
    }
  }
}

TEST_CASE("B32: tensors of other parts of the model are noted once and change no bit") {
  for (const char* scheme_name : {"bf16", "int4", "nvfp4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(scheme_name);
    const CaseModel clean(SpecOf(scheme_name), scheme);
    const CaseModel more(SpecOf(scheme_name), scheme, [](CheckpointBuilder& builder) {
      const std::vector<float> values(16, 3.0f);
      builder.AddFloats("model.rotary.inv_freq", StDtype::kF32, {16}, values);
      builder.AddFloats("model.layers.0.self_attn.k_proj.k_scale", StDtype::kF32, {}, std::span(values).first(1));
      builder.AddFloats("lm_head.weight", StDtype::kBf16, {4, 4}, values);
    });
    const CaseInput input = RoutedInput(9, 256, 4, 2);
    CaseEngine with(more), without(clean);
    INFO(scheme_name);
    CHECK((with.Rows(input) == without.Rows(input)));
    CHECK(without.engine().Status()[0].notes.empty());
    const std::vector<std::string> notes = with.engine().Status()[0].notes;
    REQUIRE(notes.size() == 1);
    CHECK(notes[0].find("3 tensors belong to no MoE layer and are not read") != std::string::npos);
    CHECK(notes[0].find("lm_head.weight") != std::string::npos);
  }
}

}  // namespace moed
