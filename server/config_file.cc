// The configuration file: one flat JSON object, read by events, so that duplicate keys are seen and nothing throws.
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "server/option_table.h"

namespace moed {
namespace {

using Kind = OptionSpec::Kind;
using Json = nlohmann::json;

constexpr size_t kMaxConfigBytes = 1 << 20;

const char* WantedFor(Kind kind) {
  switch (kind) {
    case Kind::kSwitch: return "true or false";
    case Kind::kText: return "a string";
    case Kind::kNumber: return "a whole number";
    case Kind::kFraction: return "a number";
    case Kind::kList: return "a string or a list of strings";
  }
  return "?";
}

// Collects the options; the first fault stops the parse and stays in status().
class ConfigReader : public nlohmann::json_sax<Json> {
 public:
  explicit ConfigReader(const std::string& file) : file_(file) {}

  const absl::Status& status() const { return status_; }
  std::vector<GivenOption> Take() { return std::move(options_); }

  bool null() override { return Wrong("null"); }
  bool boolean(bool value) override {
    if (!Accepts(Kind::kSwitch)) return Wrong(value ? "true" : "false");
    return Add(value ? "true" : "false");
  }
  bool number_integer(number_integer_t value) override {
    return AcceptsNumber() ? Add(std::to_string(value)) : Wrong(std::to_string(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    return AcceptsNumber() ? Add(std::to_string(value)) : Wrong(std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override { return Accepts(Kind::kFraction) ? Add(text) : Wrong(text); }
  bool string(string_t& value) override {
    const bool fits = Accepts(Kind::kText) || (spec_ != nullptr && spec_->kind == Kind::kList);
    return fits ? Add(value) : Wrong(absl::StrCat("the string \"", value, "\""));
  }
  bool binary(binary_t&) override { return Wrong("binary data"); }
  bool start_object(std::size_t) override {
    if (inside_) return Wrong("an object");
    return inside_ = true;
  }
  bool key(string_t& name) override { return StartOption(name); }
  bool end_object() override { return true; }
  bool start_array(std::size_t) override {
    if (spec_ == nullptr || spec_->kind != Kind::kList || in_list_) return Wrong("a list");
    return in_list_ = true;
  }
  bool end_array() override {
    in_list_ = false;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& token, const Json::exception&) override {
    return Fail(absl::StrCat("wanted JSON, got a syntax error at byte ", position,
                             token.empty() ? "" : absl::StrCat(" near '", token, "'")));
  }

 private:
  bool Accepts(Kind kind) const { return spec_ != nullptr && spec_->kind == kind; }
  bool AcceptsNumber() const { return Accepts(Kind::kNumber) || Accepts(Kind::kFraction); }
  bool Add(const std::string& value) {
    options_.back().values.push_back(value);
    return true;
  }
  bool Fail(const std::string& text) {
    status_ = absl::InvalidArgumentError(absl::StrCat(file_, ": ", text));
    return false;
  }
  bool Wrong(const std::string& got) {
    if (spec_ == nullptr) return Fail(absl::StrCat("wanted an object of options, got ", got));
    return Fail(absl::StrCat(spec_->name, ": wanted ", in_list_ ? "strings in the list" : WantedFor(spec_->kind), ", got ", got));
  }
  bool StartOption(const std::string& name) {
    spec_ = FindOption(name);
    if (spec_ == nullptr) {
      std::vector<std::string> names;
      for (const OptionSpec& spec : ServeOptionTable()) names.push_back(spec.name);
      return Fail(absl::StrCat("wanted the name of an option as key, got '", name, "'; the nearest is '",
                               NearestName(name, names), "'"));
    }
    if (!seen_.insert(name).second) return Fail(absl::StrCat(name, ": wanted each key once, got it twice"));
    options_.push_back({name, {}});
    return true;
  }

  const std::string file_;
  absl::Status status_;
  std::vector<GivenOption> options_;
  std::set<std::string> seen_;
  const OptionSpec* spec_ = nullptr;  // of the current key
  bool inside_ = false;
  bool in_list_ = false;
};

}  // namespace

absl::StatusOr<std::vector<GivenOption>> ParseConfig(const std::string& text, const std::string& name) {
  ConfigReader reader(name);
  const bool parsed = Json::sax_parse(text, &reader);
  if (!reader.status().ok()) return reader.status();
  if (!parsed) return absl::InvalidArgumentError(absl::StrCat(name, ": wanted JSON, got something else"));
  return reader.Take();
}

absl::StatusOr<std::vector<GivenOption>> ReadConfigFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxConfigBytes + 1, '\0');
  if (!file) return absl::NotFoundError(absl::StrCat("--config: wanted a readable JSON file, got '", path, "'"));
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::NotFoundError(absl::StrCat("--config: wanted a readable JSON file, got '", path, "'"));
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": wanted at most ", kMaxConfigBytes, " bytes, got more"));
  }
  return ParseConfig(text, path);
}

}  // namespace moed
