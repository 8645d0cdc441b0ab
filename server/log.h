// The log of a server: lines on stdout for people, or one JSON object a line for programs.
//
// Everything that is logged through spdlog goes this way. Log adds fields: programs get them as keys, people have what matters of
// them in the message. Warnings and errors of one kind that come in masses are counted instead of written (log_limiter.h).
// Threads: any.
#ifndef MOED_SERVER_LOG_H_
#define MOED_SERVER_LOG_H_

#include <spdlog/sinks/sink.h>
#include <spdlog/spdlog.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "server/log_limiter.h"

namespace moed {

enum class LogFormat { kText, kJson };

// A key and its value. Keys are literals: model, layer, request_id, code, and names of durations with their unit.
struct LogField {
  const char* key;
  std::variant<int64_t, double, std::string> value;
};

class LogSink final : public spdlog::sinks::sink {
 public:
  using Clock = std::function<std::chrono::steady_clock::time_point()>;

  // Writes to `file`, which must outlive the sink; in text form with colours where it is a terminal.
  LogSink(LogFormat format, std::FILE* file, const LogLimiter::Limits& limits, Clock clock);

  void Write(const spdlog::details::log_msg& message, const std::vector<LogField>& fields);
  // Says how many lines were held back in intervals that are over, or in all.
  void Summarise(bool all = false);

  void log(const spdlog::details::log_msg& message) override { Write(message, {}); }
  void flush() override;
  // Both formats are fixed.
  void set_pattern(const std::string&) override {}
  void set_formatter(std::unique_ptr<spdlog::formatter>) override {}

 private:
  void WriteLine(const spdlog::details::log_msg& message, const std::vector<LogField>& fields);
  void WriteHeldBack(bool all);

  const LogFormat format_;
  std::FILE* const file_;
  const Clock clock_;
  std::mutex mutex_;
  LogLimiter limiter_;                      // guarded by mutex_
  std::unique_ptr<spdlog::sinks::sink> text_;  // guarded by mutex_
};

// The JSON object of a message, without a line's end: time (RFC 3339, UTC, milliseconds), level, message, then the fields. Bytes
// that are no UTF-8 are replaced.
std::string JsonLine(std::chrono::system_clock::time_point time, spdlog::level::level_enum level, std::string_view message,
                     const std::vector<LogField>& fields);

// `message` as one line or several of which all but the first are indented, with '?' for other control characters: no text of a
// client can look like a line of its own.
std::string PrintableText(std::string_view message);

// Makes a sink on stdout what spdlog's default logger writes to, at `level` and above.
std::shared_ptr<LogSink> SetUpLog(LogFormat format, const std::string& level);

// Logs `message` with fields, where the default logger writes to a LogSink; else without them.
void Log(spdlog::level::level_enum level, const std::string& message, const std::vector<LogField>& fields);

}  // namespace moed

#endif  // MOED_SERVER_LOG_H_
