// A folder of files that exist in memory only, so that millions of inputs a minute reach code that opens files.
//
// The linker turns calls of open, read, pread, fstat, lstat, close, opendir, readdir and closedir in the program's own
// objects into calls of the functions of memory_folder.cc (--wrap, see fuzz.bzl): below kPath they serve the one living
// MemoryFolder, everything else goes on to the system. Product code runs unchanged. One thread.
#ifndef MOED_TESTS_FUZZ_MEMORY_FOLDER_H_
#define MOED_TESTS_FUZZ_MEMORY_FOLDER_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace moed::fuzz {

class MemoryFolder {
 public:
  static constexpr char kPath[] = "/moed-memory-folder";

  // At most one lives at a time.
  MemoryFolder();
  // Ends the process when a file is still open: a descriptor leaked.
  ~MemoryFolder();
  MemoryFolder(const MemoryFolder&) = delete;
  MemoryFolder& operator=(const MemoryFolder&) = delete;

  // Adds a file, at most 8 of them; `bytes` must outlive the folder.
  void Add(const char* name, std::span<const uint8_t> bytes);
  // The file ends after `bytes` bytes from now on, also for descriptors that are open.
  void Shorten(const char* name, size_t bytes);
  static std::string Path(const char* name) { return std::string(kPath) + "/" + name; }
};

}  // namespace moed::fuzz

#endif  // MOED_TESTS_FUZZ_MEMORY_FOLDER_H_
