// The integer schemes of GPTQ's relatives (gptq, awq, auto-round): a few settings for all modules, and exceptions that set
// some of them anew. Every value remembers its key, so that a refusal names what the file really says.
#ifndef MOED_ENGINE_QUANT_INTEGER_H_
#define MOED_ENGINE_QUANT_INTEGER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/module_names.h"
#include "engine/quant_config.h"
#include "engine/quant_schemes.h"

namespace moed {

template <typename T>
struct Sourced {
  T value{};
  std::string key;  // with where it was found
};

struct IntegerSettings {
  Sourced<int64_t> bits;
  Sourced<int64_t> group_size;  // -1: one group per row
  Sourced<bool> symmetric;
  Sourced<bool> act_order;
  bool static_groups = false;   // act-order with contiguous groups: the file looks as without act-order
};

// What an exception sets.
struct IntegerOverride {
  std::optional<Sourced<int64_t>> bits;
  std::optional<Sourced<int64_t>> group_size;
  std::optional<Sourced<bool>> symmetric;
  std::optional<Sourced<bool>> act_order;
  std::optional<bool> static_groups;

  void ApplyTo(IntegerSettings* settings) const;
};

// -1 or a positive number; an error is kept in the reader. `fallback` 0: the key is required.
int64_t ReadGroupSize(ConfigReader* reader, const std::string& key, int64_t fallback);

// The keys bits, group_size, sym, desc_act, static_groups of `reader`, as far as they are there.
IntegerOverride ReadOverride(ConfigReader* reader);

// GPTQModel's "dynamic": patterns of modules that are excluded ("-:") or that override settings ("+:" or no prefix).
class DynamicRules {
 public:
  // Reads the key "dynamic" of the description, which may be absent. INVALID_ARGUMENT names pattern and field.
  absl::Status Parse(const QuantSource& source, const nlohmann::json& description);
  // Applies the first rule that matches; false when it excludes the module.
  bool Apply(const ModuleQuery& query, IntegerSettings* settings) const;

 private:
  struct Rule {
    Pattern pattern;
    bool excluded = false;
    IntegerOverride fields;
  };
  absl::Status AddRule(const QuantSource& source, const std::string& name, const nlohmann::json& fields);

  std::vector<Rule> rules_;  // in the order of the file
};

// The GPTQ container under `settings`: 4 and 8 bits. `v2`: zero points are stored as they are.
Declaration DeclareGptq(const IntegerSettings& settings, bool v2);
// The AWQ container: 4 bits, no act-order.
Declaration DeclareAwq(const IntegerSettings& settings);

}  // namespace moed

#endif  // MOED_ENGINE_QUANT_INTEGER_H_
