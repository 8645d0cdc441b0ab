#include "tests/support/temp_dir.h"

#include <stdlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace moed::testing {
namespace {

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "test set-up: %s\n", what.c_str());
  std::abort();
}

}  // namespace

TempDir::TempDir(Use use) {
  const char* base = use == Use::kForSockets ? "/tmp" : std::getenv("TEST_TMPDIR");
  std::error_code error;
  std::string pattern = base != nullptr ? std::string(base) : std::filesystem::temp_directory_path(error).string();
  pattern += "/moed_test_XXXXXX";
  if (::mkdtemp(pattern.data()) == nullptr) Die("cannot make the directory " + pattern);
  path_ = pattern;
}

TempDir::~TempDir() {
  std::error_code ignored;  // a leftover in a scratch directory is no failure
  std::filesystem::remove_all(path_, ignored);
}

std::string TempDir::MakeDir(const std::string& name) const {
  std::error_code error;
  std::filesystem::create_directories(File(name), error);
  if (error) Die("cannot make the directory " + File(name));
  return File(name);
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) Die("cannot write " + path);
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) Die("cannot read " + path);
  return std::string(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
}

}  // namespace moed::testing
