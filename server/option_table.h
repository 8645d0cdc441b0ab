// The table of serve's options: name, value, help, and how a value is checked and stored. Internal to //server:options
// and its tests.
#ifndef MOED_SERVER_OPTION_TABLE_H_
#define MOED_SERVER_OPTION_TABLE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/options.h"

namespace moed {

struct OptionSpec {
  enum class Kind { kSwitch, kText, kNumber, kFraction, kList };
  const char* name;   // as a key of the file; "--" + name on the command line
  Kind kind;
  const char* value;  // what the help text calls the value
  const char* help;
  // Checks `text` and stores it (kList: appends it). The error says what was wanted and what was got, without the name.
  absl::Status (*set)(const std::string& text, ServeOptions* options);
};

// All options of serve but --config, in the order of the help text.
const std::vector<OptionSpec>& ServeOptionTable();
// Null when there is no such option.
const OptionSpec* FindOption(const std::string& name);

// Values of one option as they were given, in text form; a switch has the single value "true", or in a file "false".
struct GivenOption {
  std::string name;
  std::vector<std::string> values;
};

// Applies `values` to `options`. Errors start with `source` (a file, or "--name") and name the key.
absl::Status ApplyOption(const OptionSpec& spec, const std::string& source, const std::vector<std::string>& values,
                         ServeOptions* options);

// The two sources put together: options given on the command line and in the file `file_name` must agree where both name
// one. Fills the defaults that depend on others and checks what only the whole can show (duplicate model names).
absl::StatusOr<ServeOptions> MergeOptions(const std::vector<GivenOption>& from_command_line,
                                          const std::vector<GivenOption>& from_file, const std::string& file_name);

// Reads a configuration file: one JSON object whose keys are option names. Errors name file, key, wanted and got; a syntax
// error has its byte position.
absl::StatusOr<std::vector<GivenOption>> ReadConfigFile(const std::string& path);
// The same for text already read; `name` stands for the file in messages.
absl::StatusOr<std::vector<GivenOption>> ParseConfig(const std::string& text, const std::string& name);

// Checks shared with the other commands. Each error says wanted and got.
absl::Status ParseInteger(const std::string& text, int64_t low, int64_t high, int64_t* out);
absl::Status ParseFraction(const std::string& text, double* out);  // 0 to 1
absl::Status ParseActivations(const std::string& text, std::string* out);
absl::Status ParseGpu(const std::string& text, std::string* out);  // auto or none
absl::Status ParseFeatureMask(const std::string& text, std::vector<std::string>* names);

}  // namespace moed

#endif  // MOED_SERVER_OPTION_TABLE_H_
