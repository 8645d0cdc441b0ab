// Which GPUs a build says it runs on.
#include "kernels/cuda/architectures.h"

#include <catch2/catch.hpp>

namespace moed::cuda {

TEST_CASE("Machine code runs on its own minor version and on later ones of the same major") {
  const char build[] = "CUDA 13.0, sm_80";
  CHECK(RunsOn(build, 8, 0));
  CHECK(RunsOn(build, 8, 6));
  CHECK(RunsOn(build, 8, 9));
  CHECK_FALSE(RunsOn(build, 7, 5));
  CHECK_FALSE(RunsOn(build, 9, 0));
  CHECK_FALSE(RunsOn(build, 12, 0));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_86", 8, 0));
  CHECK(RunsOn("CUDA 13.0, sm_86", 8, 9));
}

TEST_CASE("Machine code for sm_XYa runs on X.Y alone") {
  CHECK(RunsOn("CUDA 13.0, sm_90a", 9, 0));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_90a", 9, 1));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_90a", 10, 0));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_90a", 8, 0));
  CHECK(RunsOn("CUDA 13.0, sm_100a", 10, 0));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_100a", 10, 3));
}

TEST_CASE("Majors of two digits are told from those of one") {
  CHECK(RunsOn("CUDA 13.0, sm_100", 10, 0));
  CHECK(RunsOn("CUDA 13.0, sm_100", 10, 3));
  CHECK(RunsOn("CUDA 13.0, sm_120", 12, 0));
  CHECK(RunsOn("CUDA 13.0, sm_120", 12, 1));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_120", 1, 2));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_100", 1, 0));
  CHECK_FALSE(RunsOn("CUDA 13.0, sm_120", 10, 0));
}

TEST_CASE("A release build runs on every architecture of its list and on no other") {
  const char build[] = "CUDA 13.0, sm_80, sm_86, sm_89, sm_90a, sm_100, sm_120";
  for (const auto& [major, minor] : {std::pair{8, 0}, {8, 6}, {8, 7}, {8, 9}, {9, 0}, {10, 0}, {10, 3}, {12, 0}, {12, 1}}) {
    INFO(major << "." << minor);
    CHECK(RunsOn(build, major, minor));
  }
  for (const auto& [major, minor] : {std::pair{7, 0}, {7, 5}, {9, 1}, {11, 0}, {13, 0}, {0, 0}}) {
    INFO(major << "." << minor);
    CHECK_FALSE(RunsOn(build, major, minor));
  }
}

TEST_CASE("A text without architectures runs nowhere") {
  for (const char* build : {"", "built without CUDA", "CUDA 13.0", "sm", "sm_", "sm_a", "CUDA 90"}) {
    INFO(build);
    CHECK_FALSE(RunsOn(build, 9, 0));
    CHECK_FALSE(RunsOn(build, 13, 0));
  }
}

}  // namespace moed::cuda
