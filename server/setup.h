// From options to an engine with planned models: everything that can be checked before a port opens or a weight is read.
#ifndef MOED_SERVER_SETUP_H_
#define MOED_SERVER_SETUP_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/oracle.h"
#include "server/options.h"

namespace moed {

// The parsed policy, whose backend names all exist. Errors start with "--policy".
absl::StatusOr<Policy> ReadPolicy(const std::string& text, const std::vector<const Backend*>& backends);

// `text` is one of file, none and int8.
ActivationChoice ReadActivations(const std::string& text);

// An engine for this machine with every model in state kPlanned. Errors name the option or the model, and what was wanted
// and got.
absl::StatusOr<std::unique_ptr<Engine>> SetUpEngine(const ServeOptions& options);

// What an operator should know about the number of threads that was asked for: each limit that it exceeds, with both numbers.
std::vector<std::string> ThreadWarnings(const HostStatus& host);

// Prints `status` on stderr as every command does: the error on the first line, details indented below. Returns exit
// code 2.
int ReportFailure(const absl::Status& status);

}  // namespace moed

#endif  // MOED_SERVER_SETUP_H_
