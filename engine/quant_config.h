// Parsing of quantization_config into a QuantConfig: one parser per method that is served.
//
// What has the wrong type, or changes the meaning of the whole file, is refused while parsing. What is well-formed but not
// served is refused only when a module that it applies to is asked for: a model may hold parts that moed never reads.
#ifndef MOED_ENGINE_QUANT_CONFIG_H_
#define MOED_ENGINE_QUANT_CONFIG_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/json_text.h"
#include "engine/model_config.h"
#include "engine/module_names.h"

namespace moed {

// Where a quantization description was found.
struct QuantSource {
  const JsonDocument* document = nullptr;
  std::vector<std::string> path;  // keys from the root to the description; empty when the file is the description
  std::string where;              // goes before a key in errors: "config.json: quantization_config."
  std::string default_method;     // when the description has no quant_method; empty: that is an error
  bool mixtral_names = false;     // see ModuleQuery
  // Shared by all lists of the description.
  std::shared_ptr<PatternBudget> patterns = std::make_shared<PatternBudget>();
};

using QuantConfigPtr = std::shared_ptr<const QuantConfig>;

// Longest module name that For() looks up.
constexpr size_t kMaxModuleName = 512;

// A model without quantization: every module is plain.
QuantConfigPtr PlainQuantConfig();

// INVALID_ARGUMENT names key, wanted and got; for a method that is not served, the method and those that are.
absl::StatusOr<QuantConfigPtr> ParseQuantConfig(const QuantSource& source);

// The parsers that ParseQuantConfig chooses from. `description` is the object that the source points at.
absl::StatusOr<QuantConfigPtr> ParseGptqConfig(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseAwqConfig(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseAutoRoundConfig(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseCompressedTensorsConfig(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseFp8Config(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseBlockwiseInt8Config(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseMxfp4Config(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseModelOptConfig(const QuantSource& source, const nlohmann::json& description);
absl::StatusOr<QuantConfigPtr> ParseQuarkConfig(const QuantSource& source, const nlohmann::json& description);

// INVALID_ARGUMENT for a name longer than kMaxModuleName.
absl::Status CheckModuleName(const std::string& module);

// Adds the strings of the list at `key`, which may be absent, to `list` by its member `add`. Returns the first error of the
// reader or of an entry, with the key.
absl::Status AddEntries(const QuantSource& source, ConfigReader* reader, const std::string& key,
                        absl::Status (NameList::*add)(const std::string&, PatternBudget*), NameList* list);

// The keys of the object at source.path + key in the order of the file.
std::vector<std::string> KeysInOrder(const QuantSource& source, const std::string& key);

}  // namespace moed

#endif  // MOED_ENGINE_QUANT_CONFIG_H_
