// A model whose rows take the reference about a millisecond each, so that a small message is long work.
#ifndef MOED_TESTS_CLIENT_SLOW_MODEL_H_
#define MOED_TESTS_CLIENT_SLOW_MODEL_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/moed_client.h"

namespace moed::testing {

// Writes it to `directory`.
void WriteSlowModel(const std::string& directory);

// What makes a server of it slow.
std::vector<std::string> SlowModelOptions();

// One call of `rows` rows of zeros.
absl::Status ForwardZeros(client::MoeClient& client, int64_t rows, std::chrono::milliseconds timeout);

}  // namespace moed::testing

#endif  // MOED_TESTS_CLIENT_SLOW_MODEL_H_
