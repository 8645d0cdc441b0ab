// Regular expressions as module patterns of checkpoints use them: Python syntax, matched at the start of a name.
//
// Why not std::regex: it has ECMAScript's meaning for some of the same letters, needs exceptions, and backtracks, so that a
// pattern from a file could take exponential time or the whole stack. Here matching takes time proportional to pattern
// length x name length (per look-ahead) and constant stack.
//
// Served: literals, ., [classes], \d \w \s \b and their opposites, \A \Z ^ $, groups, |, * + ? {m,n} greedy or lazy,
// (?=..) and (?!..). Not served, and refused by name: back-references, look-behind, inline flags, possessive repeats,
// non-ASCII characters. A Pattern is immutable; any number of threads may match at once.
#ifndef MOED_ENGINE_PATTERN_H_
#define MOED_ENGINE_PATTERN_H_

#include <bitset>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace moed {

// What the patterns of one config may take together. A pattern of few characters can have thousands of steps; each costs
// memory, and time for every module that is looked up.
class PatternBudget {
 public:
  // False, and nothing taken, when fewer are left.
  bool Take(size_t steps);

 private:
  size_t left_ = 1 << 16;
};

class Pattern {
 public:
  // INVALID_ARGUMENT quotes the pattern and says what is wrong at which character, or that the budget (may be null: no
  // limit) is used up. At most 1000 characters.
  static absl::StatusOr<Pattern> Compile(const std::string& text, PatternBudget* budget = nullptr);

  // Python's re.match: whether some prefix of `subject` matches.
  bool MatchesStart(const std::string& subject) const;

  // As given to Compile.
  const std::string& text() const { return text_; }

  // One step of a compiled pattern. Jumps are relative, so that a piece of program can be copied.
  struct Step {
    enum class Op : uint8_t { kSet, kSplit, kJump, kBegin, kEnd, kWordEdge, kNotWordEdge, kLook, kMatch };
    Op op = Op::kMatch;
    bool flag = false;     // kEnd: also before a last newline; kLook: negative
    int32_t offset = 0;    // kJump: target; kSplit: second target (the first is the next step); kLook: step after the body
    int32_t look = 0;      // kLook: number of this look-ahead
    std::bitset<256> set;  // kSet
  };

 private:
  std::string text_;
  std::vector<Step> program_;
  int looks_ = 0;
};

}  // namespace moed

#endif  // MOED_ENGINE_PATTERN_H_
