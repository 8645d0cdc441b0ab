// A device described by a JSON file, for `explain` on machines that are neither here nor built in:
//
//   {"name": "edge box", "isa": ["avx2", "fma", "f16c"], "cores": 8, "memory_bytes": 34359738368,
//    "gpu": {"compute_capability": "8.9", "multiprocessors": 142, "free_bytes": 47000000000}}
//
// Pure function.
#ifndef MOED_ENGINE_DEVICE_JSON_H_
#define MOED_ENGINE_DEVICE_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "kernels/device_info.h"

namespace moed {

// Parses such a text. Without "gpu" there is none; without "name" it is "device"; without "isa" it has no extensions;
// "cores" defaults to 1 and "memory_bytes" to 0, which means unknown. A "gpu" has all three of its keys.
// INVALID_ARGUMENT: unknown keys or flags (the valid ones are listed), wrong types or ranges.
absl::StatusOr<DeviceInfo> DeviceFromJson(const std::string& text);

}  // namespace moed

#endif  // MOED_ENGINE_DEVICE_JSON_H_
