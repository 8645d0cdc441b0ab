// The commands that end by themselves: explain, check and dequantize. Each prints its result on stdout and returns the
// exit code: 0 ok, 1 a check failed, 2 usage or set-up, with the error first on stderr.
#ifndef MOED_SERVER_COMMANDS_H_
#define MOED_SERVER_COMMANDS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/explain.h"
#include "kernels/device_info.h"
#include "server/options.h"

namespace moed {

// Backends per layer, from headers and config alone. Exit code 1 when a layer has no backend or the whole does not fit.
int RunExplain(const ExplainOptions& options);

// Validates options, headers and the choice of backends, as serve does before it listens.
int RunCheck(const ServeOptions& options);

// Writes the experts' exact weights into one safetensors file.
int RunDequantize(const DequantizeOptions& options);

// The device that `text` names: a built-in name or a JSON file. NOT_FOUND lists the names.
absl::StatusOr<DeviceInfo> ReadDevice(const std::string& text);

// The report for people, equal neighbours in one entry; and as one line of JSON, whose keys are a contract.
std::string ExplainText(const ExplainReport& report);
std::string ExplainJson(const ExplainReport& report);
// Whether `explain` succeeds.
bool EverythingFits(const ExplainReport& report);

// The work of RunDequantize. ALREADY_EXISTS for an existing `out` without `force`; on an error no file is left behind.
// Returns the number of tensors written.
absl::StatusOr<size_t> Dequantize(const DequantizeOptions& options);

}  // namespace moed

#endif  // MOED_SERVER_COMMANDS_H_
