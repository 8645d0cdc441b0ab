#include "client/retry_after.h"

#include <algorithm>

#include "absl/strings/cord.h"
#include "client/moed_client.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"

namespace moed::client {
namespace {

constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";
constexpr int64_t kMostSeconds = 86'400;  // of a wait that is worth telling, and far from any overflow

}  // namespace

void AddDetails(const std::string& details, absl::Status* status) {
  google::rpc::Status all;
  if (details.empty() || !all.ParseFromString(details)) return;
  for (const google::protobuf::Any& detail : all.details()) status->SetPayload(detail.type_url(), absl::Cord(detail.value()));
}

void AddRetryAfter(int64_t microseconds, absl::Status* status) {
  if (microseconds <= 0) return;
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(microseconds / 1'000'000);
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(microseconds % 1'000'000 * 1000));
  status->SetPayload(kRetryInfo, absl::Cord(info.SerializeAsString()));
}

std::optional<std::chrono::microseconds> RetryAfter(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfo);
  google::rpc::RetryInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload)) || !info.has_retry_delay()) return std::nullopt;
  const int64_t seconds = std::clamp<int64_t>(info.retry_delay().seconds(), 0, kMostSeconds);
  const int64_t nanos = std::clamp<int64_t>(info.retry_delay().nanos(), 0, 999'999'999);
  return std::chrono::seconds(seconds) + std::chrono::microseconds((nanos + 999) / 1000);
}

}  // namespace moed::client
