// Tokens: what a file may hold, and when a changed one counts.
#include <catch2/catch.hpp>
#include <chrono>
#include <string>

#include "server/token_file.h"
#include "tests/support/temp_dir.h"

namespace moed {
namespace {

using Catch::Matchers::Contains;
using testing::TempDir;
using testing::WriteFile;

constexpr char kFirst[] = "first-token-0123456789";
constexpr char kSecond[] = "second-token-0123456789";

// A file of tokens and a clock that the test moves.
struct Bench {
  TempDir dir;
  std::string path = dir.File("tokens");
  std::chrono::steady_clock::time_point now;

  absl::StatusOr<std::unique_ptr<TokenFile>> Open(const std::string& text) {
    WriteFile(path, text);
    return TokenFile::Open(path, [this] { return now; });
  }
  std::string ErrorOf(const std::string& text) {
    const auto file = Open(text);
    return file.ok() ? "no error" : std::string(file.status().message());
  }
};

bool Knows(TokenFile& file, const std::string& token) { return file.Contains(DigestOf(token)); }

}  // namespace

TEST_CASE("A file's tokens are known, comments, blank lines and carriage returns are not tokens") {
  Bench bench;
  const auto file = bench.Open(std::string("# clients of team-a\n\n") + kFirst + "\r\n  " + kSecond + "  \n#" + kFirst + "x\n");
  REQUIRE(file.ok());
  CHECK(Knows(**file, kFirst));
  CHECK(Knows(**file, kSecond));
  for (const std::string wrong : {"", "first-token-012345678", "first-token-0123456789x", "#", "# clients of team-a", "\r"}) {
    CHECK_FALSE(Knows(**file, wrong));
  }
}

TEST_CASE("A file that breaks a rule is refused with its line and without the token") {
  Bench bench;
  CHECK_THAT(bench.ErrorOf(std::string(kFirst) + "\nshort-secret\n"),
             Contains(bench.path + " line 2") && Contains("16 to 255") && Contains("got 12 characters") && !Contains("secret"));
  CHECK_THAT(bench.ErrorOf("two words-are-no-token\n"), Contains("line 1") && !Contains("words"));
  CHECK_THAT(bench.ErrorOf("token-with-\xc3\xa4-umlaut-0123\n"), Contains("printable"));
  CHECK_THAT(bench.ErrorOf(std::string(256, 'x')), Contains("got 256 characters"));
  CHECK_THAT(bench.ErrorOf(""), Contains("wanted at least one token, got none"));
  CHECK_THAT(bench.ErrorOf("# nothing\n"), Contains("got none"));
  CHECK_THAT(bench.ErrorOf(std::string(65 << 10, '\n')), Contains("at most 65536 bytes"));
  CHECK(bench.ErrorOf(std::string(16, 'x')) == "no error");
  CHECK(bench.ErrorOf(std::string(255, 'x')) == "no error");
  const auto missing = TokenFile::Open(bench.dir.File("none"), [] { return std::chrono::steady_clock::now(); });
  CHECK(absl::IsNotFound(missing.status()));
  CHECK_THAT(std::string(missing.status().message()), Contains(bench.dir.File("none")));
  CHECK_FALSE(TokenFile::Open(bench.dir.path(), [] { return std::chrono::steady_clock::now(); }).ok());
}

TEST_CASE("A changed file counts from the next look on, which comes once a second") {
  Bench bench;
  const auto file = bench.Open(kFirst);
  REQUIRE(file.ok());
  WriteFile(bench.path, std::string(kSecond) + "\n" + kFirst + "x\n");
  bench.now += std::chrono::milliseconds(999);
  CHECK(Knows(**file, kFirst));
  CHECK_FALSE(Knows(**file, kSecond));
  bench.now += std::chrono::milliseconds(1);
  CHECK_FALSE(Knows(**file, kFirst));
  CHECK(Knows(**file, kSecond));
}

TEST_CASE("A changed file that is broken or gone leaves the tokens as they were, until it is good again") {
  Bench bench;
  const auto file = bench.Open(kFirst);
  REQUIRE(file.ok());
  const auto look = [&bench] { bench.now += std::chrono::seconds(1); };
  for (const std::string broken : {"short", "", "# all revoked\n"}) {
    WriteFile(bench.path, broken);
    look();
    CHECK(Knows(**file, kFirst));
  }
  std::remove(bench.path.c_str());
  look();
  CHECK(Knows(**file, kFirst));
  WriteFile(bench.path, kSecond);
  look();
  CHECK_FALSE(Knows(**file, kFirst));
  CHECK(Knows(**file, kSecond));
}

}  // namespace moed
