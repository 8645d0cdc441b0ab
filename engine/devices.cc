// Devices that can be named without being here. Memory of the host is left unknown (0): it differs from one such machine to
// the next, and a layer should not be refused for it.
#include <array>

#include "absl/strings/str_cat.h"
#include "engine/oracle.h"

namespace moed {
namespace {

IsaFlags Avx2() {
  IsaFlags isa;
  isa.avx2 = isa.fma = isa.f16c = true;
  return isa;
}

IsaFlags Avx512Vnni() {
  IsaFlags isa = Avx2();
  isa.avx512f = isa.avx512bw = isa.avx512vl = isa.avx512dq = isa.avx512vnni = true;
  return isa;
}

IsaFlags Avx512Bf16() {
  IsaFlags isa = Avx512Vnni();
  isa.avx512bf16 = true;
  return isa;
}

IsaFlags Amx() {
  IsaFlags isa = Avx512Bf16();
  isa.avxvnni = true;
  isa.amx_tile = isa.amx_int8 = isa.amx_bf16 = true;
  return isa;
}

DeviceInfo Cpu(const std::string& name, const IsaFlags& isa, int cores) {
  DeviceInfo device;
  device.name = name;
  device.isa = isa;
  device.cores = cores;
  return device;
}

DeviceInfo WithGpu(DeviceInfo device, const std::string& name, int major, int multiprocessors, uint64_t bytes) {
  device.has_gpu = true;
  device.gpu_name = name;
  device.cuda_major = major;
  device.gpu_multiprocessors = multiprocessors;
  device.gpu_free_bytes = bytes;
  return device;
}

// All but "this".
std::array<DeviceInfo, 6> Invented() {
  constexpr uint64_t kGigabyte = 1000000000;
  return {WithGpu(Cpu("h200", Amx(), 16), "NVIDIA H200", 9, 132, 141 * kGigabyte),
          WithGpu(Cpu("a100", Avx2(), 16), "NVIDIA A100", 8, 108, 80 * kGigabyte),
          Cpu("cpu-avx2", Avx2(), 8), Cpu("cpu-avx512-vnni", Avx512Vnni(), 16), Cpu("cpu-avx512-bf16", Avx512Bf16(), 16),
          Cpu("cpu-amx", Amx(), 16)};
}

}  // namespace

std::vector<std::string> BuiltInDeviceNames() {
  std::vector<std::string> names = {"this"};
  for (const DeviceInfo& device : Invented()) names.push_back(device.name);
  return names;
}

absl::StatusOr<DeviceInfo> BuiltInDevice(const std::string& name) {
  if (name == "this") return ThisDevice();
  std::string names = "this";
  for (const DeviceInfo& device : Invented()) {
    if (device.name == name) return device;
    absl::StrAppend(&names, ", ", device.name);
  }
  return absl::NotFoundError(absl::StrCat("device \"", name, "\" is unknown; built-in devices: ", names));
}

}  // namespace moed
