// When a caller that was refused for lack of room should try again, as clients of gRPC read it: google.rpc.RetryInfo in the details
// of the status, which travel in the trailer grpc-status-details-bin.
//
// Inside the server it is a payload of the absl::Status. Pure functions, safe from any thread.
#ifndef MOED_SERVER_RETRY_INFO_H_
#define MOED_SERVER_RETRY_INFO_H_

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/work_queue.h"

namespace moed {

// `status` with the advice to wait for `delay`; RESOURCE_EXHAUSTED only, others as they are.
absl::Status WithRetryInfo(absl::Status status, std::chrono::steady_clock::duration delay);

// WorkQueue::Push; RESOURCE_EXHAUSTED comes with the queue's RetryDelay.
absl::Status PushOrTellWhen(WorkQueue* queue, std::shared_ptr<QueuedWork> work, WorkQueue::Duration here = {});

// WorkQueue::CheckRoom, with the queue's RetryDelay alike.
absl::Status CheckRoomOrTellWhen(WorkQueue* queue, int64_t rows);

// The delay that is in `status`, in microseconds, rounded up; 0: none.
int64_t RetryMicroseconds(const absl::Status& status);

// The bytes of a google.rpc.Status of that code and message with the payloads of `status`; empty when it has none.
std::string StatusDetails(const absl::Status& status, const std::string& message);

}  // namespace moed

#endif  // MOED_SERVER_RETRY_INFO_H_
