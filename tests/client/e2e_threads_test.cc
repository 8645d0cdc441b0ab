// The compute threads of a real server: how many, where they run, and what status and log say about them.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "kernels/cpu_limits.h"
#include "tests/client/running_server.h"
#include "tests/support/checkpoint_builder.h"
#include "tests/support/skip.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {
namespace {

using Json = nlohmann::json;

struct OnDisk {
  OnDisk() {
    CheckpointBuilder builder;
    AddModel({.family = ModelFamily::kQwen3Moe, .hidden = 256, .intermediate = 128}, &builder);
    REQUIRE(builder.Write(dir.path()).ok());
  }
  TempDir dir;
};

// "Cpus_allowed_list" of each thread of a process, by the thread's name.
std::multimap<std::string, std::string> AllowedProcessors(pid_t pid) {
  std::multimap<std::string, std::string> allowed;
  for (const auto& task : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
    std::string name, line;
    std::getline(std::ifstream(task.path() / "comm"), name);
    std::ifstream status(task.path() / "status");
    while (std::getline(status, line)) {
      if (line.rfind("Cpus_allowed_list:\t", 0) == 0) allowed.emplace(name, line.substr(line.find('\t') + 1));
    }
  }
  return allowed;
}

// A cgroup of version 1 with a CPU quota; removed at the end. `made` is false where this user may not make one.
class QuotaGroup {
 public:
  QuotaGroup(int quota_us, int period_us) : folder_("/sys/fs/cgroup/cpu/moed-test-" + std::to_string(getpid())) {
    std::error_code error;
    if (!std::filesystem::create_directory(folder_, error)) return;
    made = Write("cpu.cfs_period_us", period_us) && Write("cpu.cfs_quota_us", quota_us);
  }
  ~QuotaGroup() {
    // Empty once the kernel has put the last process away.
    std::error_code error;
    WaitFor([&] { return !std::filesystem::exists(folder_, error) || rmdir(folder_.c_str()) == 0; });
  }

  // Runs a program in the group, with the process id of the shell.
  std::vector<std::string> Launcher() const {
    return {"/bin/sh", "-c", "echo $$ > " + folder_ + "/cgroup.procs && exec \"$@\"", "sh"};
  }

  bool made = false;

 private:
  bool Write(const std::string& name, int value) const {
    std::ofstream file(folder_ + "/" + name);
    file << value << std::flush;
    return file.good();
  }
  const std::string folder_;
};

Json HostOf(const RunningServer& server) { return server.MoectlJson({"status"})["host"]; }

}  // namespace

TEST_CASE("B69: status tells the threads and what limits them, and a number that was asked for wins") {
  const OnDisk disk;
  const std::vector<int> processors = UsableProcessors();
  const ThreadCount fitting = ThreadsFor(static_cast<int>(processors.size()), CgroupQuota());
  {
    const RunningServer server({disk.dir.path()});
    const Json host = HostOf(server);
    CHECK(host["threads"] == fitting.threads);
    CHECK(host["threads_limit"] == fitting.limit);
    CHECK(host["processors"] == processors.size());
    CHECK(host["pinned"] == false);
    CHECK(host["numa_nodes"].is_array());
    CHECK(server.Moectl({"status"}).out.find(std::to_string(fitting.threads) + " threads, limited by " + fitting.limit) !=
          std::string::npos);
  }
  const int many = static_cast<int>(processors.size()) + 2;
  RunningServer server({disk.dir.path()}, {"--threads", std::to_string(many), "--gpu", "none", "--lanes", "3"});
  CHECK(HostOf(server)["threads"] == many);
  CHECK(HostOf(server)["gpu"].is_null());  // whatever the machine has
  CHECK(HostOf(server)["gpu_free_bytes"] == 0);
  CHECK(AllowedProcessors(server.process().pid()).count("compute") == 1);  // lanes are for layers on the GPU
  CHECK(HostOf(server)["threads_limit"] == "operator's choice");
  CHECK(server.process().Stdout().find(std::to_string(many) + " threads are more than the " +
                                       std::to_string(processors.size()) + " usable processors") != std::string::npos);
  CHECK(AllowedProcessors(server.process().pid()).count("worker-" + std::to_string(many - 1)) == 1);
}

TEST_CASE("Pinned compute threads have a processor each, and no other thread of the server is bound") {
  const OnDisk disk;
  const std::vector<int> processors = UsableProcessors();
  if (processors.size() < 2) return Skip("needs two processors to tell pinned threads from others");
  RunningServer server({disk.dir.path()}, {"--pin-threads", "--threads", std::to_string(processors.size())});
  CHECK(HostOf(server)["pinned"] == true);
  REQUIRE(server.Moectl({"bench", "--layer", "0", "--tokens", "4", "--concurrency", "16", "--seconds", "1"}).exit_code == 0);
  const std::multimap<std::string, std::string> allowed = AllowedProcessors(server.process().pid());
  for (size_t worker = 0; worker < processors.size(); ++worker) {
    const std::string name = worker == 0 ? "compute" : "worker-" + std::to_string(worker);
    INFO(name);
    REQUIRE(allowed.count(name) == 1);
    CHECK(allowed.find(name)->second == std::to_string(processors[worker]));
  }
  for (const auto& [name, list] : allowed) {
    if (name == "compute" || name.rfind("worker-", 0) == 0) continue;
    INFO(name << " may run on " << list);
    CHECK(list.find_first_of(",-") != std::string::npos);
  }
}

TEST_CASE("Pinning more threads than there are processors is refused before anything is loaded") {
  const OnDisk disk;
  const std::string many = std::to_string(UsableProcessors().size() + 1);
  for (const char* command : {"serve", "check"}) {
    const Finished finished =
        RunToEnd({kMoed, command, "--model", disk.dir.path(), "--listen", "127.0.0.1:0", "--pin-threads", "--threads", many});
    INFO(finished.err);
    CHECK(finished.exit_code == 2);
    CHECK(finished.FirstError().rfind("error: --pin-threads: wanted at most", 0) == 0);
    CHECK(finished.FirstError().find("got --threads " + many) != std::string::npos);
  }
}

TEST_CASE("B69: a server in a cgroup with the time of one processor runs one thread, and warns about more") {
  const OnDisk disk;
  if (UsableProcessors().size() < 2) return Skip("needs two processors to tell a quota from the affinity mask");
  if (CgroupQuota() > 0) return Skip("a quota of this process's own would be the smaller one");
  const QuotaGroup group(100000, 100000);
  if (!group.made) return Skip("needs to make a cgroup of version 1 with a CPU quota");
  {
    RunningServer server({disk.dir.path()}, {}, group.Launcher());
    const Json host = HostOf(server);
    CHECK(host["threads"] == 1);
    CHECK(host["threads_limit"] == "cgroup quota 1.0");
    CHECK(host["cpu_quota"] == 1.0);
  }
  RunningServer server({disk.dir.path()}, {"--threads", "2"}, group.Launcher());
  CHECK(HostOf(server)["threads"] == 2);
  CHECK(server.process().Stdout().find("2 threads are more than the 1.0 processors of the cgroup's quota") !=
        std::string::npos);
  CHECK(server.MoectlJson({"smoke"})["passed"] == true);
}

}  // namespace moed::testing
