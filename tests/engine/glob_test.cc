// Globs against what a shell's file name matching says.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "engine/glob.h"

namespace moed {
namespace {

TEST_CASE("Globs match whole names, and a dot is a character like any other") {
  struct Row {
    const char* glob;
    const char* name;
    bool matches;
  };
  for (const Row& row : std::vector<Row>{{"", "", true},
                                         {"", "a", false},
                                         {"a", "a", true},
                                         {"a", "ab", false},
                                         {"*", "", true},
                                         {"*", "a.b", true},
                                         {"a*", "a", true},
                                         {"*a", "bab", false},
                                         {"*ab*b", "xababxb", true},
                                         {"a?c", "a.c", true},
                                         {"a?", "a", false},
                                         {"layers.1*", "layers.10", true},
                                         {"layers.*.self_attn", "layers.12.self_attn", true},
                                         {"layers.*.self_attn", "layers.12.self_attn.q", false},
                                         {"e.[0-2].*", "e.1.up", true},
                                         {"e.[0-2].*", "e.3.up", false},
                                         {"e.[!0-2].*", "e.3.up", true},
                                         {"e.[!0-2].*", "e.1.up", false},
                                         {"[]a]", "]", true},
                                         {"[a-]", "-", true},
                                         {"[z-a]", "b", false},
                                         {"a[", "a[", true},
                                         {"a[b", "ab", false},
                                         {"[!]", "!", false},
                                         {"[!]", "[!]", true}}) {
    INFO(row.glob << " " << row.name);
    const auto glob = Glob::Compile(row.glob);
    REQUIRE(glob.ok());
    CHECK(glob->Matches(row.name) == row.matches);
  }
}

TEST_CASE("A glob of many stars takes little time on a long name, and one over 1000 characters is refused") {
  std::string stars;
  for (int i = 0; i < 400; ++i) stars += "*a";
  const auto glob = Glob::Compile(stars + "b");
  REQUIRE(glob.ok());
  CHECK_FALSE(glob->Matches(std::string(512, 'a')));
  CHECK(glob->Matches(std::string(511, 'a') + "b"));
  CHECK_FALSE(Glob::Compile(std::string(1001, 'a')).ok());
}

}  // namespace
}  // namespace moed
