#include "server/load_log.h"

#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "server/log.h"
#include "server/size_text.h"

namespace moed {
namespace {

constexpr int kBarLength = 20;
constexpr char kWipe[] = "\r\033[K";  // back to the first column, erase to the end of the line

double Fraction(const LoadProgress& progress) {
  if (progress.total_file_bytes == 0) return 1.0;
  return static_cast<double>(progress.file_bytes) / static_cast<double>(progress.total_file_bytes);
}

// "1.5 GiB of 12.0 GiB, 34 s left"; nothing is left after the last layer.
std::string BytesAndTime(const LoadProgress& progress, double seconds) {
  std::string text = absl::StrCat(SizeText(progress.file_bytes), " of ", SizeText(progress.total_file_bytes));
  const double fraction = Fraction(progress);
  if (progress.done >= progress.total || fraction <= 0.0) return text;
  return absl::StrCat(text, ", ", std::ceil(seconds / fraction * (1.0 - fraction)), " s left");
}

}  // namespace

std::string ProgressText(const LoadProgress& progress, double seconds) {
  return absl::StrCat("layer ", progress.layer, " is loaded, ", progress.done, " of ", progress.total, ", ",
                      BytesAndTime(progress, seconds));
}

std::string ProgressBar(const LoadProgress& progress, double seconds) {
  const double fraction = Fraction(progress);
  const int filled = std::clamp(static_cast<int>(fraction * kBarLength), 0, kBarLength);
  return absl::StrFormat("[%s%s] %3.0f %%, %d of %d layers, %s", std::string(filled, '#'), std::string(kBarLength - filled, '-'),
                         std::floor(fraction * 100.0), progress.done, progress.total, BytesAndTime(progress, seconds));
}

LoadLog::LoadLog(std::string model, std::FILE* bar)
    : model_(std::move(model)), bar_(bar), start_(std::chrono::steady_clock::now()) {}

double LoadLog::Seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

void LoadLog::LayerLoaded(const LoadProgress& progress) {
  last_ = progress;
  if (bar_ == nullptr) {
    Log(spdlog::level::info, absl::StrCat("model '", model_, "': ", ProgressText(progress, Seconds())),
        {{"model", model_}, {"layer", int64_t{progress.layer}}, {"done", int64_t{progress.done}}, {"total", int64_t{progress.total}}});
    return;
  }
  std::fprintf(bar_, "%s%s %s", kWipe, model_.c_str(), ProgressBar(progress, Seconds()).c_str());
  if (progress.done == progress.total) std::fputs(kWipe, bar_);
  std::fflush(bar_);
}

void LoadLog::Finished() {
  const double seconds = Seconds();
  Log(spdlog::level::info,
      absl::StrFormat("model '%s': %d layers, %s of expert tensors, loaded in %.1f s", model_, last_.total,
                      SizeText(last_.total_file_bytes), seconds),
      {{"model", model_}, {"layers", int64_t{last_.total}}, {"seconds", seconds}});
}

std::FILE* TerminalForBar() {
  return isatty(STDOUT_FILENO) != 0 && spdlog::should_log(spdlog::level::info) ? stdout : nullptr;
}

}  // namespace moed
