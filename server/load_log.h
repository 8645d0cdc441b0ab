// What a load shows of itself: a line of the log for each layer, or on a terminal a bar that is drawn over itself.
//
// Used by the one thread that loads. The bar goes to stdout, as the log does, and is wiped before a line of the log is due.
#ifndef MOED_SERVER_LOAD_LOG_H_
#define MOED_SERVER_LOAD_LOG_H_

#include <chrono>
#include <cstdio>
#include <string>

#include "engine/engine.h"

namespace moed {

// "layer 5 is loaded, 6 of 48, 1.5 of 12.0 GiB, 34 s left"; `seconds` have passed since the load began. Layers are taken to
// cost by their bytes.
std::string ProgressText(const LoadProgress& progress, double seconds);
// "[######--------------]  30 %, 6 of 48 layers, 1.5 of 12.0 GiB, 34 s left", the bar itself 20 characters long.
std::string ProgressBar(const LoadProgress& progress, double seconds);

class LoadLog {
 public:
  // `bar`: a terminal that takes the bar, or null: each layer is a line of the log.
  LoadLog(std::string model, std::FILE* bar);

  void LayerLoaded(const LoadProgress& progress);
  // The closing line, with bytes and seconds; call after the last layer.
  void Finished();

 private:
  double Seconds() const;

  const std::string model_;
  std::FILE* const bar_;
  const std::chrono::steady_clock::time_point start_;
  LoadProgress last_;
};

// stdout when it is a terminal and lines of level info are shown there, else null.
std::FILE* TerminalForBar();

}  // namespace moed

#endif  // MOED_SERVER_LOAD_LOG_H_
