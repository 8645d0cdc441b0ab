// Acceptance case about memory that nobody wrote: whatever the allocator returns, a load and its answers are the same.
//
// glibc's M_PERTURB fills new memory with a byte, but for pieces below 1 KiB that a thread keeps for itself: 0x7F bytes are NaN
// as E4M3 and f16, and 3.4e38 as bf16 and float32. It is set for the process, so these tests are a program of their own.
#include <malloc.h>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"
#include "tests/support/process.h"
#include "tests/support/sanitizer.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

constexpr char kNoPoison[] = "AddressSanitizer's allocator takes no poison";

// While it lives new memory is filled with `byte`.
class Poison {
 public:
  explicit Poison(uint8_t byte) { REQUIRE(mallopt(M_PERTURB, byte ^ 0xFF) == 1); }
  ~Poison() { mallopt(M_PERTURB, 0); }
  Poison(const Poison&) = delete;
  Poison& operator=(const Poison&) = delete;
};

constexpr uint8_t kPoisons[] = {0x7F, 0xFE, 0x01};

struct Layer {
  std::string scheme;
  int experts;
  int64_t hidden;
  int64_t intermediate;
  int loads;  // fresh loads of each backend
};

using Answers = std::vector<std::vector<float>>;

// The answers of a fresh load for each part of `input`.
Answers FreshLoad(const CaseModel& model, const std::string& backend, const CaseInput& input,
                  const std::vector<int64_t>& counts) {
  CaseEngine engine(model, backend);
  Answers answers;
  for (int64_t count : counts) answers.push_back(engine.Rows(input.Part(0, count)));
  return answers;
}

void CheckLayer(const Layer& layer, const std::vector<int64_t>& counts) {
  const CaseScheme& scheme = CaseSchemeNamed(layer.scheme);
  const CaseModel model(SpecOf(scheme, layer.experts, 2, layer.hidden, layer.intermediate), scheme);
  const CaseInput input = RoutedInput(counts.back(), layer.hidden, layer.experts, 2);
  const std::vector<float> want = ExactRows(model.layer(), input.Part(0, counts.front()));
  for (const std::string& backend : model.Backends()) {
    if (backend == "reference") continue;  // slow, and it works on vectors that it fills
    const Answers clean = FreshLoad(model, backend, input, counts);
    CheckWithin(clean.front(), want, layer.hidden, scheme.bound);
    for (float value : clean.back()) REQUIRE(std::isfinite(value));
    for (int load = 0; load < layer.loads; ++load) {
      INFO(layer.scheme << ", H = " << layer.hidden << ", I = " << layer.intermediate << ", " << backend << ", load " << load);
      const Poison poison(kPoisons[load % std::size(kPoisons)]);
      CHECK((FreshLoad(model, backend, input, counts) == clean));
    }
  }
}

}  // namespace

TEST_CASE("B09: the poison is there: new memory is filled with its byte") {
  if (kAddressSanitizer) return Skip(kNoPoison);
  for (uint8_t byte : kPoisons) {
    const Poison poison(byte);
    std::vector<size_t> sizes = {size_t{4} << 10, size_t{1} << 20, size_t{64} << 20};
    if (std::getenv("GLIBC_TUNABLES") != nullptr) sizes.insert(sizes.begin(), {16, 100, 1000});
    for (size_t size : sizes) {
      void* data = nullptr;
      REQUIRE(posix_memalign(&data, 64, size) == 0);
      CHECK(static_cast<const volatile uint8_t*>(data)[size / 2] == byte);
      std::free(data);
    }
  }
}

TEST_CASE("B09: FP8 with I = 704 answers with the same bits after 20 loads into poisoned memory") {
  if (kAddressSanitizer) return Skip(kNoPoison);
  CheckLayer({"fp8", 8, 256, 704, 20}, {1, 7, 64});
}

TEST_CASE("B09: MXFP4 with H = 2880, I = 1440 answers with the same bits in poisoned memory") {
  if (kAddressSanitizer) return Skip(kNoPoison);
  CheckLayer({"mxfp4", 2, 2880, 1440, 3}, {1, 7});
}

TEST_CASE("B09: packed panels, tiles and groups that sizes do not fill hold nothing of the allocator's") {
  if (kAddressSanitizer) return Skip(kNoPoison);
  for (const Layer& layer : std::vector<Layer>{{"int4", 8, 264, 200, 3},
                                               {"int4 zero points", 4, 264, 200, 3},
                                               {"int4 act-order", 4, 256, 128, 3},
                                               {"bf16", 4, 250, 77, 3},
                                               {"f16", 4, 250, 77, 3},
                                               {"f32", 4, 33, 65, 3},
                                               {"int8", 4, 264, 200, 3},
                                               {"int8 W8A8", 4, 250, 77, 3},
                                               {"fp8 static", 4, 250, 77, 3},
                                               {"fp8 block", 4, 330, 150, 3},
                                               {"mxfp8", 4, 288, 96, 3},
                                               {"mxfp4 W4A4", 4, 288, 96, 3},
                                               {"nvfp4 W4A4", 4, 272, 112, 3}}) {
    CheckLayer(layer, {1, 7, 64});
  }
}

TEST_CASE("B09: the same holds for small pieces, when the allocator keeps none of them back") {
  if (kAddressSanitizer) return Skip(kNoPoison);
  const Finished finished =
      RunToEnd({"/proc/self/exe", "B09: the poison*,B09: packed panels*"}, {"GLIBC_TUNABLES=glibc.malloc.tcache_count=0"});
  INFO(finished.out << finished.err);
  CHECK(finished.exit_code == 0);
  CHECK(finished.out.find("passed=2 failed=0") != std::string::npos);
}

}  // namespace moed
