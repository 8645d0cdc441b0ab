// Acceptance case about the number of rows: every scheme on every backend gives a row the answer that it has alone.
#include <algorithm>
#include <catch2/catch.hpp>
#include <iterator>

#include "tests/support/case_calls.h"
#include "tests/support/case_probes.h"

namespace moed {
namespace {

using namespace testing;  // NOLINT: the vocabulary of the cases

constexpr int64_t kHidden = 512;
constexpr int64_t kMost = 1000;  // for one scheme of each kind of weights
constexpr int64_t kCounts[] = {1, 2, 3, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 99, 127, 129, kMost};
const std::vector<std::string> kOfEachKind = {"bf16", "int4", "int8 W8A8", "fp8", "mxfp4", "nvfp4 W4A4"};

// Rows that are compared: those around the borders of tiles, and the last ones.
const std::vector<int64_t> kPicked = {0,  1,  2,  7,   8,   14,  15,  16,  30,  31,  32, 62,
                                      63, 64, 98, 126, 127, 128, 511, 512, 992, 998, 999};

std::vector<int64_t> PickedBelow(int64_t count) {
  std::vector<int64_t> rows;
  std::copy_if(kPicked.begin(), kPicked.end(), std::back_inserter(rows), [count](int64_t row) { return row < count; });
  return rows;
}

// The picked rows below `count`, each from a call of its own.
std::vector<float> Alone(CaseEngine& engine, const CaseInput& input, int64_t count) {
  std::vector<float> y;
  for (int64_t row : PickedBelow(count)) {
    const std::vector<float> one = engine.Rows(input.Part(row, 1));
    y.insert(y.end(), one.begin(), one.end());
  }
  return y;
}

// The picked rows of one call of `count` rows.
std::vector<float> Together(CaseEngine& engine, const CaseInput& input, int64_t count) {
  return PickRows(engine.Rows(input.Part(0, count)), kHidden, PickedBelow(count));
}

// As many of the rows of `alone` as a call of `count` rows is compared in.
std::vector<float> FirstOf(const std::vector<float>& alone, int64_t count) {
  return {alone.begin(), alone.begin() + static_cast<int64_t>(PickedBelow(count).size()) * kHidden};
}

// With the deterministic option: the bits of the M = 1 answer.
void CheckBits(const CaseModel& model, const CaseScheme& scheme, const std::string& backend, const CaseInput& input) {
  EngineOptions deterministic;
  deterministic.deterministic = true;
  CaseEngine engine(model, backend, deterministic);
  const bool all = std::find(kOfEachKind.begin(), kOfEachKind.end(), scheme.name) != kOfEachKind.end();
  const std::vector<float> alone = Alone(engine, input, all ? kMost : 129);
  for (int64_t count : kCounts) {
    if (count == kMost && !all) continue;
    INFO(scheme.name << ", " << backend << ", M = " << count);
    CHECK((Together(engine, input, count) == FirstOf(alone, count)));
  }
}

// Without it: near the M = 1 answer, and that one near the exact answer.
void CheckNear(const CaseModel& model, const CaseScheme& scheme, const std::string& backend, const CaseInput& input) {
  CaseEngine engine(model, backend);
  const int64_t most = backend == "reference" ? 3 : 65;
  const std::vector<float> alone = Alone(engine, input, most);
  CheckWithin(alone, ExactRows(model.layer(), input.Pick(PickedBelow(most))), kHidden, scheme.bound);
  for (int64_t count : {2, 17, 65}) {
    if (count > most) continue;
    INFO(scheme.name << ", " << backend << ", M = " << count);
    CheckWithin(Together(engine, input, count), FirstOf(alone, count), kHidden, scheme.weight_only() ? 0.005 : scheme.bound);
  }
}

}  // namespace

TEST_CASE(
    "B10: for every M a row has the bits of its M = 1 answer, or without the deterministic option lies within the bound") {
  const CaseInput input = RoutedInput(kMost, kHidden, 8, 2);
  for (const CaseScheme& scheme : CaseSchemes()) {
    const CaseModel model(SpecOf(scheme, 8, 2, kHidden, 256), scheme);
    for (const std::string& backend : model.Backends()) {
      CheckNear(model, scheme, backend, input);
      if (backend != "reference") CheckBits(model, scheme, backend, input);  // the reference is slow
    }
  }
}

}  // namespace moed
