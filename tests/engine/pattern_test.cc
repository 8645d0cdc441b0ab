// Module patterns against what Python's re.match says.
#include <catch2/catch.hpp>

#include <string>
#include <vector>

#include "engine/pattern.h"

namespace moed {
namespace {

struct Row {
  const char* pattern;
  const char* subject;
  bool matches;
};

TEST_CASE("Patterns match as Python's re.match does") {
  const std::vector<Row> rows = {
      {".*mlp.gate$", "model.layers.0.mlp.gate", true},
      {".*mlp.gate$", "model.layers.0.mlp.gate_proj", false},
      {"mlp.gate", "model.layers.0.mlp.gate", false},  // anchored at the start
      {"model", "model.layers.0", true},               // not at the end
      {".*layers\\.1\\.", "model.layers.1.mlp", true},
      {".*layers\\.1\\.", "model.layers.11.mlp", false},
      {".*layers.1", "model.layers.10.mlp", true},
      {".*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.gate_proj", true},
      {".*mlp\\.(gate|up|gate_up|down)_proj.*", "model.layers.0.mlp.experts.0.gate_proj", false},
      {"^(?!.*experts).*", "model.layers.0.mlp.gate", true},
      {"^(?!.*experts).*", "model.layers.0.mlp.experts.1.up_proj", false},
      {"(?=.*down)model", "model.x.down", true},
      {"(?=.*down)model", "model.x.up", false},
      {"model\\.layers\\.(\\d|1[0-5])\\.", "model.layers.13.", true},
      {"model\\.layers\\.(\\d|1[0-5])\\.", "model.layers.16.", false},
      {"(?:a|b)+c", "abbac", true},
      {"(?P<name>a{2,3})b", "aaab", true},
      {"(?P<name>a{2,3})b", "ab", false},
      {"a{,2}b", "aab", true},
      {"a{,2}b", "aaab", false},
      {"a{2,}$", "aaaa", true},
      {"a{2}$", "aaa", false},
      {"a{x}", "a{x}", true},  // no repeat: literal braces
      {"a*?b", "aaab", true},
      {"[a-c]+[^a-c]$", "abcd", true},
      {"[]a]+$", "]a]", true},
      {"[a\\-c]+$", "a-c", true},
      {"[a-]+$", "a-", true},
      {"[\\w.]+$", "layers.0", true},
      {"\\D\\S\\W", "ab.", true},
      {"\\d+\\s\\w", "12 x", true},
      {".*\\bgate\\b", "mlp.gate.weight", true},
      {".*\\bgate\\b", "mlp.gate_proj", false},
      {".*\\Bate", "gate", true},
      {"\\Aab\\Z", "ab", true},
      {"\\Aab\\Z", "abc", false},
      {"", "anything", true},
      {"a|b|", "c", true},
      {"(a*)*b", "aaab", true},
      {"()*x", "x", true},
      {"a.c", "a\nc", false},
      {"ab$", "ab\n", true},
      {"\\.", "x", false},
      {"x\\n", "x\n", true},
  };
  for (const Row& row : rows) {
    INFO(row.pattern << " on " << row.subject);
    const auto pattern = Pattern::Compile(row.pattern);
    REQUIRE(pattern.ok());
    CHECK(pattern->MatchesStart(row.subject) == row.matches);
  }
}

TEST_CASE("What is no pattern, or not served, is refused by name") {
  for (const char* text : {"(", ")", "a)", "(a", "[a", "[", "*a", "+", "a**", "a{3,2}", "a{2000}", "\\", "a\\", "[z-a]",
                           "[\\d-z]", "(?<=a)b", "(?<!a)b", "(?i)a", "(?P=name)", "(?P<name", "a++", "(a)\\1", "\\q",
                           "\xc3\xa9", "(?", "(?=a", "((a{1000}){1000}){1000}"}) {
    INFO(text);
    const auto pattern = Pattern::Compile(text);
    REQUIRE(pattern.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK(std::string(pattern.status().message()).find("pattern \"" + std::string(text) + "\"") == 0);
  }
}

TEST_CASE("A pattern is at most 1000 characters") {
  CHECK(Pattern::Compile(std::string(1000, 'a')).ok());
  const auto pattern = Pattern::Compile(std::string(1001, 'a'));
  CHECK(std::string(pattern.status().message()).find("1001 characters") != std::string::npos);
}

TEST_CASE("The patterns of one config share a budget of steps, and one that does not fit takes nothing from it") {
  const std::string large = "(.{0,60}x){0,30}";  // some 3700 steps
  REQUIRE(Pattern::Compile(large).ok());
  PatternBudget budget;
  int compiled = 0;
  while (compiled < 100 && Pattern::Compile(large, &budget).ok()) ++compiled;
  CHECK(compiled >= 16);
  CHECK(compiled < 24);
  CHECK(std::string(Pattern::Compile(large, &budget).status().message()).find("too large together") != std::string::npos);
  CHECK(Pattern::Compile("small", &budget).ok());
  CHECK(Pattern::Compile(large).ok());  // on its own
}

TEST_CASE("Deep groups are refused and shallow ones are not") {
  CHECK(Pattern::Compile(std::string(50, '(') + "a" + std::string(50, ')')).ok());
  CHECK_FALSE(Pattern::Compile(std::string(499, '(') + "a" + std::string(499, ')')).ok());
  CHECK_FALSE(Pattern::Compile(std::string(900, '(')).ok());
}

TEST_CASE("Patterns that make backtracking matchers explode end quickly") {
  // The test's own time limit is the guard: a backtracking matcher would need 2^500 steps.
  const std::string subject(500, 'a');
  for (const char* text : {"(a*)*b", "(a|a)*b", "(a|aa)+$b", "(.*)*x", "(.*a){20}b", "(?=(a*)*b)a", "((a?){50}){20}c",
                           "(?=.*(?=.*(?=.*(?=.*b))))", "(a?){100}a{100}b"}) {
    INFO(text);
    const auto pattern = Pattern::Compile(text);
    REQUIRE(pattern.ok());
    CHECK_FALSE(pattern->MatchesStart(subject));
  }
}

}  // namespace
}  // namespace moed
