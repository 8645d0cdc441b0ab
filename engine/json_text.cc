#include "engine/json_text.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr size_t kMaxDepth = 64;  // real files need 8

// What values cost in memory, as measured: lists that grow hold their elements twice for a moment, and readers of lists of
// names make copies of them.
constexpr uint64_t kValueCost = 64;
constexpr uint64_t kContainerCost = 96;
constexpr uint64_t kKeyCost = 144;
constexpr uint64_t kTextCost = 208;
constexpr uint64_t kKeyByteCost = 2;
constexpr uint64_t kTextByteCost = 5;

bool OrderMatters(const std::string& key) {
  static const std::set<std::string> keys = {"config_groups", "dynamic", "extra_config", "layer_quant_config"};
  return keys.count(key) > 0;
}

// Walks the events of a text once, before any tree is built: checks what the tree builder would accept silently (depth,
// repeated keys) and records the key order where it matters.
class Checker : public nlohmann::json_sax<json> {
 public:
  explicit Checker(JsonDocument* document) : document_(document) {}
  const std::string& error() const { return error_; }

  bool null() override { return Spend(kValueCost); }
  bool boolean(bool) override { return Spend(kValueCost); }
  bool number_integer(number_integer_t) override { return Spend(kValueCost); }
  bool number_unsigned(number_unsigned_t) override { return Spend(kValueCost); }
  bool number_float(number_float_t, const string_t&) override { return Spend(kValueCost); }
  bool string(string_t& text) override { return Spend(kTextCost + kTextByteCost * text.size()); }
  bool binary(binary_t&) override { return true; }

  bool start_object(std::size_t) override { return Push(true); }
  bool start_array(std::size_t) override { return Push(false); }
  bool end_object() override { return Pop(); }
  bool end_array() override { return Pop(); }

  bool key(string_t& name) override {
    if (!Spend(kKeyCost + kKeyByteCost * name.size())) return false;
    Level& level = levels_.back();
    if (!level.keys.insert(name).second) {
      error_ = absl::StrCat("the key \"", name, "\" appears twice in one object");
      return false;
    }
    if (level.ordered) document_->key_order[Path()].push_back(name);
    level.current = name;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception&) override {
    error_ = absl::StrCat("not valid JSON at byte ", position);
    return false;
  }

 private:
  struct Level {
    bool ordered = false;
    std::set<std::string> keys;
    std::string current;  // the key whose value is being read
  };

  bool Spend(uint64_t bytes) {
    spent_ += bytes;
    if (spent_ <= kMaxConfigMemory) return true;
    error_ = absl::StrCat("its values take more than ", kMaxConfigMemory, " bytes of memory");
    return false;
  }

  bool Push(bool object) {
    if (!Spend(kContainerCost)) return false;
    if (levels_.size() >= kMaxDepth) {
      error_ = absl::StrCat("nested deeper than ", kMaxDepth);
      return false;
    }
    const bool ordered = object && !levels_.empty() && OrderMatters(levels_.back().current);
    levels_.push_back({ordered, {}, {}});
    return true;
  }

  bool Pop() {
    levels_.pop_back();
    return true;
  }

  std::vector<std::string> Path() const {
    std::vector<std::string> path;
    for (size_t i = 0; i + 1 < levels_.size(); ++i) path.push_back(levels_[i].current);
    return path;
  }

  JsonDocument* document_;
  std::vector<Level> levels_;
  uint64_t spent_ = 0;
  std::string error_;
};

bool IsBetweenTokens(char c) { return std::string_view(" \t\r\n,:[]{}").find(c) != std::string_view::npos; }

}  // namespace

bool TokenGauge::Feed(char c) {
  if (in_string_) {
    in_string_ = escaped_ || c != '"';
    escaped_ = in_string_ && !escaped_ && c == '\\';
  } else if (c == '"') {
    in_string_ = true;
    length_ = 0;
  } else if (IsBetweenTokens(c)) {
    length_ = 0;
  }
  return ++length_ <= kLongest;
}

absl::StatusOr<JsonDocument> ParseJson(const std::string& text, const std::string& what) {
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", text.size(), " bytes long, allowed are ", kMaxConfigBytes));
  }
  TokenGauge gauge;
  const auto too_long = std::find_if_not(text.begin(), text.end(), [&gauge](char c) { return gauge.Feed(c); });
  if (too_long != text.end()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": a text or number longer than ", TokenGauge::kLongest,
                                                   " characters ends at byte ", too_long - text.begin(), " or later"));
  }
  JsonDocument document;
  Checker checker(&document);
  if (!json::sax_parse(text, &checker)) return absl::InvalidArgumentError(absl::StrCat(what, ": ", checker.error()));
  document.root = json::parse(text, nullptr, false);
  if (!document.root.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": wanted an object, got ", Shown(document.root)));
  }
  return document;
}

const json* ConfigReader::Find(const std::string& key) const {
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool ConfigReader::IsNull(const std::string& key) const {
  const auto it = object_.find(key);
  return it != object_.end() && it->is_null();
}

void ConfigReader::Fail(const std::string& key, const std::string& wanted) {
  if (!status_.ok()) return;
  const auto it = object_.find(key);
  const std::string got = it == object_.end() ? "nothing" : Shown(*it);
  status_ = absl::InvalidArgumentError(absl::StrCat(where_, key, ": wanted ", wanted, ", got ", got));
}

namespace {

bool IsIntegerIn(const json& value, int64_t low, int64_t high) {
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
  return value.is_number_integer() && value.get<int64_t>() >= low && value.get<int64_t>() <= high;
}

std::string IntegerRange(int64_t low, int64_t high) { return absl::StrCat("an integer in ", low, "..", high); }

}  // namespace

int64_t ConfigReader::Int(const std::string& key, int64_t low, int64_t high) {
  if (!Has(key)) Fail(key, IntegerRange(low, high));
  return IntOr(key, low, low, high);
}

int64_t ConfigReader::IntOr(const std::string& key, int64_t fallback, int64_t low, int64_t high) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (IsIntegerIn(*value, low, high)) return value->get<int64_t>();
  Fail(key, IntegerRange(low, high));
  return fallback;
}

bool ConfigReader::BoolOr(const std::string& key, bool fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_boolean()) return value->get<bool>();
  Fail(key, "true or false");
  return fallback;
}

double ConfigReader::NumberOr(const std::string& key, double fallback, double low, double high) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_number()) {
    const double number = value->get<double>();
    if (number >= low && number <= high) return number;
  }
  Fail(key, absl::StrCat("a number in ", low, "..", high));
  return fallback;
}

std::string ConfigReader::StringOr(const std::string& key, const std::string& fallback) {
  const json* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->is_string()) return value->get<std::string>();
  Fail(key, "a string");
  return fallback;
}

std::vector<std::string> ConfigReader::StringsOrEmpty(const std::string& key) {
  std::vector<std::string> strings;
  const json* value = Find(key);
  if (value == nullptr) return strings;
  if (!value->is_array()) {
    Fail(key, "a list of strings");
    return strings;
  }
  for (const json& element : *value) {
    if (!element.is_string()) {
      Fail(key, "a list of strings");
      return {};
    }
    strings.push_back(element.get<std::string>());
  }
  return strings;
}

std::vector<int64_t> ConfigReader::IntsOrEmpty(const std::string& key, int64_t low, int64_t high) {
  std::vector<int64_t> integers;
  const json* value = Find(key);
  if (value == nullptr) return integers;
  bool good = value->is_array();
  if (good) {
    for (const json& element : *value) {
      good = good && IsIntegerIn(element, low, high);
      if (good) integers.push_back(element.get<int64_t>());
    }
  }
  if (good) return integers;
  Fail(key, absl::StrCat("a list of integers in ", low, "..", high));
  return {};
}

std::string Shown(const json& value) {
  constexpr size_t kLongest = 80;
  if (value.is_array() && value.size() > 20) return absl::StrCat("a list of ", value.size());
  if (value.is_object()) return absl::StrCat("an object of ", value.size(), " keys");
  const std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

}  // namespace moed
