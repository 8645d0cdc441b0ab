// A scratch directory of its own, removed with everything in it at the end of the scope.
#ifndef MOED_TESTS_SUPPORT_TEMP_DIR_H_
#define MOED_TESTS_SUPPORT_TEMP_DIR_H_

#include <string>

namespace moed::testing {

class TempDir {
 public:
  // kForSockets: below /tmp, since the path of a socket has at most 107 bytes.
  enum class Use { kFiles, kForSockets };

  // Below TEST_TMPDIR when Bazel sets it, else below the system's directory for temporary files. Ends the program when no
  // directory can be made: no test can go on without it.
  explicit TempDir(Use use = Use::kFiles);
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  // path()/name.
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  // Makes the directory path()/name and gives its path.
  std::string MakeDir(const std::string& name) const;

 private:
  std::string path_;
};

// Writes (or replaces) a file with exactly these bytes.
void WriteFile(const std::string& path, const std::string& bytes);
// All bytes of a file.
std::string ReadFile(const std::string& path);

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_TEMP_DIR_H_
