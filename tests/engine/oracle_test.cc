// The oracle on invented backends and devices: every decision from plain values.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "engine/oracle.h"

namespace moed {
namespace {

// A backend that needs one flag and a width, and is never run.
class FakeBackend : public Backend {
 public:
  FakeBackend(std::string name, bool IsaFlags::*needs, int64_t multiple, bool automatic = true)
      : name_(std::move(name)), needs_(needs), multiple_(multiple), automatic_(automatic) {}
  std::string Name() const override { return name_; }
  std::string Description() const override { return "invented"; }
  bool Automatic() const override { return automatic_; }
  Verdict Check(const MoeDesc& desc, const DeviceInfo& device) const override {
    Verdict verdict;
    if (needs_ != nullptr && !(device.isa.*needs_)) verdict.reasons.push_back({"isa_missing", "the flag is missing"});
    if (desc.intermediate % multiple_ != 0) {
      verdict.reasons.push_back({"shape_unsupported", "I=" + std::to_string(desc.intermediate) + " is not a multiple of " +
                                                          std::to_string(multiple_)});
    }
    return verdict;
  }
  size_t PreparedBytes(const MoeDesc&) const override { return 0; }
  size_t WorkspaceBytes(const MoeDesc&) const override { return 0; }
  absl::StatusOr<std::unique_ptr<PreparedMoe>> Prepare(const MoeDesc&, const ExpertReader&, WorkerPool&) const override {
    return absl::UnimplementedError("invented");
  }

 private:
  std::string name_;
  bool IsaFlags::*needs_;
  int64_t multiple_;
  bool automatic_;
};

const FakeBackend kAmx("cpu_amx", &IsaFlags::amx_int8, 64);
const FakeBackend kAvx2("cpu_avx2", &IsaFlags::avx2, 8);
const FakeBackend kGeneric("cpu_generic", nullptr, 1);
const FakeBackend kReference("reference", nullptr, 1, /*automatic=*/false);
const std::vector<const Backend*> kAll = {&kAmx, &kAvx2, &kGeneric, &kReference};

MoeDesc Layer(int64_t intermediate) {
  MoeDesc desc;
  desc.num_experts = 8;
  desc.top_k = 2;
  desc.hidden = 256;
  desc.intermediate = intermediate;
  return desc;
}

DeviceInfo Device(const std::string& name) { return *BuiltInDevice(name); }

LayerPolicy Require(const std::string& name) { return {LayerPolicy::Kind::kRequire, name}; }
LayerPolicy Prefer(const std::string& name) { return {LayerPolicy::Kind::kPrefer, name}; }

TEST_CASE("Auto takes the first backend in priority order that fits") {
  struct Row {
    const char* device;
    int64_t intermediate;
    const char* choice;
  };
  for (const Row& row : std::vector<Row>{{"cpu-amx", 128, "cpu_amx"},
                                         {"cpu-amx", 72, "cpu_avx2"},
                                         {"cpu-amx", 7, "cpu_generic"},
                                         {"cpu-avx2", 128, "cpu_avx2"},
                                         {"cpu-avx512-vnni", 128, "cpu_avx2"},
                                         {"h200", 128, "cpu_amx"},
                                         {"a100", 64, "cpu_avx2"}}) {
    INFO(row.device << " I=" << row.intermediate);
    const auto choice = Choose(Layer(row.intermediate), Device(row.device), kAll, {});
    REQUIRE(choice.ok());
    CHECK(choice->backend->Name() == row.choice);
    CHECK(choice->note.empty());
  }
}

TEST_CASE("A choice lists the verdict of every backend in priority order with all reasons") {
  const auto choice = Choose(Layer(7), Device("cpu-avx2"), kAll, {});
  REQUIRE(choice.ok());
  REQUIRE(choice->verdicts.size() == 4);
  CHECK(choice->verdicts[0].name == "cpu_amx");
  REQUIRE(choice->verdicts[0].verdict.reasons.size() == 2);
  CHECK(choice->verdicts[0].verdict.reasons[0].code == "isa_missing");
  CHECK(choice->verdicts[0].verdict.reasons[1].text == "I=7 is not a multiple of 64");
  CHECK(choice->verdicts[1].verdict.reasons.size() == 1);
  CHECK(choice->verdicts[2].verdict.ok());
}

TEST_CASE("A backend that is not automatic says so and is never taken by auto") {
  const std::vector<const Backend*> only = {&kReference};
  const auto choice = Choose(Layer(7), Device("cpu-avx2"), only, {});
  CHECK(choice.status().code() == absl::StatusCode::kFailedPrecondition);
  const auto verdicts = AskAll(Layer(7), Device("cpu-avx2"), kAll);
  REQUIRE(verdicts.size() == 4);
  REQUIRE(verdicts[3].verdict.reasons.size() == 1);
  CHECK(verdicts[3].verdict.reasons[0].code == "only_by_name");
}

TEST_CASE("A backend that is not automatic can be required and preferred") {
  for (const LayerPolicy& policy : {Require("reference"), Prefer("reference")}) {
    const auto choice = Choose(Layer(128), Device("cpu-amx"), kAll, policy);
    REQUIRE(choice.ok());
    CHECK(choice->backend->Name() == "reference");
    CHECK(choice->verdicts[3].verdict.ok());
  }
}

TEST_CASE("Require means that backend or an error with a line for every backend, never another") {
  for (const char* name : {"cpu_amx", "cpu_avx2", "cpu_generic"}) {
    const auto choice = Choose(Layer(128), Device("cpu-amx"), kAll, Require(name));
    REQUIRE(choice.ok());
    CHECK(choice->backend->Name() == name);
  }
  const auto refused = Choose(Layer(100), Device("cpu-avx2"), kAll, Require("cpu_amx"));
  REQUIRE(refused.status().code() == absl::StatusCode::kFailedPrecondition);
  const std::string text(refused.status().message());
  CHECK(text.find("required backend cpu_amx") != std::string::npos);
  CHECK(text.find("\n  cpu_amx: the flag is missing; I=100 is not a multiple of 64") != std::string::npos);
  CHECK(text.find("\n  cpu_avx2: I=100 is not a multiple of 8") != std::string::npos);
  CHECK(text.find("\n  cpu_generic: ok") != std::string::npos);
}

TEST_CASE("Prefer falls back to the automatic choice and says why") {
  const auto taken = Choose(Layer(128), Device("cpu-amx"), kAll, Prefer("cpu_generic"));
  REQUIRE(taken.ok());
  CHECK(taken->backend->Name() == "cpu_generic");
  CHECK(taken->note.empty());
  const auto other = Choose(Layer(128), Device("cpu-avx2"), kAll, Prefer("cpu_amx"));
  REQUIRE(other.ok());
  CHECK(other->backend->Name() == "cpu_avx2");
  CHECK(other->note == "preferred backend cpu_amx not taken: the flag is missing");
}

TEST_CASE("Where nothing fits the error names the layer and every backend's reasons") {
  const std::vector<const Backend*> two = {&kAmx, &kAvx2};
  for (const LayerPolicy& policy : {LayerPolicy{}, Prefer("cpu_avx2")}) {
    const auto choice = Choose(Layer(7), Device("cpu-avx2"), two, policy);
    REQUIRE(choice.status().code() == absl::StatusCode::kFailedPrecondition);
    const std::string text(choice.status().message());
    CHECK(text.find("E=8 k=2 H=256 I=7") != std::string::npos);
    CHECK(text.find("on cpu-avx2:") != std::string::npos);
    CHECK(text.find("\n  cpu_amx: the flag is missing; I=7 is not a multiple of 64") != std::string::npos);
    CHECK(text.find("\n  cpu_avx2: I=7 is not a multiple of 8") != std::string::npos);
  }
}

TEST_CASE("B01: an unknown backend name is refused with the valid names") {
  for (const LayerPolicy& policy : {Require("cpu_magic"), Prefer("cpu_magic")}) {
    const auto choice = Choose(Layer(128), Device("cpu-amx"), kAll, policy);
    CHECK(choice.status().code() == absl::StatusCode::kNotFound);
    CHECK(choice.status().message() ==
          "backend \"cpu_magic\" is unknown; valid names: cpu_amx, cpu_avx2, cpu_generic, reference");
  }
  CHECK(CheckNames(*Policy::Parse("auto,layers:3=prefer:nope"), kAll).code() == absl::StatusCode::kNotFound);
  CHECK(CheckNames(*Policy::Parse("require:cpu_amx,scheme:int4=prefer:reference"), kAll).ok());
}

TEST_CASE("Masking a flag changes the choice as if the machine lacked it") {
  DeviceInfo device = Device("cpu-amx");
  device.isa.amx_int8 = false;
  CHECK(Choose(Layer(128), device, kAll, {})->backend->Name() == "cpu_avx2");
  device.isa = {};
  CHECK(Choose(Layer(128), device, kAll, {})->backend->Name() == "cpu_generic");
}

std::string Text(const LayerPolicy& policy) {
  switch (policy.kind) {
    case LayerPolicy::Kind::kAuto: return "auto";
    case LayerPolicy::Kind::kRequire: return "require:" + policy.backend;
    case LayerPolicy::Kind::kPrefer: return "prefer:" + policy.backend;
  }
  return "?";
}

TEST_CASE("A policy applies its exceptions by layer and by scheme, the later ones first") {
  const auto policy = Policy::Parse("prefer:a,layers:3-5=require:b,scheme:int4=require:c,layers:4=auto");
  REQUIRE(policy.ok());
  struct Row {
    int layer;
    ElementType element;
    const char* want;
  };
  for (const Row& row : std::vector<Row>{{0, ElementType::kBf16, "prefer:a"},
                                         {2, ElementType::kBf16, "prefer:a"},
                                         {3, ElementType::kBf16, "require:b"},
                                         {5, ElementType::kF16, "require:b"},
                                         {6, ElementType::kBf16, "prefer:a"},
                                         {3, ElementType::kInt4, "require:c"},
                                         {9, ElementType::kInt4, "require:c"},
                                         {4, ElementType::kInt4, "auto"},
                                         {4, ElementType::kBf16, "auto"}}) {
    INFO("layer " << row.layer);
    CHECK(Text(policy->For(row.layer, row.element)) == row.want);
  }
  CHECK(policy->BackendNames() == std::vector<std::string>{"a", "b", "c"});
}

TEST_CASE("Every element name can be used in a policy") {
  for (const char* name : {"f32", "bf16", "f16", "int4", "int8", "fp8", "fp4", "fp6_e2m3", "fp6_e3m2"}) {
    CHECK(Policy::Parse(std::string("auto,scheme:") + name + "=prefer:x").ok());
  }
  CHECK(Text(Policy().For(0, ElementType::kBf16)) == "auto");
}

TEST_CASE("A policy text that is not as specified is refused with the wrong part") {
  struct Row {
    const char* text;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{{"", "got \"\""},
                                         {"fast", "got \"fast\""},
                                         {"require:", "got \"require:\""},
                                         {"prefer:CPU", "got \"prefer:CPU\""},
                                         {"require:a b", "got \"require:a b\""},
                                         {" auto", "got \" auto\""},
                                         {"auto,", "got \"\""},
                                         {"auto,layers:3", "got \"layers:3\""},
                                         {"auto,layers:=auto", "got \"layers:\""},
                                         {"auto,layers:5-3=auto", "got \"layers:5-3\""},
                                         {"auto,layers:-1=auto", "got \"layers:-1\""},
                                         {"auto,layers:1-2-3=auto", "got \"layers:1-2-3\""},
                                         {"auto,layers:9999999=auto", "got \"layers:9999999\""},
                                         {"auto,layers:1=fast", "got \"fast\""},
                                         {"auto,scheme:int5=auto", "got \"scheme:int5\""},
                                         {"auto,experts:1=auto", "got \"experts:1=auto\""},
                                         {"layers:1=auto", "got \"layers:1=auto\""}}) {
    INFO(row.text);
    const auto policy = Policy::Parse(row.text);
    REQUIRE(policy.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(std::string(policy.status().message()).find(row.part) != std::string::npos);
  }
  CHECK(std::string(Policy::Parse("auto,scheme:int5=auto").status().message()).find("int4") != std::string::npos);
}

TEST_CASE("Built-in devices are what their names say") {
  CHECK(BuiltInDeviceNames() ==
        std::vector<std::string>{"this", "h200", "a100", "cpu-avx2", "cpu-avx512-vnni", "cpu-avx512-bf16", "cpu-amx"});
  for (const std::string& name : BuiltInDeviceNames()) {
    const auto device = BuiltInDevice(name);
    REQUIRE(device.ok());
    CHECK(device->name == name);
    CHECK(device->cores >= 1);
  }
  const DeviceInfo h200 = Device("h200");
  CHECK((h200.has_gpu && h200.cuda_major == 9 && h200.cuda_minor == 0 && h200.gpu_multiprocessors == 132));
  CHECK(h200.gpu_free_bytes == 141000000000u);
  CHECK(h200.gpu_name == "NVIDIA H200");
  CHECK((h200.isa.amx_int8 && h200.isa.amx_bf16 && h200.isa.avx512bf16 && h200.isa.avx512vnni && h200.cores == 16));
  const DeviceInfo a100 = Device("a100");
  CHECK((a100.has_gpu && a100.cuda_major == 8 && a100.gpu_multiprocessors == 108 && !a100.isa.avx512f && a100.isa.avx2));
  CHECK((!Device("cpu-avx2").has_gpu && !Device("cpu-avx2").isa.avx512f));
  CHECK((Device("cpu-avx512-vnni").isa.avx512vnni && !Device("cpu-avx512-vnni").isa.avx512bf16));
  CHECK((Device("cpu-avx512-bf16").isa.avx512bf16 && Device("cpu-avx512-bf16").isa.avx512vnni));
  CHECK_FALSE(Device("cpu-avx512-bf16").isa.amx_tile);
  const auto unknown = BuiltInDevice("h100");
  CHECK(unknown.status().code() == absl::StatusCode::kNotFound);
  CHECK(std::string(unknown.status().message()).find("this, h200, a100, cpu-avx2, cpu-avx512-vnni, cpu-avx512-bf16, cpu-amx") !=
        std::string::npos);
}

}  // namespace
}  // namespace moed
