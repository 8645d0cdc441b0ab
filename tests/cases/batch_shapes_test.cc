// Batches of every shape and company: experts without tokens and experts with all of them, no rows, very many rows, and
// rows that must not know of one another.
#include <catch2/catch.hpp>

#include <algorithm>
#include <bit>
#include <fstream>
#include <numeric>

#include "tests/support/case_calls.h"
#include "tests/support/judge.h"

namespace moed::testing {
namespace {

constexpr int64_t kMiB = 1 << 20;

// Weight-only results of one row in different company may differ by as much where `deterministic` is off.
constexpr double kCompanyBound = 0.005;

EngineOptions Deterministic() {
  EngineOptions options;
  options.deterministic = true;
  return options;
}

void CheckClose(const std::vector<float>& y, const std::vector<float>& want, int64_t hidden, double bound) {
  const Judgement judgement = Judge(y, want, hidden, bound);
  INFO(judgement.reason);
  CHECK(judgement.passed);
}

// ids and weights of `rows` rows: slot j of row t takes expert `pick(t, j)`.
template <typename Pick>
CaseInput Routed(int64_t rows, int64_t hidden, int top_k, const Pick& pick) {
  CaseInput input{.rows = rows, .x = CaseHidden(rows, hidden)};
  for (int64_t row = 0; row < rows; ++row) {
    for (int slot = 0; slot < top_k; ++slot) {
      input.ids.push_back(static_cast<int32_t>(pick(row, slot)));
      input.weights.push_back(1.0f / static_cast<float>(slot + 1));
    }
  }
  return input;
}

// Some rows of a call are the bits of their M = 1 answers, and right.
void CheckRowsAlone(CaseEngine& engine, const LayerReference& layer, const CaseInput& input,
                    const std::vector<int64_t>& rows, double bound) {
  const int64_t hidden = layer.hidden;
  const std::vector<float> y = engine.Rows(input);
  CHECK(std::all_of(y.begin(), y.end(), [](float value) { return std::isfinite(value); }));
  for (int64_t row : rows) {
    INFO("row " << row << " of " << input.rows);
    const CaseInput alone = input.Part(row, 1);
    const std::vector<float> together(y.begin() + row * hidden, y.begin() + (row + 1) * hidden);
    CHECK(engine.Rows(alone) == together);
    CheckClose(together, ExactRows(layer, alone), hidden, bound);
  }
}

// Largest resident size so far, in bytes.
int64_t PeakResident() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::atoll(line.c_str() + 6) * 1024;
  }
  FAIL("no VmHWM in /proc/self/status");
  return 0;
}

}  // namespace

TEST_CASE("B37: experts without tokens, and with all of them, neither disturb a row nor go missing") {
  constexpr int kExperts = 64;
  for (const std::string name : {"bf16", "int4", "int4 zero points", "fp8", "nvfp4 W4A4"}) {
    const CaseScheme& scheme = CaseSchemeNamed(name);
    const CaseModel model(SpecOf(scheme, kExperts, 8, 256, 128), scheme);
    for (const std::string& backend : model.Backends()) {
      INFO(name << " on " << backend);
      CaseEngine engine(model, backend, Deterministic());
      const auto check = [&](const CaseInput& input, const std::vector<int64_t>& rows) {
        CheckRowsAlone(engine, model.layer(), input, rows, scheme.bound);
      };
      check(Routed(300, 256, 1, [](int64_t, int) { return 63; }), {0, 127, 299});
      check(Routed(1, 256, 1, [](int64_t, int) { return 0; }), {0});
      check(Routed(1, 256, 8, [](int64_t, int slot) { return 63 - 9 * slot; }), {0});
      // 128, 130, 65, 0 and 1 rows on experts 0 to 4, in blocks and mixed.
      const auto expert_of = [](int64_t row) { return row < 128 ? 0 : row < 258 ? 1 : row < 323 ? 2 : 4; };
      check(Routed(324, 256, 1, [&](int64_t row, int) { return expert_of(row); }), {0, 127, 128, 257, 258, 322, 323});
      check(Routed(324, 256, 1, [&](int64_t row, int) { return expert_of(row * 205 % 324); }), {0, 1, 100, 323});
    }
  }
}

TEST_CASE("B37: four thousand rows on the same eight of 64 experts") {
  for (const std::string name : {"bf16", "int4", "int8 W8A8"}) {
    const CaseScheme& scheme = CaseSchemeNamed(name);
    const CaseModel model(SpecOf(scheme, 64, 8, 128, 64), scheme);
    for (const std::string& backend : model.Backends()) {
      INFO(name << " on " << backend);
      CaseEngine engine(model, backend, Deterministic());
      const int64_t rows = backend == "reference" ? 600 : 4096;
      const CaseInput input = Routed(rows, 128, 8, [](int64_t row, int slot) { return (row + slot) % 8; });
      CheckRowsAlone(engine, model.layer(), input, {0, 63, 511, rows - 1}, scheme.bound);
    }
  }
}

TEST_CASE("B38: no rows are an empty result for every scheme and backend, and the next call is right") {
  for (int experts : {12, 64}) {
    for (const CaseScheme& scheme : CaseSchemes()) {
      if (experts == 64 && scheme.name != "int4" && scheme.name != "fp8") continue;
      const CaseModel model(SpecOf(scheme, experts, 4, 128, 128), scheme);
      const CaseInput three = RoutedInput(3, 128, experts, 4);
      for (const std::string& backend : model.Backends()) {
        INFO(scheme.name << " on " << backend << ", E = " << experts);
        CaseEngine engine(model, backend);
        for (DType dtype : {DType::kF32, DType::kBf16, DType::kF16}) {
          CHECK(engine.Rows({.rows = 0, .dtype = dtype}).empty());  // by the model's own gate
          // Ids, and logits, of no rows: null pointers throughout.
          ForwardCall call;
          call.hidden = {nullptr, dtype, 0, 128};
          ForwardInfo info;
          for (int top_k : {1, 4}) {
            call.routing = RoutingByIds{top_k, {}, {}};
            CHECK(engine.engine().Forward("m", call, {nullptr, dtype, 0, 128}, &info).ok());
          }
          call.routing = RoutingByLogits{};
          CHECK(engine.engine().Forward("m", call, {nullptr, dtype, 0, 128}, &info).ok());
        }
        CheckClose(engine.Rows(three), ExactRows(model.layer(), three), 128, scheme.bound);
      }
    }
  }
}

TEST_CASE("B39: a call of 131,073 rows is a call of its rows, and its memory grows with the chunk") {
  const CaseScheme& scheme = CaseSchemeNamed("bf16");
  const CaseModel model(SpecOf(scheme, 8, 2, 256, 32), scheme);
  constexpr int64_t kMost = 131073, kHidden = 256;
  const CaseInput some = RoutedInput(64, kHidden, 8, 2);
  // Row t is row t mod 64 of `some`, so that every row can be compared.
  std::vector<uint16_t> x(kMost * kHidden), out(kMost * kHidden, 0xFFFF);
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int64_t row = 0; row < kMost; ++row) {
    for (int64_t c = 0; c < kHidden; ++c) {
      const float value = RoundTo(some.x[row % 64 * kHidden + c], DType::kBf16);
      x[row * kHidden + c] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
    }
    for (int slot = 0; slot < 2; ++slot) {
      ids.push_back(some.ids[row % 64 * 2 + slot]);
      weights.push_back(some.weights[row % 64 * 2 + slot]);
    }
  }
  for (const std::string& backend : model.Backends()) {
    INFO(backend);
    CaseEngine engine(model, backend, Deterministic());
    const std::vector<float> want = engine.Rows(some);
    CheckClose(want, ExactRows(model.layer(), some), kHidden, scheme.bound);
    for (int64_t row : {int64_t{0}, int64_t{63}}) {
      const std::vector<float> of_row(want.begin() + row * kHidden, want.begin() + (row + 1) * kHidden);
      CHECK(engine.Rows(some.Part(row, 1)) == of_row);
    }
    int64_t first_peak = 0;
    for (int64_t rows :
         backend == "reference" ? std::vector<int64_t>{16385} : std::vector<int64_t>{16385, 65535, 65536, 65537, kMost}) {
      INFO("M = " << rows);
      ForwardCall call;
      call.hidden = {x.data(), DType::kBf16, rows, kHidden};
      call.routing = RoutingByIds{2, std::span(ids).first(rows * 2), std::span(weights).first(rows * 2)};
      ForwardInfo info;
      std::fill(out.begin(), out.end(), 0xFFFF);
      REQUIRE(engine.engine().Forward("m", call, {out.data(), DType::kBf16, rows, kHidden}, &info).ok());
      int64_t wrong = 0;
      for (int64_t at = 0; at < rows * kHidden; ++at) {
        const float value = std::bit_cast<float>(static_cast<uint32_t>(out[at]) << 16);
        wrong += value != want[at % (64 * kHidden)];
      }
      CHECK(wrong == 0);
      CHECK(std::all_of(out.begin() + rows * kHidden, out.end(), [](uint16_t value) { return value == 0xFFFF; }));
      // The first call is several chunks long already; 16 MiB are an eighth of the rows that the last one adds.
      if (first_peak == 0) first_peak = PeakResident();
      CHECK(PeakResident() - first_peak < 16 * kMiB);
    }
  }
}

TEST_CASE("B53: equal rows give equal bits, and a row's bits do not depend on its company, for every scheme and backend") {
  constexpr int64_t kWide = 128;  // H and I
  for (const CaseScheme& scheme : CaseSchemes()) {
    const CaseModel model(SpecOf(scheme, 8, 2, kWide, kWide), scheme);
    const CaseInput many = RoutedInput(512, kWide, 8, 2);
    const std::vector<float> exact = ExactRows(model.layer(), many.Part(0, 64));
    for (const std::string& backend : model.Backends()) {
      if (backend == "reference") continue;  // the judge: one row at a time by construction
      for (bool deterministic : {true, false}) {
        INFO(scheme.name << " on " << backend << (deterministic ? ", deterministic" : ""));
        CaseEngine engine(model, backend, deterministic ? Deterministic() : EngineOptions());
        const auto same_or_close = [&](const std::vector<float>& a, const std::vector<float>& b) {
          if (deterministic) CHECK(a == b);
          if (scheme.weight_only()) CheckClose(a, b, kWide, kCompanyBound);
          CheckClose(a, b, kWide, scheme.bound);
        };
        const std::vector<float> eight = engine.Rows(many.Part(0, 8));
        CheckClose(eight, {exact.begin(), exact.begin() + 8 * kWide}, kWide, scheme.bound);
        for (int64_t rows : {9, 64, 512}) {
          const std::vector<float> y = engine.Rows(many.Part(0, rows));
          same_or_close({y.begin(), y.begin() + 8 * kWide}, eight);
        }
        const std::vector<float> equal = engine.Rows(many.Pick(std::vector<int64_t>(64, 5)));
        for (int64_t row = 1; row < 64; ++row) {
          CHECK(std::equal(equal.begin(), equal.begin() + kWide, equal.begin() + row * kWide));
        }
        for (int repeat = 0; repeat < (deterministic ? 5 : 50); ++repeat) REQUIRE(engine.Rows(many.Part(0, 8)) == eight);

        std::vector<int64_t> backwards(64);
        std::iota(backwards.rbegin(), backwards.rend(), 0);
        const std::vector<float> forth = engine.Rows(many.Part(0, 64)), back = engine.Rows(many.Pick(backwards));
        std::vector<float> turned;
        for (int64_t row : backwards)
          turned.insert(turned.end(), back.begin() + row * kWide, back.begin() + (row + 1) * kWide);
        same_or_close(turned, forth);
        // Few rows are no less exact than many.
        const double few = Judge(eight, std::span(exact).first(8 * kWide), kWide, 1.0).worst;
        CHECK(few <= 1.5 * Judge(forth, exact, kWide, 1.0).worst);
      }
    }
  }
}

}  // namespace moed::testing
