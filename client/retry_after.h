// What a server says of when to try again, as it travels in a status of the client: a payload of the type google.rpc.RetryInfo.
#ifndef MOED_CLIENT_RETRY_AFTER_H_
#define MOED_CLIENT_RETRY_AFTER_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace moed::client {

// Adds the details of a google.rpc.Status, serialized, as payloads; nothing where they cannot be read.
void AddDetails(const std::string& details, absl::Status* status);

// Adds advice to wait; microseconds above 0.
void AddRetryAfter(int64_t microseconds, absl::Status* status);

}  // namespace moed::client

#endif  // MOED_CLIENT_RETRY_AFTER_H_
