#include "server/retry_info.h"

#include <utility>

#include "absl/strings/cord.h"
#include "proto/google/rpc/error_details.pb.h"
#include "proto/google/rpc/status.pb.h"

namespace moed {
namespace {

constexpr char kRetryInfo[] = "type.googleapis.com/google.rpc.RetryInfo";

}  // namespace

absl::Status WithRetryInfo(absl::Status status, std::chrono::steady_clock::duration delay) {
  if (!absl::IsResourceExhausted(status)) return status;
  const int64_t nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(delay).count();
  google::rpc::RetryInfo info;
  info.mutable_retry_delay()->set_seconds(nanoseconds / 1'000'000'000);
  info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanoseconds % 1'000'000'000));
  status.SetPayload(kRetryInfo, absl::Cord(info.SerializeAsString()));
  return status;
}

absl::Status PushOrTellWhen(WorkQueue* queue, std::shared_ptr<QueuedWork> work, WorkQueue::Duration here) {
  absl::Status status = queue->Push(std::move(work), here);
  if (status.ok()) return status;
  return WithRetryInfo(std::move(status), queue->RetryDelay());
}

absl::Status CheckRoomOrTellWhen(WorkQueue* queue, int64_t rows) {
  absl::Status status = queue->CheckRoom(rows);
  if (status.ok()) return status;
  return WithRetryInfo(std::move(status), queue->RetryDelay());
}

int64_t RetryMicroseconds(const absl::Status& status) {
  const auto payload = status.GetPayload(kRetryInfo);
  google::rpc::RetryInfo info;
  if (!payload || !info.ParseFromString(std::string(*payload))) return 0;
  return info.retry_delay().seconds() * 1'000'000 + (info.retry_delay().nanos() + 999) / 1000;
}

std::string StatusDetails(const absl::Status& status, const std::string& message) {
  google::rpc::Status all;
  status.ForEachPayload([&](auto type, const absl::Cord& payload) {
    google::protobuf::Any* detail = all.add_details();
    detail->set_type_url(std::string(type.data(), type.size()));
    detail->set_value(std::string(payload));
  });
  if (all.details().empty()) return "";
  all.set_code(static_cast<int32_t>(status.code()));
  all.set_message(message);
  return all.SerializeAsString();
}

}  // namespace moed
