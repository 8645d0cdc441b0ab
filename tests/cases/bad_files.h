// Bad checkpoints as a table: what is wrong, how it comes to lie in a directory, and what its refusal must name. Each is
// loaded in a process of its own, which may neither crash nor hang nor take memory that only a claimed size asks for.
#ifndef MOED_TESTS_CASES_BAD_FILES_H_
#define MOED_TESTS_CASES_BAD_FILES_H_

#include <catch2/catch.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/checkpoint_builder.h"
#include "tests/support/load_child.h"
#include "tests/support/sanitizer.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

inline constexpr int64_t kMiB = 1 << 20;
// Memory that a refusal may take, over that of a process which has read nothing.
inline constexpr int64_t kRefusalBytes = 64 * kMiB;

struct BadFile {
  std::string what;
  std::function<void(const TempDir& dir)> make;
  std::vector<std::string> named;      // texts that the refusal holds
  std::vector<std::string> more = {};  // arguments of load_probe; "DIR/" stands for the directory
};

inline void CheckRefused(const BadFile& bad) {
  INFO(bad.what);
  TempDir dir;
  bad.make(dir);
  std::vector<std::string> more = bad.more;
  for (std::string& argument : more) {
    if (argument.rfind("DIR/", 0) == 0) argument = dir.File(argument.substr(4));
  }
  const LoadOutcome outcome = LoadInChild(dir.path(), more, kAddressSanitizer ? 200 : 20);
  INFO(outcome.trouble << outcome.error.substr(0, 4000));
  REQUIRE(outcome.finished);
  CHECK_FALSE(outcome.ok);
  for (const std::string& text : bad.named) {
    INFO("wanted in the message: " << text);
    CHECK(outcome.error.find(text) != std::string::npos);
  }
  CHECK(outcome.error.size() < 4000);
  if (!kAddressSanitizer) CHECK(outcome.peak < kRefusalBytes);  // its allocator keeps what was freed
}

inline void CheckRefused(const std::vector<BadFile>& table) {
  for (const BadFile& bad : table) CheckRefused(bad);
}

// A sound small model, E = 4, H = 64, I = 32, one layer: what the bad ones differ from.
inline ModelSpec SmallSpec() {
  return {.family = ModelFamily::kQwen3Moe, .hidden = 64, .intermediate = 32, .num_experts = 4};
}

// Writes `spec` after `change`, in `shards` files.
inline std::function<void(const TempDir&)> Model(ModelSpec spec, std::function<void(CheckpointBuilder&)> change = {},
                                                 int shards = 1) {
  return [=](const TempDir& dir) {
    CheckpointBuilder builder;
    AddModel(spec, &builder);
    if (change) change(builder);
    REQUIRE(builder.Write(dir.path(), shards).ok());
  };
}

// Repeats `piece` `count` times.
inline std::string Times(size_t count, const std::string& piece) {
  std::string text;
  text.reserve(count * piece.size());
  for (size_t i = 0; i < count; ++i) text += piece;
  return text;
}

}  // namespace moed::testing

#endif  // MOED_TESTS_CASES_BAD_FILES_H_
