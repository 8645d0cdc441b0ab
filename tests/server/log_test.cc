// Lines of the log in both formats, and what is held back of many like ones: with a clock that moves when told.
#include "server/log.h"

#include <catch2/catch.hpp>

#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace moed {
namespace {

using Json = nlohmann::json;
using Lines = std::vector<std::string>;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A log that writes to a file.
struct Bench {
  explicit Bench(LogFormat format, LogLimiter::Limits limits = {})
      : file(std::tmpfile()), sink(std::make_shared<LogSink>(format, file, limits, [this] { return now; })) {}
  ~Bench() { std::fclose(file); }

  void Say(spdlog::level::level_enum level, const std::string& text, const std::vector<LogField>& fields = {}) {
    sink->Write({"", level, text}, fields);
  }
  Lines Written() {
    sink->flush();
    std::rewind(file);
    std::string text(1 << 16, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), file));
    std::istringstream stream(text);
    Lines lines;
    for (std::string line; std::getline(stream, line);) lines.push_back(line);
    return lines;
  }

  std::chrono::steady_clock::time_point now{std::chrono::hours(1)};
  std::FILE* file;
  std::shared_ptr<LogSink> sink;
};

}  // namespace

TEST_CASE("A JSON line has time, level and message, and then the fields with their types") {
  const auto time = std::chrono::system_clock::time_point(seconds(1'700'000'000) + milliseconds(7));
  CHECK(JsonLine(time, spdlog::level::warn, "a \"b\"\nc", {{"model", "m"}, {"layer", int64_t{3}}, {"seconds", 0.5}}) ==
        R"({"time":"2023-11-14T22:13:20.007Z","level":"warning","message":"a \"b\"\nc","model":"m","layer":3,"seconds":0.5})");
}

TEST_CASE("Bytes that are no UTF-8 do not break a JSON line") {
  const Json line = Json::parse(JsonLine({}, spdlog::level::info, "x\xff\xfey", {{"request_id", "\xc3"}}), nullptr, false);
  REQUIRE(line.is_object());
  CHECK(line["message"].get<std::string>().front() == 'x');
  CHECK(line["time"] == "1970-01-01T00:00:00.000Z");
}

TEST_CASE("Every message is one line of JSON, whatever is in it") {
  Bench bench(LogFormat::kJson);
  bench.Say(spdlog::level::info, "one\ntwo\r{\"level\":\"error\"}", {{"code", "OK"}});
  bench.Say(spdlog::level::debug, "");
  const Lines lines = bench.Written();
  REQUIRE(lines.size() == 2);
  CHECK(Json::parse(lines[0])["message"] == "one\ntwo\r{\"level\":\"error\"}");
  CHECK(Json::parse(lines[0])["code"] == "OK");
  CHECK(Json::parse(lines[1])["level"] == "debug");
}

TEST_CASE("A line of text has time, level and message without the fields, and no client can forge another") {
  Bench bench(LogFormat::kText);
  bench.Say(spdlog::level::info, "hello\n[2026-01-01] [error] forged\x1b[31m", {{"model", "m"}});
  const Lines lines = bench.Written();
  REQUIRE(lines.size() == 2);
  CHECK_THAT(lines[0], Catch::Matchers::StartsWith("[20") && Catch::Matchers::EndsWith("[info] hello"));
  CHECK(lines[1] == "  [2026-01-01] [error] forged?[31m");
}

TEST_CASE("Of like warnings the first of an interval are written, then their number, and the next interval begins anew") {
  Bench bench(LogFormat::kJson, {.first = 3, .interval = seconds(10)});
  for (int i = 0; i < 50; ++i) bench.Say(spdlog::level::warn, "session " + std::to_string(i) + " ends");
  CHECK(bench.Written().size() == 3);
  bench.now += seconds(9);
  bench.sink->Summarise();
  CHECK(bench.Written().size() == 3);
  bench.now += seconds(1);
  bench.sink->Summarise();
  Lines lines = bench.Written();
  REQUIRE(lines.size() == 4);
  CHECK(Json::parse(lines[3])["message"] == "47 more lines like this were held back: session ");
  CHECK(Json::parse(lines[3])["held_back"] == 47);
  CHECK(Json::parse(lines[3])["level"] == "warning");
  bench.Say(spdlog::level::warn, "session 50 ends");
  lines = bench.Written();
  REQUIRE(lines.size() == 5);
  CHECK(Json::parse(lines[4])["message"] == "session 50 ends");
}

TEST_CASE("The next line of any kind tells what an interval held back, and so does the end of the process") {
  Bench bench(LogFormat::kJson, {.first = 1, .interval = seconds(10)});
  for (int i = 0; i < 3; ++i) bench.Say(spdlog::level::err, "broken: " + std::to_string(i));
  bench.now += seconds(11);
  bench.Say(spdlog::level::info, "other");
  Lines lines = bench.Written();
  REQUIRE(lines.size() == 3);
  CHECK(Json::parse(lines[1])["held_back"] == 2);
  CHECK(Json::parse(lines[1])["level"] == "error");
  CHECK(Json::parse(lines[2])["message"] == "other");
  for (int i = 0; i < 3; ++i) bench.Say(spdlog::level::err, "broken: " + std::to_string(i));
  bench.sink->Summarise(true);
  lines = bench.Written();
  REQUIRE(lines.size() == 5);
  CHECK(Json::parse(lines[4])["held_back"] == 2);
}

TEST_CASE("Kinds do not take each other's lines, and info and debug are never held back") {
  Bench bench(LogFormat::kJson, {.first = 1, .interval = seconds(10)});
  bench.Say(spdlog::level::warn, "a 1");
  bench.Say(spdlog::level::warn, "b 1");
  bench.Say(spdlog::level::warn, "a 2");
  for (int i = 0; i < 20; ++i) bench.Say(spdlog::level::info, "busy");
  CHECK(bench.Written().size() == 22);
}

TEST_CASE("Kinds beyond what is told apart are one, so that no client makes the log remember without end") {
  LogLimiter limiter({.first = 2, .interval = seconds(10), .kinds = 3});
  const LogLimiter::TimePoint now{std::chrono::hours(1)};
  int lines = 0;
  for (int i = 0; i < 100; ++i) lines += limiter.Admit(std::string(1 + static_cast<size_t>(i), 'x'), spdlog::level::warn, now);
  CHECK(lines == 3 + 2);  // one of each kind, and two of all others; names of more than 80 bytes are cut
  const auto held = limiter.TakeHeldBack(now + seconds(10));
  REQUIRE(held.size() == 1);
  CHECK(held[0].count == 95);
  CHECK(limiter.TakeHeldBack(now + seconds(10), true).empty());
}

TEST_CASE("Log goes to the sink of the default logger with its fields, and respects its level") {
  Bench bench(LogFormat::kJson);
  const auto before = spdlog::default_logger();
  auto logger = std::make_shared<spdlog::logger>("", bench.sink);
  logger->set_level(spdlog::level::info);
  spdlog::set_default_logger(logger);
  Log(spdlog::level::info, "with", {{"model", "m"}});
  Log(spdlog::level::debug, "without", {});
  spdlog::warn("plain {}", 1);
  spdlog::set_default_logger(before);
  const Lines lines = bench.Written();
  REQUIRE(lines.size() == 2);
  CHECK(Json::parse(lines[0])["model"] == "m");
  CHECK(Json::parse(lines[1])["message"] == "plain 1");
}

}  // namespace moed
