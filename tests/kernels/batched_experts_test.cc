// The batched-experts format on every CPU backend and the reference: counts, padding that is neither read nor written, agreement with
// the standard format, refusals, planted errors. (every_scheme_test and dot_products_test hold all schemes to the standard format.)
#include <catch2/catch.hpp>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/cpu/cpu_backends.h"
#include "kernels/cpu/reference.h"
#include "tests/support/batched_rows.h"
#include "tests/support/cpu_layers.h"
#include "tests/support/judge.h"
#include "tests/support/random_layer.h"

namespace moed {
namespace {

using testing::BatchedRows;
using testing::CombineByHand;
using testing::Int8;
using testing::Judge;
using testing::Pool;
using testing::Prepare;
using testing::RandomBatch;
using testing::RandomExperts;
using testing::RunBatchedLayer;
using testing::RunLayer;

// The CPU backends that run `desc` here, and the reference.
std::vector<const Backend*> AllFor(const MoeDesc& desc) {
  std::vector<const Backend*> able = testing::BackendsFor(desc);
  able.push_back(&cpu::ReferenceBackend());
  return able;
}

QuantScheme With(const ActivationScheme& input) {
  LinearScheme linear = testing::Int4Scheme(32, ScaleType::kF16).gate;
  linear.input = input;
  return UniformScheme(linear);
}

// Schemes whose x goes to the products in each of the ways there are: float32 or bf16, int8 records, stored scales, reordered.
std::vector<QuantScheme> Schemes() {
  std::vector<QuantScheme> all = {testing::Int4Scheme(32, ScaleType::kF16), testing::Int4Scheme(20, ScaleType::kF32),
                                  testing::PlainScheme(ElementType::kBf16)};
  all.push_back(With(Int8(ActivationMode::kDynamic, 1)));
  all.push_back(With(Int8(ActivationMode::kDynamic, 0)));
  all.push_back(With(Int8(ActivationMode::kStatic, 0)));
  all.push_back(testing::Int4Scheme(32, ScaleType::kF16));
  for (LinearScheme* linear : {&all.back().gate, &all.back().up, &all.back().down}) linear->weights.act_order = true;
  return all;
}

MoeDesc Desc(int experts, int top_k, int64_t hidden, int64_t intermediate, const QuantScheme& scheme, int64_t max_m) {
  MoeDesc desc = testing::MakeDesc(experts, top_k, hidden, intermediate, scheme);
  desc.max_tokens_per_expert = max_m;
  return desc;
}

// The counted rows of a batched call as a standard call: one slot of weight 1 each.
RandomBatch AsStandard(const MoeDesc& desc, const BatchedRows& rows) {
  RandomBatch batch(desc, rows.counted(), 1, rows.dtype, 0);
  uint8_t* next = batch.x.data();
  batch.ids.clear();
  batch.weights.assign(rows.counted(), 1.0f);
  const TensorView x = rows.view().x;
  for (int e = 0; e < desc.num_experts; ++e) {
    for (int32_t r = 0; r < rows.counts[e]; ++r, next += x.row_bytes()) {
      batch.ids.push_back(e);
      std::memcpy(next, x.row(e * rows.max_m + r), x.row_bytes());
    }
  }
  return batch;
}

// Pages of memory, one for each row of a matrix of float32; those of padding rows cannot be touched.
class GuardedRows {
 public:
  GuardedRows(const std::vector<int32_t>& counts, int64_t max_m)
      : page_(sysconf(_SC_PAGESIZE)), rows_(static_cast<int64_t>(counts.size()) * max_m) {
    data_ = static_cast<char*>(mmap(nullptr, rows_ * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    REQUIRE(data_ != MAP_FAILED);
    for (int64_t row = 0; row < rows_; ++row) {
      if (row % max_m >= counts[row / max_m]) REQUIRE(mprotect(data_ + row * page_, page_, PROT_NONE) == 0);
    }
  }
  ~GuardedRows() { munmap(data_, rows_ * page_); }
  static int64_t Columns() { return sysconf(_SC_PAGESIZE) / static_cast<int64_t>(sizeof(float)); }
  float* row(int64_t at) { return reinterpret_cast<float*>(data_ + at * page_); }

 private:
  const int64_t page_, rows_;
  char* data_;
};

}  // namespace

TEST_CASE("Counts of 0, 1, 33 and max_m give each row the bits of a standard call, and padding is left alone") {
  uint64_t seed = 0;
  for (const QuantScheme& scheme : Schemes()) {
    const MoeDesc desc = Desc(5, 1, 160, 96, scheme, 200);
    RandomExperts experts(desc, ++seed);
    for (const Backend* backend : AllFor(desc)) {
      const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
      for (DType dtype : {DType::kBf16, DType::kF32}) {
        for (const std::vector<int32_t>& counts : {std::vector<int32_t>{0, 1, 33, 200, 0}, {200, 0, 0, 2, 1}, {0, 0, 0, 0, 7}}) {
          INFO(backend->Name() << ": " << Describe(scheme) << ", " << DTypeName(dtype) << ", counts " << counts[0] << " " << counts[1]);
          const BatchedRows rows(desc, counts, dtype, ++seed);
          const auto got = RunBatchedLayer(*moe, rows, DType::kF32, Pool());
          const auto want = RunLayer(*moe, AsStandard(desc, rows).view(), DType::kF32, Pool());
          REQUIRE((got.ok() && want.ok()));
          CHECK(got->intact);
          CHECK((got->y == *want));
        }
      }
    }
  }
}

TEST_CASE("Counts that are all 0 are no error and write nothing") {
  for (const QuantScheme& scheme : Schemes()) {
    const MoeDesc desc = Desc(3, 1, 64, 64, scheme, 4);
    RandomExperts experts(desc, 100);
    for (const Backend* backend : AllFor(desc)) {
      const auto got = RunBatchedLayer(*Prepare(*backend, desc, experts), BatchedRows(desc, {0, 0, 0}, DType::kBf16, 101), DType::kF32, Pool());
      REQUIRE(got.ok());
      CHECK(got->intact);
      CHECK(got->y.empty());
    }
  }
}

TEST_CASE("Padding rows may lie in memory that cannot be touched") {
  const std::vector<int32_t> counts = {1, 0, 3, 2};
  for (const QuantScheme& scheme : Schemes()) {
    const MoeDesc desc = Desc(4, 1, GuardedRows::Columns(), 64, scheme, 3);
    RandomExperts experts(desc, 200);
    const BatchedRows rows(desc, counts, DType::kF32, 201);
    GuardedRows x(counts, 3), out(counts, 3);
    for (const Backend* backend : AllFor(desc)) {
      const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
      const auto want = RunBatchedLayer(*moe, rows, DType::kF32, Pool());
      REQUIRE(want.ok());
      std::vector<std::byte> storage(moe->BatchedWorkspaceBytes(6) + 64);
      ExecContext context{.pool = &Pool(), .workspace = std::span(storage).subspan(64 - reinterpret_cast<uintptr_t>(storage.data()) % 64)};
      for (int64_t row : {0, 6, 7, 8, 9, 10}) {
        std::memcpy(x.row(row), rows.view().x.row(row), rows.view().x.row_bytes());
        std::fill_n(out.row(row), desc.hidden, NAN);
      }
      BatchedExperts batch = rows.view();
      batch.x.data = x.row(0);
      REQUIRE(moe->RunBatched(batch, {out.row(0), DType::kF32, 12, desc.hidden}, context).ok());
      int64_t at = 0;
      for (int64_t row : {0, 6, 7, 8, 9, 10}) {
        CHECK(std::memcmp(out.row(row), &want->y[at++ * desc.hidden], desc.hidden * sizeof(float)) == 0);
      }
    }
  }
}

TEST_CASE("A random routing, dispatched and combined by hand, gives the standard result") {
  uint64_t seed = 300;
  for (const QuantScheme& scheme : Schemes()) {
    for (bool deterministic : {false, true}) {
      MoeDesc desc = Desc(6, 3, 200, 80, scheme, 64);
      desc.biases = true;
      desc.deterministic = deterministic;
      if (scheme.gate.weights.act_order) desc.hidden = 192, desc.intermediate = 96;
      RandomExperts experts(desc, ++seed);
      const RandomBatch batch(desc, 64, 3, DType::kBf16, ++seed);
      const BatchedRows rows(desc, batch);
      for (const Backend* backend : AllFor(desc)) {
        INFO(backend->Name() << ": " << Describe(scheme));
        const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
        const auto got = RunBatchedLayer(*moe, rows, DType::kF32, Pool());
        const auto want = RunLayer(*moe, batch.view(), DType::kF32, Pool());
        REQUIRE((got.ok() && want.ok()));
        CHECK(got->intact);
        CHECK(Judge(CombineByHand(batch, rows, *got), *want, desc.hidden, 1e-6).passed);
      }
    }
  }
}

TEST_CASE("Results are rounded once to the output's type, odd numbers of columns included") {
  for (int64_t hidden : {1, 7, 33, 100, 176}) {
    const MoeDesc desc = Desc(3, 1, hidden, 40, testing::PlainScheme(ElementType::kBf16), 5);
    RandomExperts experts(desc, 400);
    const BatchedRows rows(desc, {5, 0, 2}, DType::kF16, 401);
    for (const Backend* backend : AllFor(desc)) {
      const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
      for (DType dtype : {DType::kBf16, DType::kF16, DType::kF32}) {
        INFO(backend->Name() << " H=" << hidden << " " << DTypeName(dtype));
        const auto got = RunBatchedLayer(*moe, rows, dtype, Pool());
        const auto want = RunLayer(*moe, AsStandard(desc, rows).view(), dtype, Pool());
        REQUIRE((got.ok() && want.ok()));
        CHECK(got->intact);
        CHECK((got->y == *want));
      }
    }
  }
}

TEST_CASE("Where a weight belongs to the input, rows that the caller has multiplied give the standard result, others do not") {
  MoeDesc desc = Desc(4, 2, 96, 80, testing::Int4Scheme(32, ScaleType::kF16), 9);
  desc.weight_on_input = true;
  RandomExperts experts(desc, 500);
  const RandomBatch batch(desc, 9, 2, DType::kF32, 501);
  const BatchedRows plain(desc, batch);
  BatchedRows multiplied = plain;
  std::vector<int32_t> next(4, 0);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    float* row = reinterpret_cast<float*>(multiplied.x.data()) + (batch.ids[slot] * 9 + next[batch.ids[slot]]++) * 96;
    for (int64_t c = 0; c < 96; ++c) row[c] *= batch.weights[slot];
  }
  for (const Backend* backend : AllFor(desc)) {
    const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
    const auto want = RunLayer(*moe, batch.view(), DType::kF32, Pool());
    const auto combined = [&](const BatchedRows& rows, bool weighted) {
      return CombineByHand(batch, rows, *RunBatchedLayer(*moe, rows, DType::kF32, Pool()), weighted);
    };
    CHECK(Judge(combined(multiplied, false), *want, 96, 1e-6).passed);
    CHECK_FALSE(Judge(combined(plain, false), *want, 96, 0.01).passed);
    CHECK_FALSE(Judge(combined(plain, true), *want, 96, 0.01).passed);
  }
}

TEST_CASE("A scale that spans rows spans the counted rows of all experts, a per-token scale its own row") {
  for (bool per_request : {false, true}) {
    const MoeDesc desc = Desc(3, 1, 64, 48, With(Int8(ActivationMode::kDynamic, per_request ? 0 : 1)), 2);
    RandomExperts experts(desc, 600);
    const BatchedRows rows(desc, {1, 0, 2}, DType::kF32, 601);
    BatchedRows louder = rows;  // the last row, of expert 2
    for (int64_t c = 0; c < 64; ++c) reinterpret_cast<float*>(louder.x.data())[5 * 64 + c] *= 1000.0f;
    BatchedRows fewer = louder;  // which then is padding
    fewer.counts[2] = 1;
    for (const Backend* backend : AllFor(desc)) {
      const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts);
      const auto first = [&](const BatchedRows& with) {
        std::vector<float> y = RunBatchedLayer(*moe, with, DType::kF32, Pool())->y;
        y.resize(64);
        return y;
      };
      BatchedRows quiet = rows;
      quiet.counts[2] = 1;
      CHECK((first(rows) == first(louder)) == !per_request);
      CHECK((first(fewer) == first(quiet)));
    }
  }
}

TEST_CASE("A batched call that breaks the contract is refused with the numbers and writes nothing") {
  const MoeDesc desc = Desc(3, 1, 32, 32, testing::PlainScheme(ElementType::kBf16), 8);
  MoeDesc without = desc;
  without.max_tokens_per_expert = 0;
  RandomExperts experts(desc, 700);
  const BatchedRows rows(desc, {8, 0, 1}, DType::kF32, 701);
  for (const Backend* backend : AllFor(desc)) {
    const std::unique_ptr<PreparedMoe> moe = Prepare(*backend, desc, experts), standard = Prepare(*backend, without, experts);
    std::vector<float> out(24 * 32, 3.0f);
    std::vector<std::byte> storage(moe->BatchedWorkspaceBytes(24) + 64);
    ExecContext context{.pool = &Pool(), .workspace = std::span(storage).subspan(64 - reinterpret_cast<uintptr_t>(storage.data()) % 64)};
    const MutableTensorView whole = {out.data(), DType::kF32, 24, 32};
    const auto refused = [&](const PreparedMoe& by, const BatchedExperts& batch, const MutableTensorView& to, const std::string& text) {
      const absl::Status status = by.RunBatched(batch, to, context);
      INFO(status.ToString());
      CHECK(status.code() == (&by == standard.get() ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInvalidArgument));
      CHECK(std::string(status.message()).find(text) != std::string::npos);
    };
    const auto with_counts = [&](const std::vector<int32_t>& counts) {
      BatchedExperts batch = rows.view();
      batch.counts = counts;
      return batch;
    };
    refused(*standard, rows.view(), whole, "prepared without batched experts");
    const std::vector<int32_t> above = {8, 9, 1}, negative = {8, 0, -1}, few = {8, 0};
    refused(*moe, with_counts(above), whole, "count of expert 1: got 9, want 0 to 8");
    refused(*moe, with_counts(negative), whole, "count of expert 2: got -1, want 0 to 8");
    refused(*moe, with_counts(few), whole, "got 2 counts, want E = 3");
    BatchedExperts other = rows.view();
    other.max_m = 7;
    refused(*moe, other, whole, "max_m is 7, prepared for 8");
    other = rows.view();
    other.x.rows = 23;
    refused(*moe, other, whole, "hidden states are [23, 32], want [24, 32] (E = 3, max_m = 8, H = 32)");
    other = rows.view();
    other.x.cols = 31;
    refused(*moe, other, whole, "hidden states are [24, 31], want [24, 32]");
    refused(*moe, rows.view(), {out.data(), DType::kF32, 23, 32}, "output is [23, 32], want [24, 32]");
    refused(*moe, rows.view(), {out.data(), DType::kF32, 24, 33}, "output is [24, 33], want [24, 32]");
    CHECK((out == std::vector<float>(24 * 32, 3.0f)));
    CHECK(moe->RunBatched(rows.view(), whole, context).ok());
  }
}

TEST_CASE("A layer whose rows cannot be numbered in 31 bits, or a negative max_m, is refused by Check with the numbers") {
  for (const Backend* backend : {&cpu::ReferenceBackend(), cpu::CpuBackends().back()}) {
    for (int64_t max_m : {int64_t{-1}, (int64_t{1} << 29), int64_t{1} << 62}) {
      const Verdict verdict = backend->Check(Desc(4, 1, 32, 32, testing::PlainScheme(ElementType::kBf16), max_m), ThisDevice());
      REQUIRE(verdict.reasons.size() == 1);
      CHECK(verdict.reasons[0].code == "shape_unsupported");
      CHECK(verdict.reasons[0].text.find("is " + std::to_string(max_m) + ", want 0 to 536870911 with E = 4") != std::string::npos);
    }
    CHECK(backend->Check(Desc(4, 1, 32, 32, testing::PlainScheme(ElementType::kBf16), (int64_t{1} << 29) - 1), ThisDevice()).ok());
  }
}

TEST_CASE("The judge sees another expert's rows, rows in another order, and a row too few") {
  const MoeDesc desc = Desc(3, 1, 128, 96, testing::Int4Scheme(32, ScaleType::kF16), 4);
  RandomExperts experts(desc, 800);
  const BatchedRows rows(desc, {2, 2, 3}, DType::kF32, 801);
  const auto want = RunBatchedLayer(*Prepare(cpu::ReferenceBackend(), desc, experts), rows, DType::kF32, Pool());
  REQUIRE(want.ok());
  RandomExperts swapped_experts = experts;
  std::swap(swapped_experts.experts()[0], swapped_experts.experts()[1]);
  BatchedRows swapped_rows = rows, shifted = rows, fewer = rows;
  const int64_t bytes = 128 * sizeof(float);
  std::swap_ranges(&swapped_rows.x[8 * bytes], &swapped_rows.x[9 * bytes], &swapped_rows.x[9 * bytes]);
  std::copy_n(&rows.x[4 * bytes], 2 * bytes, &shifted.x[0]);  // expert 1's rows at expert 0
  fewer.counts[2] = 2;
  for (const Backend* backend : AllFor(desc)) {
    const auto passes = [&](const RandomExperts& with, const BatchedRows& given) {
      return Judge(RunBatchedLayer(*Prepare(*backend, desc, with), given, DType::kF32, Pool())->y, want->y, 128, 0.01).passed;
    };
    CHECK(passes(experts, rows));
    CHECK_FALSE(passes(swapped_experts, rows));
    CHECK_FALSE(passes(experts, swapped_rows));
    CHECK_FALSE(passes(experts, shifted));
    CHECK_FALSE(passes(experts, fewer));
  }
}

}  // namespace moed
