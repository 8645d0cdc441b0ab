// What a load says of itself.
#include "server/load_log.h"

#include <catch2/catch.hpp>

#include <cstdio>
#include <string>

namespace moed {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

LoadProgress Progress(int done, int total, uint64_t bytes, uint64_t total_bytes) {
  return {.done = done, .total = total, .layer = done + 2, .file_bytes = bytes, .total_file_bytes = total_bytes};
}

// Everything that `write` puts into a file.
template <typename Write>
std::string Written(const Write& write) {
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  write(file);
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST_CASE("A line of progress names layer, count, bytes and the seconds left at the rate so far") {
  CHECK(ProgressText(Progress(6, 48, kGiB * 3 / 2, 12 * kGiB), 10.0) ==
        "layer 8 is loaded, 6 of 48, 1.5 GiB of 12.0 GiB, 70 s left");
  CHECK(ProgressText(Progress(1, 3, 1000, 3000), 0.5) == "layer 3 is loaded, 1 of 3, 1000 B of 2.9 KiB, 1 s left");
}

TEST_CASE("The time left goes by bytes and not by the count of layers") {
  CHECK(ProgressText(Progress(9, 10, kGiB, 4 * kGiB), 2.0).find("6 s left") != std::string::npos);
}

TEST_CASE("Nothing is left after the last layer, and a layer without bytes divides nothing by zero") {
  CHECK(ProgressText(Progress(3, 3, 3000, 3000), 5.0).find("left") == std::string::npos);
  CHECK(ProgressText(Progress(1, 3, 0, 3000), 5.0).find("left") == std::string::npos);
  CHECK(ProgressText(Progress(1, 3, 0, 0), 5.0) == "layer 3 is loaded, 1 of 3, 0 B of 0 B, 0 s left");
}

TEST_CASE("The bar is as full as the bytes that are loaded") {
  CHECK(ProgressBar(Progress(3, 10, 3 * kGiB, 10 * kGiB), 3.0) ==
        "[######--------------]  30 %, 3 of 10 layers, 3.0 GiB of 10.0 GiB, 7 s left");
  CHECK(ProgressBar(Progress(10, 10, 10 * kGiB, 10 * kGiB), 3.0).find("[####################] 100 %") == 0);
  CHECK(ProgressBar(Progress(1, 10, 0, 10 * kGiB), 3.0).find("[--------------------]   0 %") == 0);
}

TEST_CASE("On a terminal each layer draws over the one before, and the last one leaves nothing behind") {
  const std::string text = Written([](std::FILE* file) {
    LoadLog log("m", file);
    log.LayerLoaded(Progress(1, 2, 10, 20));
    log.LayerLoaded(Progress(2, 2, 20, 20));
  });
  const std::string wipe = "\r\033[K";
  CHECK(text.find(wipe + "m [##########----------]  50 %") == 0);
  CHECK(text.find('\n') == std::string::npos);
  CHECK(text.substr(text.size() - wipe.size()) == wipe);
}

}  // namespace
}  // namespace moed
