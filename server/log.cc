#include "server/log.h"

#include <spdlog/details/log_msg.h>
#include <spdlog/sinks/ansicolor_sink.h>

#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"

namespace moed {
namespace {

std::string_view ViewOf(const spdlog::string_view_t& text) { return {text.data(), text.size()}; }

std::string Rfc3339(std::chrono::system_clock::time_point time) {
  const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(time.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(since / 1000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &utc);
  return absl::StrFormat("%s.%03dZ", text, since % 1000);
}

// A sink of spdlog's own, with a lock that does nothing: the caller has one.
std::unique_ptr<spdlog::sinks::sink> TextSink(std::FILE* file) {
  return std::make_unique<spdlog::sinks::ansicolor_sink<spdlog::details::console_nullmutex>>(file, spdlog::color_mode::automatic);
}

}  // namespace

std::string JsonLine(std::chrono::system_clock::time_point time, spdlog::level::level_enum level, std::string_view message,
                     const std::vector<LogField>& fields) {
  nlohmann::ordered_json line = {{"time", Rfc3339(time)},
                                 {"level", std::string(ViewOf(spdlog::level::to_string_view(level)))},
                                 {"message", std::string(message)}};
  for (const LogField& field : fields) {
    std::visit([&](const auto& value) { line[field.key] = value; }, field.value);
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string PrintableText(std::string_view message) {
  std::string out;
  out.reserve(message.size());
  for (const char c : message) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\n  ";
    } else {
      out += (byte < 32 && c != '\t') || byte == 127 ? '?' : c;
    }
  }
  return out;
}

LogSink::LogSink(LogFormat format, std::FILE* file, const LogLimiter::Limits& limits, Clock clock)
    : format_(format), file_(file), clock_(std::move(clock)), limiter_(limits), text_(TextSink(file)) {}

void LogSink::Write(const spdlog::details::log_msg& message, const std::vector<LogField>& fields) {
  std::lock_guard<std::mutex> lock(mutex_);
  WriteHeldBack(false);
  if (message.level >= spdlog::level::warn && !limiter_.Admit(ViewOf(message.payload), message.level, clock_())) return;
  WriteLine(message, fields);
}

void LogSink::Summarise(bool all) {
  std::lock_guard<std::mutex> lock(mutex_);
  WriteHeldBack(all);
}

void LogSink::WriteHeldBack(bool all) {
  for (const LogLimiter::HeldBack& held : limiter_.TakeHeldBack(clock_(), all)) {
    const std::string text = absl::StrCat(held.count, " more lines like this were held back: ", held.kind);
    WriteLine({"", static_cast<spdlog::level::level_enum>(held.level), text}, {{"held_back", int64_t{held.count}}});
  }
}

void LogSink::WriteLine(const spdlog::details::log_msg& message, const std::vector<LogField>& fields) {
  if (format_ == LogFormat::kJson) {
    const std::string line = JsonLine(message.time, message.level, ViewOf(message.payload), fields) + '\n';
    std::fwrite(line.data(), 1, line.size(), file_);
    return;
  }
  const std::string text = PrintableText(ViewOf(message.payload));
  spdlog::details::log_msg printable = message;
  printable.payload = text;
  text_->log(printable);
}

void LogSink::flush() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::fflush(file_);
}

std::shared_ptr<LogSink> SetUpLog(LogFormat format, const std::string& level) {
  auto sink = std::make_shared<LogSink>(format, stdout, LogLimiter::Limits{}, [] { return std::chrono::steady_clock::now(); });
  auto logger = std::make_shared<spdlog::logger>("", sink);
  logger->set_level(spdlog::level::from_str(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
  return sink;
}

void Log(spdlog::level::level_enum level, const std::string& message, const std::vector<LogField>& fields) {
  spdlog::logger* const logger = spdlog::default_logger_raw();
  if (!logger->should_log(level)) return;
  LogSink* const sink = logger->sinks().empty() ? nullptr : dynamic_cast<LogSink*>(logger->sinks().front().get());
  if (sink == nullptr) return logger->log(level, message);
  sink->Write({"", level, message}, fields);
  if (level >= logger->flush_level()) sink->flush();
}

}  // namespace moed
