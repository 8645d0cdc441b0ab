// Of a file with several certificates the right one decides: of a chain the first to end, of authorities the last.
#include <catch2/catch.hpp>
#include <string>

#include "client/certificates.h"
#include "tests/support/certificates.h"
#include "tests/support/temp_dir.h"

namespace moed::testing {

TEST_CASE("A chain is as good as its first certificate to end, authorities as their last") {
  const TempDir folder;
  const Authority authority("authority");
  const std::string path = folder.File("all.pem");
  WriteFile(path, authority.Issue("short", -3600, 100).cert + authority.Issue("long", -3600, 100'000).cert +
                      authority.Issue("middle", -3600, 5'000).cert);
  const auto chain = client::FileValidity(path, client::PemKind::kChain);
  const auto authorities = client::FileValidity(path, client::PemKind::kAuthorities);
  REQUIRE((chain.ok() && authorities.ok()));
  CHECK(chain->subject.find("short") != std::string::npos);
  CHECK(authorities->subject.find("long") != std::string::npos);
  CHECK(chain->ends - chain->begins == 3700);
  CHECK(authorities->ends - authorities->begins == 103'600);
}

TEST_CASE("Files without certificates are named") {
  const TempDir folder;
  WriteFile(folder.File("text"), "no certificate");
  CHECK(absl::IsInvalidArgument(client::FileValidity(folder.File("text"), client::PemKind::kChain).status()));
  const absl::Status none = client::FileValidity(folder.File("none"), client::PemKind::kChain).status();
  CHECK(absl::IsNotFound(none));
  CHECK(std::string(none.message()).find(folder.File("none")) != std::string::npos);
}

}  // namespace moed::testing
