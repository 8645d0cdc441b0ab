#include "kernels/device_info.h"

#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#include "kernels/cpu_limits.h"

namespace moed {
namespace {

#if defined(__x86_64__)

bool Bit(unsigned int word, int bit) { return ((word >> bit) & 1u) != 0; }

// Which register sets the operating system saves on a context switch (XCR0). Only valid when CPUID says OSXSAVE.
uint64_t SavedState() {
  uint32_t low = 0;
  uint32_t high = 0;
  // The instruction itself: the intrinsic would need this file to be compiled for processors that have it.
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Linux hands out the 8 KiB of AMX tile data per process and only on request; without the permission the first tile
// instruction would kill the process.
bool MayUseTiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // the state component, as in XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

IsaFlags ReadFlags() {
  IsaFlags isa;
  unsigned int a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !Bit(c, 27)) return isa;  // no OSXSAVE: nothing beyond SSE may be used
  const uint64_t saved = SavedState();
  constexpr uint64_t kAvx = 0x6;        // XMM, YMM
  constexpr uint64_t kAvx512 = 0xe6;    // and opmask, upper halves, upper registers
  constexpr uint64_t kAmx = 0x60000;    // tile configuration and tile data
  if (!Bit(c, 28) || (saved & kAvx) != kAvx) return isa;
  isa.fma = Bit(c, 12);
  isa.f16c = Bit(c, 29);

  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return isa;
  const unsigned int subleaves = a;
  isa.avx2 = Bit(b, 5);
  const bool avx512 = (saved & kAvx512) == kAvx512;
  isa.avx512f = avx512 && Bit(b, 16);
  isa.avx512dq = isa.avx512f && Bit(b, 17);
  isa.avx512bw = isa.avx512f && Bit(b, 30);
  isa.avx512vl = isa.avx512f && Bit(b, 31);
  isa.avx512vnni = isa.avx512f && Bit(c, 11);
  isa.amx_tile = (saved & kAmx) == kAmx && Bit(d, 24) && MayUseTiles();
  isa.amx_bf16 = isa.amx_tile && Bit(d, 22);
  isa.amx_int8 = isa.amx_tile && Bit(d, 25);

  if (subleaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return isa;
  isa.avxvnni = Bit(a, 4);
  isa.avx512bf16 = isa.avx512f && Bit(a, 5);
  return isa;
}

#else

IsaFlags ReadFlags() { return {}; }

#endif

uint64_t PhysicalMemory() {
  const long pages = sysconf(_SC_PHYS_PAGES);
  const long page_bytes = sysconf(_SC_PAGESIZE);
  return pages > 0 && page_bytes > 0 ? static_cast<uint64_t>(pages) * static_cast<uint64_t>(page_bytes) : 0;
}

}  // namespace

const std::vector<IsaFlagName>& IsaFlagNames() {
  static const std::vector<IsaFlagName> names = {
      {"avx2", &IsaFlags::avx2},
      {"fma", &IsaFlags::fma},
      {"f16c", &IsaFlags::f16c},
      {"avx512f", &IsaFlags::avx512f},
      {"avx512bw", &IsaFlags::avx512bw},
      {"avx512vl", &IsaFlags::avx512vl},
      {"avx512dq", &IsaFlags::avx512dq},
      {"avx512vnni", &IsaFlags::avx512vnni},
      {"avx512bf16", &IsaFlags::avx512bf16},
      {"avxvnni", &IsaFlags::avxvnni},
      {"amx_tile", &IsaFlags::amx_tile},
      {"amx_int8", &IsaFlags::amx_int8},
      {"amx_bf16", &IsaFlags::amx_bf16},
  };
  return names;
}

DeviceInfo ThisDevice() {
  DeviceInfo device;
  device.name = "this";
  device.isa = ReadFlags();
  device.cores = static_cast<int>(UsableProcessors().size());
  device.cpu_quota = CgroupQuota();
  device.memory_bytes = PhysicalMemory();
  return device;
}

}  // namespace moed
