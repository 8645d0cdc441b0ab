#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "engine/device_json.h"

namespace moed {
namespace {

TEST_CASE("A full description is read as it is") {
  const auto device = DeviceFromJson(R"({"name": "edge box", "isa": ["avx2", "fma", "amx_int8"], "cores": 8,
      "memory_bytes": 34359738368,
      "gpu": {"compute_capability": "8.9", "multiprocessors": 142, "free_bytes": 47000000000}})");
  REQUIRE(device.ok());
  CHECK(device->name == "edge box");
  IsaFlags isa;
  isa.avx2 = isa.fma = isa.amx_int8 = true;
  CHECK(device->isa == isa);
  CHECK(device->cores == 8);
  CHECK(device->memory_bytes == 34359738368u);
  CHECK(device->has_gpu);
  CHECK(device->cuda_major == 8);
  CHECK(device->cuda_minor == 9);
  CHECK(device->gpu_multiprocessors == 142);
  CHECK(device->gpu_free_bytes == 47000000000u);
}

TEST_CASE("What is left out has its documented default") {
  const auto device = DeviceFromJson("{}");
  REQUIRE(device.ok());
  CHECK(device->name == "device");
  CHECK(device->isa == IsaFlags{});
  CHECK(device->cores == 1);
  CHECK(device->memory_bytes == 0);
  CHECK_FALSE(device->has_gpu);
  CHECK_FALSE(DeviceFromJson(R"({"gpu": null})")->has_gpu);
}

TEST_CASE("Every flag can be named, and two-digit capabilities work") {
  for (const IsaFlagName& flag : IsaFlagNames()) {
    const auto device = DeviceFromJson(R"({"isa": [")" + std::string(flag.name) + R"("]})");
    REQUIRE(device.ok());
    CHECK(device->isa.*(flag.flag));
  }
  const auto device =
      DeviceFromJson(R"({"gpu": {"compute_capability": "12.1", "multiprocessors": 1, "free_bytes": 0}})");
  REQUIRE(device.ok());
  CHECK(device->cuda_major == 12);
  CHECK(device->cuda_minor == 1);
}

TEST_CASE("What is wrong is refused with its key") {
  struct Row {
    const char* text;
    const char* part;
  };
  for (const Row& row : std::vector<Row>{
           {"", "not valid JSON"},
           {"[]", "wanted an object"},
           {R"({"core": 8})", "core: unknown key; valid keys: name, isa, cores, memory_bytes, gpu"},
           {R"({"cores": "8"})", "cores: wanted an integer in 1..65535, got \"8\""},
           {R"({"cores": 0})", "got 0"},
           {R"({"cores": 2.5})", "got 2.5"},
           {R"({"cores": 1, "cores": 2})", "\"cores\" appears twice"},
           {R"({"memory_bytes": -1})", "memory_bytes: wanted"},
           {R"({"memory_bytes": 99999999999999999999})", "memory_bytes: wanted"},
           {R"({"name": 5})", "name: wanted a string, got 5"},
           {R"({"isa": "avx2"})", "isa: wanted a list of strings"},
           {R"({"isa": [2]})", "isa: wanted a list of strings"},
           {R"({"isa": ["avx3"]})", "isa: wanted flags out of avx2, fma"},
           {R"({"gpu": true})", "gpu: wanted an object or null"},
           {R"({"gpu": {"compute_capability": "9.0", "multiprocessors": 132}})", "gpu.free_bytes: wanted"},
           {R"({"gpu": {"multiprocessors": 132, "free_bytes": 1}})", "gpu.compute_capability: wanted"},
           {R"({"gpu": {"compute_capability": 9.0, "multiprocessors": 1, "free_bytes": 1}})", "compute_capability: wanted"},
           {R"({"gpu": {"compute_capability": "9", "multiprocessors": 1, "free_bytes": 1}})", "such as \"9.0\""},
           {R"({"gpu": {"compute_capability": "x.0", "multiprocessors": 1, "free_bytes": 1}})", "such as \"9.0\""},
           {R"({"gpu": {"sms": 4}})", "gpu.sms: unknown key"}}) {
    INFO(row.text);
    const auto device = DeviceFromJson(row.text);
    REQUIRE(device.status().code() == absl::StatusCode::kInvalidArgument);
    INFO(std::string(device.status().message()));
    CHECK(std::string(device.status().message()).find(row.part) != std::string::npos);
  }
}

TEST_CASE("Deep nesting is refused, not followed") {
  const std::string deep = R"({"name": )" + std::string(200000, '[') + std::string(200000, ']') + "}";
  const auto device = DeviceFromJson(deep);
  REQUIRE(device.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(std::string(device.status().message()).find("nested deeper than 64") != std::string::npos);
}

}  // namespace
}  // namespace moed
