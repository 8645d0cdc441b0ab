// Shell globs as module patterns of checkpoints use them: * any characters, ? one, [a-c] and [!a-c] one of a set; the whole
// name must match. A dot is a character like any other, so that "model.layers.1*" also means layer 10.
//
// A Glob is immutable; any number of threads may match at once. Matching takes at most pattern length x name length steps.
#ifndef MOED_ENGINE_GLOB_H_
#define MOED_ENGINE_GLOB_H_

#include <string>

#include "absl/status/statusor.h"

namespace moed {

class Glob {
 public:
  // INVALID_ARGUMENT for more than 1000 characters. A bracket that is not closed is a literal.
  static absl::StatusOr<Glob> Compile(const std::string& text);

  bool Matches(const std::string& name) const;

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Whether `text` has a character that means more than itself in a glob.
bool HasWildcard(const std::string& text);

}  // namespace moed

#endif  // MOED_ENGINE_GLOB_H_
