// What a machine is, as a plain value: the oracle decides from it, tests invent machines with it.
#ifndef MOED_KERNELS_DEVICE_INFO_H_
#define MOED_KERNELS_DEVICE_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

namespace moed {

// Instruction-set extensions that a backend may ask for. A flag is set only when the processor has it and the operating
// system saves its registers.
struct IsaFlags {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512vl = false;
  bool avx512dq = false;
  bool avx512vnni = false;
  bool avx512bf16 = false;
  bool avxvnni = false;
  bool amx_tile = false;
  bool amx_int8 = false;
  bool amx_bf16 = false;
  bool operator==(const IsaFlags&) const = default;
};

// A named flag, for parsing, printing and masking without one branch per flag.
struct IsaFlagName {
  const char* name;  // as in /proc/cpuinfo without underscores inside a family: "avx2", "avx512bw", "amx_int8"
  bool IsaFlags::*flag;
};
// All flags, in the order of the struct.
const std::vector<IsaFlagName>& IsaFlagNames();

struct DeviceInfo {
  std::string name;          // "this", "h200", ... or a file's own name
  IsaFlags isa;              // of the host processor
  int cores = 1;             // usable logical processors
  double cpu_quota = 0;      // of the cgroup, in processors; 0: none
  uint64_t memory_bytes = 0; // host memory that weights may use; 0: unknown, not checked
  bool has_gpu = false;      // the fields below mean nothing without
  std::string gpu_absence;   // without a GPU: why, where it is known ("the CUDA driver is too old"); else empty
  std::string gpu_name;      // "NVIDIA H200"
  int cuda_major = 0;        // compute capability
  int cuda_minor = 0;
  int gpu_multiprocessors = 0;
  uint64_t gpu_free_bytes = 0;  // that weights and workspace of layers on the GPU may use
};

// The machine this process runs on: processor flags by CPUID (with the operating system's consent for AVX, AVX-512 and
// AMX state), logical processors from the affinity mask, the quota from its cgroups, memory from the operating system. Without a
// GPU: see LinkedDevice in kernels/backends.h.
DeviceInfo ThisDevice();

}  // namespace moed

#endif  // MOED_KERNELS_DEVICE_INFO_H_
