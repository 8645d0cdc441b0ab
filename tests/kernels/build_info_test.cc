// What a program says of the CUDA part of its build.
#include <catch2/catch.hpp>
#include <string>

#include "kernels/backends.h"

namespace moed {
namespace {

using Catch::Matchers::Matches;

TEST_CASE("The build names its CUDA toolkit and architectures, or says that there are none") {
  const std::string build = CudaBuild();
  if (MOED_HAVE_CUDA) {
    CHECK_THAT(build, Matches("CUDA [0-9]+\\.[0-9]+(, sm_[0-9]+a?)+"));
  } else {
    CHECK(build == "built without CUDA");
  }
}

}  // namespace
}  // namespace moed
