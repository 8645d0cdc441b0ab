#include "engine/pattern.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using Step = Pattern::Step;
using Program = std::vector<Step>;

constexpr size_t kMaxLength = 1000;
constexpr size_t kMaxSteps = 4096;  // after repeats are written out
constexpr int kMaxLooks = 16;
constexpr int kMaxDepth = 100;
constexpr int kMaxRepeat = 1000;

bool IsWord(unsigned char c) { return std::isalnum(c) != 0 || c == '_'; }

void Append(Program* to, const Program& piece) { to->insert(to->end(), piece.begin(), piece.end()); }

Step Make(Step::Op op, int32_t offset = 0, bool flag = false) {
  Step step;
  step.op = op;
  step.offset = offset;
  step.flag = flag;
  return step;
}

Program OneSet(const std::bitset<256>& set) {
  Step step = Make(Step::Op::kSet);
  step.set = set;
  return {step};
}

// A recursive-descent parser that writes the program bottom-up. After the first error everything returns at once.
class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}
  const std::string& error() const { return error_; }

  Program Parse() {
    for (; at_ < text_.size(); ++at_) {
      if (static_cast<unsigned char>(text_[at_]) >= 128) return Error("non-ASCII characters are not supported");
    }
    at_ = 0;
    Program program = Alternatives();
    if (error_.empty() && at_ < text_.size()) return Error("unbalanced parenthesis");
    program.push_back(Make(Step::Op::kMatch));
    return program;
  }

 private:
  Program Error(const std::string& what) {
    if (error_.empty()) error_ = absl::StrCat(what, " at character ", at_);
    at_ = text_.size();  // ends every loop
    return {};
  }

  bool More() const { return error_.empty() && at_ < text_.size(); }
  char Peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
  bool Take(char c) {
    if (!More() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  Program Alternatives() {
    Program left = Sequence();
    while (Take('|')) {
      const Program right = Sequence();
      Program both;
      both.push_back(Make(Step::Op::kSplit, static_cast<int32_t>(left.size()) + 2));
      Append(&both, left);
      both.push_back(Make(Step::Op::kJump, static_cast<int32_t>(right.size()) + 1));
      Append(&both, right);
      left = std::move(both);
      if (left.size() > kMaxSteps) return Error("the pattern is too large");
    }
    return left;
  }

  Program Sequence() {
    Program sequence;
    while (More() && Peek() != '|' && Peek() != ')') {
      Append(&sequence, Repeated());
      if (sequence.size() > kMaxSteps) return Error("the pattern is too large");
    }
    return sequence;
  }

  // An atom with its repeat, if there is one.
  Program Repeated() {
    Program atom = Atom();
    int low = 0;
    int high = 0;
    if (!Quantifier(&low, &high)) return atom;
    Take('?');  // lazy: the same set of matches
    if (Peek() == '+' && More()) return Error("possessive repeats are not supported");
    int more_low = 0;
    int more_high = 0;
    if (Quantifier(&more_low, &more_high)) return Error("multiple repeat");
    const size_t copies = static_cast<size_t>(std::max(low, high) + 1);
    if (!atom.empty() && copies > kMaxSteps / atom.size()) return Error("the pattern is too large");
    const int32_t size = static_cast<int32_t>(atom.size());
    Program result;
    for (int i = 0; i < low; ++i) Append(&result, atom);
    for (int i = low; i < high; ++i) {
      result.push_back(Make(Step::Op::kSplit, size + 1));
      Append(&result, atom);
    }
    if (high < 0) {
      result.push_back(Make(Step::Op::kSplit, size + 2));
      Append(&result, atom);
      result.push_back(Make(Step::Op::kJump, -(size + 1)));
    }
    return result;
  }

  // Reads * + ? {m} {m,} {,n} {m,n}; high is -1 for no upper end. A brace that is none of these is a literal.
  bool Quantifier(int* low, int* high) {
    if (!More()) return false;
    if (Take('*')) return *low = 0, *high = -1, true;
    if (Take('+')) return *low = 1, *high = -1, true;
    if (Take('?')) return *low = 0, *high = 1, true;
    if (Peek() != '{') return false;
    const size_t start = at_++;
    const bool has_low = Number(low);
    if (!has_low) *low = 0;
    *high = *low;
    bool comma = false;
    bool has_high = false;
    if (Take(',')) {
      comma = true;
      has_high = Number(high);
      if (!has_high) *high = -1;
    }
    if (!Take('}') || (!has_low && !has_high) || (!comma && !has_low)) {
      if (error_.empty()) at_ = start;
      return false;
    }
    if (*low > kMaxRepeat || *high > kMaxRepeat || (*high >= 0 && *high < *low)) {
      Error(absl::StrCat("wanted repeats m <= n <= ", kMaxRepeat));
      return false;
    }
    return true;
  }

  bool Number(int* value) {
    const size_t start = at_;
    *value = 0;
    while (More() && std::isdigit(static_cast<unsigned char>(Peek()))) {
      *value = std::min(*value * 10 + (text_[at_++] - '0'), kMaxRepeat + 1);
    }
    return at_ > start;
  }

  Program Atom() {
    const char c = text_[at_];
    switch (c) {
      case '(': return Group();
      case '[': return OneSet(Class());
      case '*':
      case '+':
      case '?': return Error("nothing to repeat");
      case '.': {
        ++at_;
        std::bitset<256> set;
        set.set();
        set.reset('\n');
        return OneSet(set);
      }
      case '^': ++at_; return {Make(Step::Op::kBegin)};
      case '$': ++at_; return {Make(Step::Op::kEnd, 0, true)};
      case '\\': return EscapedAtom();
      default: {
        ++at_;
        std::bitset<256> set;
        set.set(static_cast<unsigned char>(c));
        return OneSet(set);
      }
    }
  }

  Program Group() {
    ++at_;
    if (++depth_ > kMaxDepth) return Error("groups are nested too deep");
    bool look = false;
    bool negative = false;
    if (Take('?')) {
      if (Take(':')) {
      } else if (Peek() == '=' || Peek() == '!') {
        look = true;
        negative = text_[at_++] == '!';
      } else if (Peek() == 'P' && Peek(1) == '<') {
        const size_t end = text_.find('>', at_);
        if (end == std::string::npos) return Error("unterminated group name");
        at_ = end + 1;
      } else {
        return Error(absl::StrCat("groups of the kind (?", std::string(1, Peek()), " are not supported"));
      }
    }
    Program body = Alternatives();
    if (!Take(')')) return Error("missing )");
    --depth_;
    if (!look) return body;
    Program program{Make(Step::Op::kLook, static_cast<int32_t>(body.size()) + 2, negative)};
    Append(&program, body);
    program.push_back(Make(Step::Op::kMatch));
    return program;
  }

  Program EscapedAtom() {
    switch (Peek(1)) {
      case 'A': at_ += 2; return {Make(Step::Op::kBegin)};
      case 'Z': at_ += 2; return {Make(Step::Op::kEnd)};
      case 'b': at_ += 2; return {Make(Step::Op::kWordEdge)};
      case 'B': at_ += 2; return {Make(Step::Op::kNotWordEdge)};
      default: {
        std::bitset<256> set;
        int single = -1;
        if (!Escape(&set, &single)) return {};
        return OneSet(set);
      }
    }
  }

  // Reads \x into `set`; `single` becomes the character when it stands for exactly one, so that it can begin a range.
  bool Escape(std::bitset<256>* set, int* single) {
    ++at_;
    if (at_ >= text_.size()) return Error("a lone backslash at the end"), false;
    const char c = text_[at_];
    *single = -1;
    if (const std::string kinds = "dDwWsS"; kinds.find(c) != std::string::npos) {
      ++at_;
      for (int i = 0; i < 256; ++i) {
        const char kind = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
        const bool in = i < 128 && (kind == 'd'   ? std::isdigit(i) != 0
                                    : kind == 'w' ? IsWord(static_cast<unsigned char>(i))
                                                  : std::isspace(i) != 0);
        if (in == (c == kind)) set->set(i);
      }
      return true;
    }
    static const std::string names = "ntrfv";
    static const std::string values = "\n\t\r\f\v";
    if (const size_t i = names.find(c); i != std::string::npos) {
      *single = values[i];
    } else if (std::isalnum(static_cast<unsigned char>(c))) {
      return Error(absl::StrCat("the escape \\", std::string(1, c), " is not supported")), false;
    } else {
      *single = static_cast<unsigned char>(c);
    }
    ++at_;
    set->set(*single);
    return true;
  }

  // Reads one member of a class; `single` as in Escape.
  bool ClassMember(std::bitset<256>* set, int* single) {
    if (Peek() == '\\') return Escape(set, single);
    *single = static_cast<unsigned char>(text_[at_++]);
    set->set(*single);
    return true;
  }

  std::bitset<256> Class() {
    ++at_;
    const bool negative = Take('^');
    std::bitset<256> set;
    bool first = true;
    while (More() && (first || Peek() != ']')) {
      first = false;
      int low = -1;
      if (!ClassMember(&set, &low)) return set;
      if (Peek() != '-' || Peek(1) == ']' || at_ + 1 >= text_.size()) continue;
      ++at_;
      int high = -1;
      if (!ClassMember(&set, &high)) return set;
      if (low < 0 || high < low) return Error("bad character range"), set;
      for (int i = low; i <= high; ++i) set.set(i);
    }
    if (!Take(']')) Error("missing ]");
    return negative ? ~set : set;
  }

  const std::string& text_;
  size_t at_ = 0;
  int depth_ = 0;
  std::string error_;
};

// Runs a program over a subject by following all of its threads at once, each step at most once per position.
class Matcher {
 public:
  Matcher(const Program& program, int looks, const std::string& subject)
      : program_(program), subject_(subject), known_(looks * (subject.size() + 1), Known::kUnknown) {}

  // Whether the program from step `start` on matches at `position`. Nests as deep as look-aheads do.
  bool Run(int32_t start, size_t position) {
    std::vector<int32_t> now;
    std::vector<int32_t> next;
    std::vector<uint32_t> seen(program_.size(), 0);
    uint32_t stamp = 1;
    if (Follow(start, position, &now, &seen, stamp)) return true;
    for (; position < subject_.size() && !now.empty(); ++position) {
      const unsigned char c = static_cast<unsigned char>(subject_[position]);
      ++stamp;
      next.clear();
      for (const int32_t step : now) {
        if (program_[step].set[c] && Follow(step + 1, position + 1, &next, &seen, stamp)) return true;
      }
      now.swap(next);
    }
    return false;
  }

 private:
  enum class Known : uint8_t { kUnknown, kNo, kYes };

  // Adds every kSet step that is reachable from `step` without reading a character; true when a match is reachable.
  bool Follow(int32_t step, size_t position, std::vector<int32_t>* list, std::vector<uint32_t>* seen, uint32_t stamp) {
    const size_t base = stack_.size();  // one stack for all nested runs: no allocation per character
    stack_.push_back(step);
    while (stack_.size() > base) {
      const int32_t at = stack_.back();
      stack_.pop_back();
      if ((*seen)[at] == stamp) continue;
      (*seen)[at] = stamp;
      const Step& s = program_[at];
      switch (s.op) {
        case Step::Op::kMatch: stack_.resize(base); return true;
        case Step::Op::kSet: list->push_back(at); break;
        case Step::Op::kJump: stack_.push_back(at + s.offset); break;
        case Step::Op::kSplit:
          stack_.push_back(at + s.offset);
          stack_.push_back(at + 1);
          break;
        case Step::Op::kLook:
          if (Look(at, position) != s.flag) stack_.push_back(at + s.offset);
          break;
        default:
          if (Holds(s, position)) stack_.push_back(at + 1);
      }
    }
    return false;
  }

  bool Holds(const Step& step, size_t position) const {
    if (step.op == Step::Op::kBegin) return position == 0;
    if (step.op == Step::Op::kEnd) {
      return position == subject_.size() || (step.flag && position + 1 == subject_.size() && subject_.back() == '\n');
    }
    const bool before = position > 0 && IsWord(static_cast<unsigned char>(subject_[position - 1]));
    const bool after = position < subject_.size() && IsWord(static_cast<unsigned char>(subject_[position]));
    return (before != after) == (step.op == Step::Op::kWordEdge);
  }

  // Each look-ahead is run once per position: nested ones would otherwise multiply.
  bool Look(int32_t at, size_t position) {
    Known& known = known_[program_[at].look * (subject_.size() + 1) + position];
    if (known == Known::kUnknown) known = Run(at + 1, position) ? Known::kYes : Known::kNo;
    return known == Known::kYes;
  }

  const Program& program_;
  const std::string& subject_;
  std::vector<Known> known_;
  std::vector<int32_t> stack_;
};

}  // namespace

bool PatternBudget::Take(size_t steps) {
  if (steps > left_) return false;
  left_ -= steps;
  return true;
}

absl::StatusOr<Pattern> Pattern::Compile(const std::string& text, PatternBudget* budget) {
  if (text.size() > kMaxLength) {
    return absl::InvalidArgumentError(
        absl::StrCat("pattern of ", text.size(), " characters, allowed are ", kMaxLength, ": ", text.substr(0, 60), "..."));
  }
  Parser parser(text);
  Pattern pattern;
  pattern.text_ = text;
  pattern.program_ = parser.Parse();
  std::string error = parser.error();
  for (Step& step : pattern.program_) {
    if (step.op == Step::Op::kLook) step.look = pattern.looks_++;
  }
  if (error.empty() && pattern.program_.size() > kMaxSteps) error = "the pattern is too large";
  if (error.empty() && pattern.looks_ > kMaxLooks) error = absl::StrCat("more than ", kMaxLooks, " look-aheads");
  if (error.empty() && budget != nullptr && !budget->Take(pattern.program_.size())) {
    error = "with this one the patterns of the config are too large together";
  }
  if (!error.empty()) return absl::InvalidArgumentError(absl::StrCat("pattern \"", text, "\": ", error));
  return pattern;
}

bool Pattern::MatchesStart(const std::string& subject) const {
  return Matcher(program_, looks_, subject).Run(0, 0);
}

}  // namespace moed
