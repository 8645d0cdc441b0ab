// What the operating system says of this process.
#ifndef MOED_SERVER_PROCESS_STATS_H_
#define MOED_SERVER_PROCESS_STATS_H_

#include <cstdint>
#include <string>

namespace moed {

struct ProcessStats {
  uint64_t resident_bytes = 0, virtual_bytes = 0;
  uint64_t open_files = 0, max_files = 0;  // max_files: beyond which none can be opened; 0: unknown
  uint64_t threads = 0;
  double cpu_seconds = 0;    // user and system, of all threads
  double start_seconds = 0;  // when it started, since the epoch
};

// Of the process now. What cannot be read is 0. About 50 microseconds, and more with thousands of open files.
ProcessStats ReadProcessStats();

// The part of it that is in /proc/PID/stat: `stat` its text, `ticks` a second's clock ticks, `page` bytes of a page, `boot` when
// the machine started, in seconds since the epoch. A text that is none leaves zeros.
ProcessStats ParseProcessStat(const std::string& stat, double ticks, uint64_t page, double boot);

}  // namespace moed

#endif  // MOED_SERVER_PROCESS_STATS_H_
