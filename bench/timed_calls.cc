#include "bench/timed_calls.h"

#include <algorithm>
#include <chrono>

namespace moed::bench {
namespace {

constexpr int kFew = 2;
constexpr uint64_t kRoutings = 16;

MoeDesc WithFewExperts(MoeDesc desc) {
  desc.num_experts = kFew;
  return desc;
}

}  // namespace

RepeatedExperts::RepeatedExperts(const MoeDesc& desc) : few_(WithFewExperts(desc), 1) {}

absl::Status RepeatedExperts::Read(int expert, ExpertWeights* out) const { return few_.Read(expert % kFew, out); }

TimedCalls::TimedCalls(const PreparedMoe& layer, const MoeDesc& desc, int64_t tokens, WorkerPool& pool)
    : layer_(layer), tokens_(tokens), hidden_(desc.hidden),
      out_(static_cast<size_t>(tokens * desc.hidden)) {
  for (uint64_t seed = 0; seed < kRoutings; ++seed) batches_.emplace_back(desc, tokens, desc.top_k, DType::kBf16, seed);
  context_.pool = &pool;
  const size_t bytes = layer.WorkspaceBytes(tokens, desc.top_k);
  if (workspace_.Allocate(bytes)) context_.workspace = std::as_writable_bytes(std::span<uint8_t>(workspace_.data(), bytes));
}

absl::StatusOr<double> TimedCalls::Next() {
  const MoeBatch batch = batches_[turn_++ % batches_.size()].view();
  const auto start = std::chrono::steady_clock::now();
  const absl::Status status = layer_.Run(batch, {out_.data(), DType::kBf16, tokens_, hidden_}, context_);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!status.ok()) return status;
  return seconds;
}

double TimedCalls::TouchedExperts() const {
  double touched = 0.0;
  for (const testing::RandomBatch& batch : batches_) {
    std::vector<int32_t> ids = batch.ids;
    std::sort(ids.begin(), ids.end());
    touched += static_cast<double>(std::unique(ids.begin(), ids.end()) - ids.begin());
  }
  return touched / static_cast<double>(batches_.size());
}

}  // namespace moed::bench
