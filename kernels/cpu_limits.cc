#include "kernels/cpu_limits.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace moed {
namespace {

constexpr double kDefaultPeriod = 100000;  // microseconds, where cpu.max has only a quota

// The first bytes of a file that holds a line; empty when there is none.
std::string ReadStart(const std::string& path, size_t limit = 4096) {
  std::string text(limit, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  file.read(text.data(), static_cast<std::streamsize>(limit));
  text.resize(static_cast<size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

std::vector<std::string> Words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; words.size() < 3 && stream >> word;) words.push_back(word);
  return words;
}

// A positive whole number, else 0: also for what does not fit.
double Positive(const std::string& word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  const bool number = error == std::errc() && end == word.data() + word.size() && value > 0;
  return number ? static_cast<double>(value) : 0.0;
}

double Smaller(double quota, double other) {
  if (quota <= 0 || other <= 0) return std::max({quota, other, 0.0});
  return std::min(quota, other);
}

double Ratio(double quota, double period) { return period > 0 ? quota / period : 0.0; }

// Of one cgroup's folder, version 2: "QUOTA PERIOD" or "max PERIOD".
double QuotaOfVersion2(const std::string& folder) {
  const std::vector<std::string> words = Words(ReadStart(folder + "/cpu.max"));
  if (words.empty() || words.size() > 2) return 0.0;
  return Ratio(Positive(words[0]), words.size() == 2 ? Positive(words[1]) : kDefaultPeriod);
}

// Version 1: a quota of -1 is none.
double QuotaOfVersion1(const std::string& folder) {
  const std::vector<std::string> quota = Words(ReadStart(folder + "/cpu.cfs_quota_us"));
  const std::vector<std::string> period = Words(ReadStart(folder + "/cpu.cfs_period_us"));
  if (quota.size() != 1 || period.size() != 1) return 0.0;
  return Ratio(Positive(quota[0]), Positive(period[0]));
}

// The smallest of `top`, `top`/a, `top`/a/b, ... for the path "/a/b". A path that leaves `top` ends there.
double SmallestOnPath(const std::string& top, const std::string& path, double (*quota_of)(const std::string&)) {
  std::string folder = top;
  double quota = quota_of(folder);
  std::istringstream parts(path);
  for (std::string part; std::getline(parts, part, '/');) {
    if (part.empty() || part == ".") continue;
    if (part == "..") break;
    folder += "/" + part;
    quota = Smaller(quota, quota_of(folder));
  }
  return quota;
}

bool NamesCpu(const std::string& controllers) { return ("," + controllers + ",").find(",cpu,") != std::string::npos; }

}  // namespace

std::vector<int> UsableProcessors() {
  std::vector<int> processors;
  // A mask that is too short for the kernel's processor count is refused by it, so that it grows.
  for (int size = 1024; size <= 1 << 20 && processors.empty(); size *= 4) {
    cpu_set_t* set = CPU_ALLOC(size);
    if (set == nullptr) break;
    const size_t bytes = CPU_ALLOC_SIZE(size);
    if (sched_getaffinity(0, bytes, set) == 0) {
      for (int processor = 0; processor < size; ++processor) {
        if (CPU_ISSET_S(processor, bytes, set)) processors.push_back(processor);
      }
    }
    CPU_FREE(set);
  }
  const long online = processors.empty() ? std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L) : 0;
  for (int processor = 0; processor < online; ++processor) processors.push_back(processor);
  return processors;
}

double CgroupQuota(const std::string& root, const std::string& membership) {
  double quota = 0.0;
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // NUMBER:CONTROLLERS:PATH; version 2 is "0::PATH"
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1), path = line.substr(second + 1);
    if (controllers.empty()) {
      for (const std::string& top : {root, root + "/unified"}) quota = Smaller(quota, SmallestOnPath(top, path, QuotaOfVersion2));
    } else if (NamesCpu(controllers)) {
      for (const std::string& name : {controllers, std::string("cpu")}) {
        quota = Smaller(quota, SmallestOnPath(root + "/" + name, path, QuotaOfVersion1));
      }
    }
  }
  return quota;
}

double CgroupQuota() { return CgroupQuota("/sys/fs/cgroup", ReadStart("/proc/self/cgroup", 65536)); }

std::string QuotaText(double quota) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.3f", quota);
  std::string text = buffer;
  while (text.size() > 3 && text.back() == '0' && text[text.size() - 2] != '.') text.pop_back();
  return text;
}

ThreadCount ThreadsFor(int processors, double quota) {
  processors = std::max(processors, 1);
  if (quota <= 0 || quota >= processors) return {processors, "affinity"};
  return {std::max(static_cast<int>(quota), 1), "cgroup quota " + QuotaText(quota)};
}

}  // namespace moed
