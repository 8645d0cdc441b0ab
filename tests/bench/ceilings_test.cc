// The ceilings of the benchmark: which there are, and what their operations count.
#include <catch2/catch.hpp>

#include <initializer_list>
#include <utility>

#include "bench/ceilings.h"
#include "bench/loops.h"
#include "kernels/device_info.h"

namespace moed::bench {
namespace {

IsaFlags Flags(std::initializer_list<bool IsaFlags::*> set) {
  IsaFlags flags;
  for (bool IsaFlags::*flag : set) flags.*flag = true;
  return flags;
}

}  // namespace

TEST_CASE("ceilings that the processor lacks are absent") {
  WorkerPool pool(2);
  Ceilings ceilings(pool, IsaFlags(), size_t{1} << 20);
  CHECK_FALSE(ceilings.Of(Ceiling::kReadStream).has_value());  // nothing was measured
  ceilings.Measure();
  CHECK(ceilings.Of(Ceiling::kReadStream).value() > 0);
  CHECK(ceilings.Of(Ceiling::kFloatFma).value() > 0);
  for (const Ceiling one : {Ceiling::kInt8Dot, Ceiling::kBf16Dot, Ceiling::kTileInt8, Ceiling::kTileBf16}) {
    INFO(CeilingName(one));
    CHECK_FALSE(ceilings.Of(one).has_value());
  }
}

TEST_CASE("every ceiling of this processor is measured, whatever newer instructions are masked") {
  IsaFlags isa = ThisDevice().isa;
  WorkerPool pool(3);
  for (bool IsaFlags::*masked :
       {&IsaFlags::f16c, &IsaFlags::avx512vnni, &IsaFlags::avxvnni, &IsaFlags::avx512f, &IsaFlags::avx2}) {
    isa.*masked = false;
    Ceilings ceilings(pool, isa, size_t{1} << 20);
    ceilings.Measure();
    const std::pair<Ceiling, bool> expected[] = {
        {Ceiling::kReadStream, true},       {Ceiling::kFloatFma, true},
        {Ceiling::kInt8Dot, isa.avx2},      {Ceiling::kBf16Dot, isa.avx512f && isa.avx512bf16},
        {Ceiling::kTileInt8, isa.amx_int8}, {Ceiling::kTileBf16, isa.amx_bf16}};
    for (const auto& [ceiling, there] : expected) {
      INFO(CeilingName(ceiling));
      const std::optional<double> value = ceilings.Of(ceiling);
      CHECK(value.has_value() == there);
      CHECK(value.value_or(1.0) > 0);
    }
  }
}

TEST_CASE("the int8 loop is the widest dot product of the flags, or three instructions in its place") {
  const auto lanes = [](const IsaFlags& isa) { return Int8DotLoop(isa).value().operations / 2; };
  const IsaFlags avx2 = Flags({&IsaFlags::avx2});
  const IsaFlags avx512 = Flags({&IsaFlags::avx2, &IsaFlags::avx512f, &IsaFlags::avx512bw});
  IsaFlags vnni = avx512, both = avx512, narrow = avx2;
  vnni.avx512vnni = both.avx512vnni = both.avxvnni = narrow.avxvnni = true;
  CHECK(lanes(avx2) == 32 * 8);
  CHECK(lanes(avx512) == 64 * 8);
  CHECK(lanes(narrow) == 32 * 12);
  CHECK(lanes(vnni) == 64 * 12);
  CHECK(lanes(both) == 64 * 12);
  CHECK_FALSE(Int8DotLoop(Flags({&IsaFlags::avx512vnni})).has_value());  // without the registers it needs
}

TEST_CASE("operations are two per multiply-add") {
  IsaFlags all;
  for (const IsaFlagName& flag : IsaFlagNames()) all.*flag.flag = true;
  CHECK(FloatFmaLoop(all).operations == 2 * 16 * 12);
  CHECK(FloatFmaLoop(Flags({&IsaFlags::avx2, &IsaFlags::fma})).operations == 2 * 8 * 12);
  CHECK(FloatFmaLoop(Flags({&IsaFlags::avx2})).operations == 2 * 4 * 12);
  CHECK(Bf16DotLoop(all).value().operations == 2 * 32 * 12);
  CHECK(TileInt8Loop(all).value().operations == 4 * 32768);
  CHECK(TileBf16Loop(all).value().operations == 4 * 16384);
}

TEST_CASE("the median is the middle value, of two the upper one") {
  CHECK(Median({}) == 0.0);
  CHECK(Median({3.0}) == 3.0);
  CHECK(Median({9.0, 1.0, 5.0}) == 5.0);
  CHECK(Median({4.0, 1.0, 3.0, 2.0}) == 3.0);
}

}  // namespace moed::bench
