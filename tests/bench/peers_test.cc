// Times of other programs: what a file may say, which rows get a peer, and the means.
#include <catch2/catch.hpp>

#include "bench/peers.h"

namespace moed::bench {
namespace {

std::string Refusal(const std::string& text) {
  const absl::StatusOr<std::vector<PeerTime>> times = ParsePeers(text);
  CHECK(times.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(times.status().message());
}

Row MakeRow(const char* scheme, const char* backend, int64_t tokens, double ms) {
  Row row;
  row.shape = "qwen3-30b";
  row.scheme = scheme;
  row.backend = backend;
  row.tokens = tokens;
  row.ms = ms;
  return row;
}

PeerTime MakeTime(const char* scheme, int64_t tokens, const char* peer, double ms) {
  return {"qwen3-30b", scheme, tokens, peer, ms};
}

}  // namespace

TEST_CASE("a file of peers is a list of cells") {
  const absl::StatusOr<std::vector<PeerTime>> times =
      ParsePeers(R"([{"shape": "gpt-oss-20b", "scheme": "mxfp4-a8", "tokens": 16, "peer": "other", "ms": 12.5}])");
  REQUIRE(times.ok());
  REQUIRE(times->size() == 1);
  const PeerTime& time = times->front();
  CHECK(time.shape == "gpt-oss-20b");
  CHECK(time.scheme == "mxfp4-a8");
  CHECK(time.tokens == 16);
  CHECK(time.peer == "other");
  CHECK(time.ms == 12.5);
  CHECK(ParsePeers("[]").value().empty());
}

TEST_CASE("a file of peers that is wrong in one place is refused with that place named") {
  const std::string good = R"({"shape": "qwen3-30b", "scheme": "int8", "tokens": 1, "peer": "p", "ms": 1})";
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string entry = good;
    entry.replace(entry.find(from), from.size(), to);
    return Refusal("[" + good + "," + entry + "]");
  };
  CHECK(Refusal("[") == "wanted a JSON list, got text that is no JSON");
  CHECK(Refusal("{}") == "wanted a JSON list, got a object");
  CHECK(Refusal("[3]") == "entry 0: wanted an object, got a number");
  CHECK(with("qwen3-30b", "qwen").find("entry 1: shape: wanted one of qwen3-30b, mixtral-8x7b") == 0);
  CHECK(with("\"int8\"", "8").find("entry 1: scheme: wanted one of int4-g128") == 0);
  CHECK(with("\"int8\"", "\"q8_0\"").find(", got \"q8_0\"") != std::string::npos);
  CHECK(with("\"p\"", "\"\"") == "entry 1: peer: wanted a name, got \"\"");
  CHECK(with("\"peer\": \"p\", ", "") == "entry 1: peer: wanted a name, got nothing");
  CHECK(with("\"tokens\": 1", "\"tokens\": 1.5") == "entry 1: tokens: wanted an integer from 1 to 1048576, got 1.5");
  CHECK(with("\"tokens\": 1", "\"tokens\": 18446744073709551615").find("entry 1: tokens: wanted") == 0);
  CHECK(with("\"ms\": 1", "\"ms\": 0") == "entry 1: ms: wanted milliseconds above 0, got 0");
  CHECK(with("\"ms\": 1", "\"ms\": 1, \"sec\": 1") == "entry 1: keys: wanted shape, scheme, tokens, peer and ms, got \"sec\"");
}

TEST_CASE("a file of peers that cannot be read is named") {
  const absl::StatusOr<std::vector<PeerTime>> times = ReadPeers("no/such.json");
  CHECK(times.status().code() == absl::StatusCode::kNotFound);
  CHECK(std::string(times.status().message()) == "peers: cannot read no/such.json");
}

TEST_CASE("of several peers in a cell the fastest counts, other cells have none") {
  std::vector<Row> rows = {MakeRow("int8", "cpu_avx2", 1, 4.0), MakeRow("int8", "cpu_avx512", 1, 2.0),
                           MakeRow("int8", "cpu_avx2", 4, 9.0)};
  AddPeers({MakeTime("int8", 1, "slow", 8.0), MakeTime("int8", 1, "fast", 6.0), MakeTime("int8", 1, "middle", 7.0),
            MakeTime("bf16", 4, "fast", 1.0)},
           &rows);
  CHECK(rows[0].peer == "fast");
  CHECK(rows[0].peer_ratio().value() == 1.5);
  CHECK(rows[1].peer_ratio().value() == 3.0);
  CHECK(rows[2].peer.empty());
  CHECK_FALSE(rows[2].peer_ratio().has_value());
}

TEST_CASE("means are geometric, of each scheme on each backend, over the cells with a peer") {
  std::vector<Row> rows = {MakeRow("int8", "cpu_avx2", 1, 1.0), MakeRow("int8", "cpu_avx2", 4, 1.0),
                           MakeRow("int8", "cpu_avx2", 16, 1.0), MakeRow("int8", "cpu_avx512", 1, 0.5),
                           MakeRow("bf16", "cpu_avx2", 1, 1.0)};
  AddPeers({MakeTime("int8", 1, "p", 2.0), MakeTime("int8", 4, "p", 8.0)}, &rows);
  const std::vector<PeerMean> means = PeerMeans(rows);
  REQUIRE(means.size() == 2);
  CHECK(means[0].scheme == "int8");
  CHECK(means[0].backend == "cpu_avx2");
  CHECK(means[0].cells == 2);
  CHECK(means[0].ratio == Approx(4.0));
  CHECK(means[1].backend == "cpu_avx512");
  CHECK(means[1].cells == 1);
  CHECK(means[1].ratio == Approx(4.0));
  CHECK(PeerMeans({rows[4]}).empty());
}

TEST_CASE("a row's rate counts operations per second, its time per token in microseconds") {
  Row row = MakeRow("int8", "cpu_avx2", 4, 2.0);
  row.operations = 6e9;
  CHECK(row.gops() == Approx(3000.0));
  CHECK(row.us_per_token() == Approx(500.0));
}

}  // namespace moed::bench
