// A flood of tiny calls, which cost more to send than to compute: three connections of h2load, which needs a small part of the
// processor time that a client of gRPC does, ask for several times what can be computed, and take no answer's word. Beside them one
// client of gRPC calls at a steady rate and tells how that is for it.
#ifndef MOED_TESTS_SOAK_FLOOD_H_
#define MOED_TESTS_SOAK_FLOOD_H_

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "tests/soak/overload.h"

namespace moed::testing {

inline constexpr std::string_view kFloodName = "tiny calls";

// Prints the figures; whether all are as wanted. `folder`: for the server's sockets, its path short. Errors: what keeps it from
// running, h2load that is not there (Debian's nghttp2-client) among it.
absl::StatusOr<bool> RunFlood(const OverloadOptions& options, const std::string& folder);

}  // namespace moed::testing

#endif  // MOED_TESTS_SOAK_FLOOD_H_
