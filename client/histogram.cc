#include "client/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace moed::client {
namespace {

// Values below 2^7 have a bucket each; above, each power of two is cut into 2^7 equal buckets, so that a bucket is at most
// 1/128 of its value wide.
constexpr int kSubBits = 7;
constexpr uint64_t kSub = 1 << kSubBits;
constexpr size_t kBuckets = (64 - kSubBits) * kSub;

size_t BucketOf(uint64_t value) {
  if (value < kSub) return static_cast<size_t>(value);
  const int shift = std::bit_width(value) - 1 - kSubBits;
  return static_cast<size_t>((static_cast<uint64_t>(shift) << kSubBits) + (value >> shift));
}

// The largest value of a bucket.
int64_t UpperEnd(size_t bucket) {
  if (bucket < kSub) return static_cast<int64_t>(bucket);
  const uint64_t shift = bucket / kSub - 1;
  const uint64_t mantissa = bucket % kSub + kSub;
  return static_cast<int64_t>(((mantissa + 1) << shift) - 1);
}

}  // namespace

LatencyHistogram::LatencyHistogram() : buckets_(kBuckets, 0) {}

void LatencyHistogram::Add(int64_t nanoseconds) {
  const int64_t value = std::max<int64_t>(nanoseconds, 0);
  ++buckets_[BucketOf(static_cast<uint64_t>(value))];
  ++count_;
  max_ = std::max(max_, value);
}

void LatencyHistogram::Merge(const LatencyHistogram& other) {
  for (size_t i = 0; i < buckets_.size(); ++i) buckets_[i] += other.buckets_[i];
  count_ += other.count_;
  max_ = std::max(max_, other.max_);
}

double LatencyHistogram::QuantileMicros(double q) const {
  if (count_ == 0) return 0;
  const int64_t wanted = std::clamp<int64_t>(static_cast<int64_t>(std::ceil(q * static_cast<double>(count_))), 1, count_);
  int64_t seen = 0;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    seen += buckets_[i];
    if (seen >= wanted) return static_cast<double>(std::min(UpperEnd(i), max_)) / 1000.0;
  }
  return static_cast<double>(max_) / 1000.0;
}

}  // namespace moed::client
