#include "tests/client/slow_model.h"

#include <catch2/catch.hpp>

#include "tests/support/checkpoint_builder.h"

namespace moed::testing {
namespace {

constexpr int64_t kHidden = 1024;

}  // namespace

void WriteSlowModel(const std::string& directory) {
  const ModelSpec spec{.family = ModelFamily::kMixtral, .hidden = kHidden, .intermediate = 1024, .num_experts = 2};
  CheckpointBuilder builder;
  AddModel(spec, &builder);
  REQUIRE(builder.Write(directory).ok());
}

std::vector<std::string> SlowModelOptions() { return {"--policy", "require:reference", "--threads", "1"}; }

absl::Status ForwardZeros(client::MoeClient& client, int64_t rows, std::chrono::milliseconds timeout) {
  const std::vector<uint8_t> hidden(static_cast<size_t>(rows * kHidden) * 2, 0);
  client::ForwardCall call;
  call.hidden = {client::DType::kBf16, rows, kHidden, hidden};
  return client.Forward(call, {.timeout = timeout}).status();
}

}  // namespace moed::testing
