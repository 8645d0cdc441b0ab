#include "tests/fuzz/memory_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstring>
#include <string_view>

#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr int kFirstDescriptor = 1 << 24;  // the system gives out the lowest free number, far below
constexpr size_t kMaxFiles = 8;
constexpr size_t kMaxOpen = 64;

struct File {
  std::string_view name;
  std::span<const uint8_t> bytes;
};

struct Descriptor {
  const File* file = nullptr;  // null: free
  size_t position = 0;
};

struct Folder {
  bool alive = false;
  std::array<File, kMaxFiles> files;
  size_t count = 0;
  std::array<Descriptor, kMaxOpen> open;
  size_t listed = 0;  // files that readdir has told
  dirent entry;
};
Folder folder;

File* Find(std::string_view name) {
  const auto end = folder.files.begin() + folder.count;
  const auto found = std::find_if(folder.files.begin(), end, [name](const File& file) { return file.name == name; });
  return found == end ? nullptr : found;
}

// The part of `path` below the folder; false when it lies elsewhere.
bool Below(std::string_view path, std::string_view* name) {
  constexpr std::string_view root = MemoryFolder::kPath;
  if (!folder.alive || path.substr(0, root.size()) != root) return false;
  *name = path.substr(std::min(path.size(), root.size() + 1));
  return true;
}

// Null for descriptors of the system.
Descriptor* Opened(int fd) {
  if (fd < kFirstDescriptor) return nullptr;
  Descriptor* descriptor = &folder.open.at(static_cast<size_t>(fd - kFirstDescriptor));
  Require(descriptor->file != nullptr, "only open descriptors are used");
  return descriptor;
}

int NotFound() {
  errno = ENOENT;
  return -1;
}

int Open(std::string_view name) {
  const File* file = Find(name);
  if (file == nullptr) return NotFound();
  const auto is_free = [](const Descriptor& descriptor) { return descriptor.file == nullptr; };
  const auto free = std::find_if(folder.open.begin(), folder.open.end(), is_free);
  Require(free != folder.open.end(), "files are opened a constant number of times");
  *free = {file, 0};
  return kFirstDescriptor + static_cast<int>(free - folder.open.begin());
}

int Describe(const File* file, struct stat* facts) {
  if (file == nullptr) return NotFound();
  *facts = {};
  facts->st_mode = S_IFREG | 0644;
  facts->st_size = static_cast<off_t>(file->bytes.size());
  return 0;
}

ssize_t ReadAt(const File& file, void* out, size_t bytes, uint64_t from) {
  if (from >= file.bytes.size()) return 0;
  const size_t count = std::min<size_t>(bytes, file.bytes.size() - from);
  if (count > 0) std::memcpy(out, file.bytes.data() + from, count);
  return static_cast<ssize_t>(count);
}

}  // namespace

MemoryFolder::MemoryFolder() {
  Require(!folder.alive, "one folder at a time");
  folder.alive = true;
  folder.count = 0;
}

MemoryFolder::~MemoryFolder() {
  for (const Descriptor& descriptor : folder.open) Require(descriptor.file == nullptr, "every file is closed at the end");
  folder.alive = false;
}

void MemoryFolder::Add(const char* name, std::span<const uint8_t> bytes) {
  Require(folder.count < kMaxFiles && Find(name) == nullptr, "at most 8 files, each name once");
  folder.files[folder.count++] = {name, bytes};
}

void MemoryFolder::Shorten(const char* name, size_t bytes) {
  File* file = Find(name);
  Require(file != nullptr && bytes <= file->bytes.size(), "a file can only get shorter");
  file->bytes = file->bytes.first(bytes);
}

}  // namespace moed::fuzz

using namespace moed::fuzz;  // NOLINT: the functions below are this file's own, with names that the linker makes

extern "C" {

int __real_open(const char* path, int flags, ...);
ssize_t __real_read(int fd, void* out, size_t bytes);
ssize_t __real_pread(int fd, void* out, size_t bytes, off_t from);
int __real_fstat(int fd, struct stat* facts);
int __real_lstat(const char* path, struct stat* facts);
int __real_close(int fd);
DIR* __real_opendir(const char* path);
dirent* __real_readdir(DIR* dir);
int __real_closedir(DIR* dir);

int __wrap_open(const char* path, int flags, ...) {
  std::string_view name;
  if (Below(path, &name)) return Open(name);
  va_list rest;
  va_start(rest, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(rest, mode_t) : 0;
  va_end(rest);
  return __real_open(path, flags, mode);
}

ssize_t __wrap_read(int fd, void* out, size_t bytes) {
  Descriptor* descriptor = Opened(fd);
  if (descriptor == nullptr) return __real_read(fd, out, bytes);
  const ssize_t count = ReadAt(*descriptor->file, out, bytes, descriptor->position);
  descriptor->position += static_cast<size_t>(count);
  return count;
}

ssize_t __wrap_pread(int fd, void* out, size_t bytes, off_t from) {
  const Descriptor* descriptor = Opened(fd);
  if (descriptor == nullptr) return __real_pread(fd, out, bytes, from);
  Require(from >= 0, "reads begin inside of a file");
  return ReadAt(*descriptor->file, out, bytes, static_cast<uint64_t>(from));
}

int __wrap_fstat(int fd, struct stat* facts) {
  const Descriptor* descriptor = Opened(fd);
  return descriptor == nullptr ? __real_fstat(fd, facts) : Describe(descriptor->file, facts);
}

int __wrap_lstat(const char* path, struct stat* facts) {
  std::string_view name;
  return Below(path, &name) ? Describe(Find(name), facts) : __real_lstat(path, facts);
}

int __wrap_close(int fd) {
  Descriptor* descriptor = Opened(fd);
  if (descriptor == nullptr) return __real_close(fd);
  *descriptor = {};
  return 0;
}

DIR* __wrap_opendir(const char* path) {
  std::string_view name;
  if (!Below(path, &name)) return __real_opendir(path);
  folder.listed = 0;
  return reinterpret_cast<DIR*>(&folder);
}

dirent* __wrap_readdir(DIR* dir) {
  if (dir != reinterpret_cast<DIR*>(&folder)) return __real_readdir(dir);
  if (folder.listed == folder.count) return nullptr;
  const std::string_view name = folder.files[folder.listed++].name;
  Require(name.size() < sizeof(folder.entry.d_name), "names of files are short");
  folder.entry.d_name[name.copy(folder.entry.d_name, name.size())] = '\0';
  return &folder.entry;
}

int __wrap_closedir(DIR* dir) { return dir == reinterpret_cast<DIR*>(&folder) ? 0 : __real_closedir(dir); }

}  // extern "C"
