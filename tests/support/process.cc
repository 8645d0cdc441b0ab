#include "tests/support/process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

namespace moed::testing {
namespace {

// The whole of an output file, read from its start whatever its current position.
std::string ReadAll(int fd) {
  std::string text;
  char buffer[65536];
  for (;;) {
    const ssize_t got = pread(fd, buffer, sizeof(buffer), static_cast<off_t>(text.size()));
    if (got <= 0) return text;
    text.append(buffer, static_cast<size_t>(got));
  }
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// `added` replaces variables of the same name.
std::vector<std::string> Environment(const std::vector<std::string>& added) {
  std::vector<std::string> all = added;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    const std::string prefix = text.substr(0, text.find('=') + 1);
    bool replaced = false;
    for (const std::string& each : added) replaced = replaced || each.rfind(prefix, 0) == 0;
    if (!replaced) all.push_back(text);
  }
  return all;
}

// Only calls that are allowed between fork and exec in a process with threads.
[[noreturn]] void Become(char** arguments, char** environment, int out, int err, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(127);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  const int null = open("/dev/null", O_RDONLY);
  if (null >= 0) dup2(null, STDIN_FILENO);
  execvpe(arguments[0], arguments, environment);
  const char* reason = strerror(errno);
  if (write(STDERR_FILENO, reason, strlen(reason)) < 0) _exit(126);
  _exit(127);
}

}  // namespace

std::unique_ptr<Process> Process::Start(const std::vector<std::string>& arguments,
                                        const std::vector<std::string>& environment) {
  const int out = memfd_create("stdout", MFD_CLOEXEC);
  const int err = memfd_create("stderr", MFD_CLOEXEC);
  if (out < 0 || err < 0 || arguments.empty()) return nullptr;
  std::vector<std::string> argument_texts = arguments;
  std::vector<std::string> environment_texts = Environment(environment);
  const std::vector<char*> argument_pointers = Pointers(argument_texts);
  const std::vector<char*> environment_pointers = Pointers(environment_texts);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return nullptr;
  if (pid == 0) {
    Become(const_cast<char**>(argument_pointers.data()), const_cast<char**>(environment_pointers.data()), out, err, parent);
  }
  return std::unique_ptr<Process>(new Process(pid, out, err));
}

Process::~Process() {
  if (!exit_code_.has_value()) {
    kill(pid_, SIGKILL);
    int status = 0;
    waitpid(pid_, &status, 0);
  }
  close(out_);
  close(err_);
}

void Process::Signal(int signal) {
  if (!exit_code_.has_value()) kill(pid_, signal);
}

std::optional<int> Process::Wait(std::chrono::milliseconds limit) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!exit_code_.has_value()) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    } else if (std::chrono::steady_clock::now() >= end) {
      return std::nullopt;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }
  return exit_code_;
}

std::string Process::Stdout() const { return ReadAll(out_); }
std::string Process::Stderr() const { return ReadAll(err_); }

Finished RunToEnd(const std::vector<std::string>& arguments, const std::vector<std::string>& environment,
                  std::chrono::milliseconds limit) {
  Finished finished;
  const std::unique_ptr<Process> process = Process::Start(arguments, environment);
  if (process == nullptr) return finished;
  const std::optional<int> code = process->Wait(limit);
  if (code.has_value()) finished.exit_code = *code;
  finished.out = process->Stdout();
  finished.err = process->Stderr();
  if (!code.has_value()) finished.err += "\nkilled: still running at the limit";
  return finished;
}

}  // namespace moed::testing
