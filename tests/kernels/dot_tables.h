// The tables of dot products that this machine can run, for tests that call their functions directly.
#ifndef MOED_TESTS_KERNELS_DOT_TABLES_H_
#define MOED_TESTS_KERNELS_DOT_TABLES_H_

#include <string>
#include <vector>

#include "kernels/cpu/dot_table.h"
#include "kernels/device_info.h"
#include "tests/support/skip.h"

namespace moed::testing {

struct NamedDots {
  std::string name;
  const cpu::DotTable& (*table)();
  std::vector<bool IsaFlags::*> needs;
};

// Of int8 rows, or of bf16 rows; those that the processor lacks are skipped with a reason.
inline std::vector<NamedDots> UsableDots(bool bf16) {
  using Flags = IsaFlags;
  const std::vector<bool IsaFlags::*> avx2 = {&Flags::avx2, &Flags::fma, &Flags::f16c};
  const auto with = [](std::vector<bool IsaFlags::*> flags, std::initializer_list<bool IsaFlags::*> more) {
    flags.insert(flags.end(), more);
    return flags;
  };
  const auto avx512 = with(avx2, {&Flags::avx512f, &Flags::avx512bw, &Flags::avx512vl, &Flags::avx512dq});
  const auto tiles = with(avx512, {&Flags::avx512vnni, &Flags::avx512bf16, &Flags::amx_tile, &Flags::amx_int8, &Flags::amx_bf16});
  const std::vector<NamedDots> int8_tables = {{"avx2", cpu::Avx2Dots, avx2},
                                              {"avxvnni", cpu::AvxVnniDots, with(avx2, {&Flags::avxvnni})},
                                              {"avx512", cpu::Avx512Dots, avx512},
                                              {"vnni", cpu::VnniDots, with(avx512, {&Flags::avx512vnni})},
                                              {"amx int8", cpu::AmxInt8Dots, tiles}};
  const std::vector<NamedDots> bf16_tables = {{"avx512bf16", cpu::Avx512Bf16Dots, with(avx512, {&Flags::avx512bf16})},
                                              {"amx bf16", cpu::AmxBf16Dots, tiles}};
  std::vector<NamedDots> usable;
  for (const NamedDots& dots : bf16 ? bf16_tables : int8_tables) {
    bool able = true;
    for (bool IsaFlags::*flag : dots.needs) able = able && ThisDevice().isa.*flag;
    if (able) usable.push_back(dots); else Skip(dots.name + " products: the processor lacks them");
  }
  return usable;
}

}  // namespace moed::testing

#endif  // MOED_TESTS_KERNELS_DOT_TABLES_H_
