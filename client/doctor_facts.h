// Gathers what `moectl doctor` judges: from this host, from the way to the server, and from the server where it answers. Changes
// nothing anywhere; takes as long as the server takes for a self-check of one layer, at most the given time limits.
#ifndef MOED_CLIENT_DOCTOR_FACTS_H_
#define MOED_CLIENT_DOCTOR_FACTS_H_

#include <chrono>
#include <string>

#include "client/doctor_checks.h"
#include "client/moed_client.h"

namespace moed::client {

struct DoctorOptions {
  std::string version;  // of this program
  std::string server;
  std::string model;  // empty: the first one
  ClientOptions connection;
  std::chrono::milliseconds short_call{5'000}, self_check{120'000};
};

// What cannot be found out is left empty or has its reason; there is no error.
DoctorFacts GatherFacts(const DoctorOptions& options);

// A bare connection to an address, as MoeClient takes it.
struct BareConnection {
  absl::Status status;  // why there is none; after a newline what to do
  int socket = -1;      // the caller's to close
  pid_t server = 0;     // the process at the other end of a UNIX socket; 0: unknown
};
BareConnection ConnectBare(const std::string& address, std::chrono::milliseconds limit);

}  // namespace moed::client

#endif  // MOED_CLIENT_DOCTOR_FACTS_H_
