// Reading JSON configuration texts from outside: parsing within limits, and typed access whose errors name the key.
//
// Nothing here throws or recurses on input. Values are plain; a ConfigReader belongs to one thread.
//
//   ConfigReader reader(document.root, "config.json: ");
//   int64_t hidden = reader.Int("hidden_size", 1, 1 << 20);
//   if (!reader.status().ok()) return reader.status();   // "config.json: hidden_size: wanted ..., got ..."
#ifndef MOED_ENGINE_JSON_TEXT_H_
#define MOED_ENGINE_JSON_TEXT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace moed {

// A configuration file is at most this long; real ones are a few hundred KiB.
constexpr uint64_t kMaxConfigBytes = 16u << 20;

// And its values may take about this much memory: a text of a few MiB can hold millions of them. Enough for settings of each
// module of 50,000, one by one.
constexpr uint64_t kMaxConfigMemory = 48u << 20;

// Follows a JSON text and stops it at a string or number that is longer than any real one: parsers hold each token several
// times. Names of tensors have some hundred characters, chat templates some ten thousand.
class TokenGauge {
 public:
  static constexpr size_t kLongest = 1 << 20;
  // The next character; false when the token that it belongs to is too long.
  bool Feed(char c);

 private:
  bool in_string_ = false;
  bool escaped_ = false;
  size_t length_ = 0;
};

struct JsonDocument {
  nlohmann::json root;  // objects are sorted by key
  // The keys of objects whose order has a meaning, as in the text, by the path of keys to the object. Recorded for the
  // objects called "config_groups", "dynamic", "extra_config" and "layer_quant_config".
  std::map<std::vector<std::string>, std::vector<std::string>> key_order;
};

// Parses `text`, whose root must be an object. `what` names it in errors. INVALID_ARGUMENT: longer than kMaxConfigBytes,
// more values than kMaxConfigMemory can hold, a token that is too long, no JSON (with the byte position), nested deeper than
// 64, or a key twice in one object.
absl::StatusOr<JsonDocument> ParseJson(const std::string& text, const std::string& what);

// Typed access to the keys of one object. The first error is kept in status() and everything after it returns fallbacks,
// so that a caller reads all it needs and checks once. A key whose value is null counts as absent.
class ConfigReader {
 public:
  // `object` must be an object and outlive the reader; `where` goes before the key in errors.
  ConfigReader(const nlohmann::json& object, std::string where) : object_(object), where_(std::move(where)) {}

  const absl::Status& status() const { return status_; }
  const std::string& where() const { return where_; }

  // The value, or null when absent.
  const nlohmann::json* Find(const std::string& key) const;
  bool Has(const std::string& key) const { return Find(key) != nullptr; }
  // True when the key is there with the value null.
  bool IsNull(const std::string& key) const;

  // Integers in low..high. Int is an error when the key is absent. A number with a fraction or exponent is no integer.
  int64_t Int(const std::string& key, int64_t low, int64_t high);
  int64_t IntOr(const std::string& key, int64_t fallback, int64_t low, int64_t high);
  bool BoolOr(const std::string& key, bool fallback);
  // Finite numbers in low..high.
  double NumberOr(const std::string& key, double fallback, double low, double high);
  std::string StringOr(const std::string& key, const std::string& fallback);
  std::vector<std::string> StringsOrEmpty(const std::string& key);
  std::vector<int64_t> IntsOrEmpty(const std::string& key, int64_t low, int64_t high);

  // Records "WHEREkey: wanted WANTED, got VALUE" unless there is an earlier error.
  void Fail(const std::string& key, const std::string& wanted);

 private:
  const nlohmann::json& object_;
  const std::string where_;
  absl::Status status_;
};

// `value` as text for an error message, cut to a readable length.
std::string Shown(const nlohmann::json& value);

}  // namespace moed

#endif  // MOED_ENGINE_JSON_TEXT_H_
