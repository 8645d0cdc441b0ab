// What of the options decides who can reach a server: checked as a whole before anything listens, by serve and by check.
#ifndef MOED_SERVER_SECURITY_H_
#define MOED_SERVER_SECURITY_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "server/options.h"

namespace moed {

// OK when the options about TLS, tokens and addresses go together, their files are as they should be, and no address of --listen
// is in clear text beyond loopback unless --allow-insecure says so. --health-listen may be anywhere: it tells states only. Errors
// name the option, what was wanted and got, and for an address the ways out.
absl::Status CheckSecurity(const ServeOptions& options);

// What an operator should know about options that passed: who may call that was perhaps not meant to.
std::vector<std::string> SecurityWarnings(const ServeOptions& options);

}  // namespace moed

#endif  // MOED_SERVER_SECURITY_H_
