// replay: recorded calls, run in this process on one backend after the other and compared with a reference.
#ifndef MOED_SERVER_REPLAY_H_
#define MOED_SERVER_REPLAY_H_

#include "absl/status/statusor.h"
#include "engine/replay_report.h"
#include "server/options.h"

namespace moed {

// Prints the report on stdout and returns the exit code: 0 ok, 1 an error of a row is above the bound, 2 usage or set-up, with the
// error first on stderr.
int RunReplay(const ReplayOptions& options);

// The work of RunReplay. Layer by layer: the checkpoint's weights of one are in memory once for each backend and for the reference.
// Each call runs on every backend in turn, so that their times are of the same moments; the first call of a layer runs once more
// before, untimed. Errors: as FindRecordings and ReadRecordedCall; NOT_FOUND for an unknown backend, listing the known ones, for
// recordings none of which is of the model and layer asked for, and for a layer that the checkpoint lacks; INVALID_ARGUMENT where
// recordings do not go together, and, with the file named, for a call that the layer does not take; else as Engine::Plan and Load.
absl::StatusOr<ReplayReport> Replay(const ReplayOptions& options);

}  // namespace moed

#endif  // MOED_SERVER_REPLAY_H_
