// `moed serve`: the life of the process, from options to exit code.
#ifndef MOED_SERVER_SERVE_H_
#define MOED_SERVER_SERVE_H_

#include "server/options.h"

namespace moed {

// Checks, listens, loads, serves until SIGTERM or SIGINT, drains. Returns the exit code: 0 after a drain, 2 when the
// set-up or the load fails, with the error first on stderr. A second signal ends the process at once with code 1. Must be
// called before any thread exists, since it blocks the signals for all of them.
int RunServe(const ServeOptions& options);

}  // namespace moed

#endif  // MOED_SERVER_SERVE_H_
