#include "server/process_stats.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <vector>

namespace moed {
namespace {

std::string ReadAll(const char* path) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

// Seconds since the epoch; 0 where it is not told.
double BootTime() {
  std::ifstream file("/proc/stat");
  for (std::string key; file >> key;) {
    double value = 0;
    if (key == "btime" && file >> value) return value;
    std::getline(file, key);
  }
  return 0;
}

uint64_t CountOpenFiles() {
  std::error_code error;
  uint64_t count = 0;
  for (auto it = std::filesystem::directory_iterator("/proc/self/fd", error); !error && it != std::filesystem::directory_iterator();
       it.increment(error)) {
    ++count;
  }
  return count > 0 ? count - 1 : 0;  // less the one that looks
}

}  // namespace

ProcessStats ParseProcessStat(const std::string& stat, double ticks, uint64_t page, double boot) {
  ProcessStats stats;
  const size_t end_of_name = stat.rfind(')');  // the name may have spaces and parentheses of its own
  if (end_of_name == std::string::npos) return stats;
  std::istringstream text(stat.substr(end_of_name + 1));
  std::vector<std::string> fields(std::istream_iterator<std::string>(text), {});
  // Field 3 of proc(5), the state, is fields[0].
  const auto number = [&](int field) { return std::stod(fields[static_cast<size_t>(field - 3)]); };
  if (fields.size() < 22) return stats;
  try {
    stats.cpu_seconds = (number(14) + number(15)) / ticks;
    stats.threads = static_cast<uint64_t>(number(20));
    stats.start_seconds = boot + number(22) / ticks;
    stats.virtual_bytes = static_cast<uint64_t>(number(23));
    stats.resident_bytes = static_cast<uint64_t>(number(24)) * page;
  } catch (const std::exception&) {
    return {};
  }
  return stats;
}

ProcessStats ReadProcessStats() {
  ProcessStats stats = ParseProcessStat(ReadAll("/proc/self/stat"), static_cast<double>(sysconf(_SC_CLK_TCK)),
                                        static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), BootTime());
  stats.open_files = CountOpenFiles();
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) stats.max_files = limit.rlim_cur;
  return stats;
}

}  // namespace moed
