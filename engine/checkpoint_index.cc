#include "engine/checkpoint_index.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "engine/json_text.h"
#include "engine/outside_name.h"
#include "engine/text_file.h"

namespace moed {
namespace {

using nlohmann::json;

// Longest name of a tensor, as in a safetensors header, and of a file, as in any directory.
constexpr size_t kMaxTensorName = 4096;
constexpr size_t kMaxFileName = 255;

// The characters of the index for the parser. Ends early at a token that is too long.
class Source {
 public:
  explicit Source(TextStream* stream) : stream_(stream) { Advance(); }

  void Advance() {
    ended_ = !stream_->Next(&current_);
    if (ended_ || gauge_.Feed(current_)) return;
    ended_ = true;
    token_too_long_ = true;
  }
  char current() const { return current_; }
  bool ended() const { return ended_; }
  bool token_too_long() const { return token_too_long_; }

 private:
  TextStream* const stream_;
  TokenGauge gauge_;
  char current_ = 0;
  bool ended_ = false;
  bool token_too_long_ = false;
};

// The one pass over a Source as the iterator that the parser wants; all copies share it.
class SourceIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  SourceIterator() = default;  // the end
  explicit SourceIterator(Source* source) : source_(source) {}
  char operator*() const { return source_->current(); }
  SourceIterator& operator++() {
    source_->Advance();
    return *this;
  }
  bool operator==(const SourceIterator& other) const { return AtEnd() == other.AtEnd(); }
  bool operator!=(const SourceIterator& other) const { return !(*this == other); }

 private:
  bool AtEnd() const { return source_ == nullptr || source_->ended(); }

  Source* source_ = nullptr;
};

// A file name of the index stays in the directory.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name.size() <= kMaxFileName && name != "." &&
         name.find_first_of(std::string("/\\\0", 3)) == std::string::npos && name.find("..") == std::string::npos;
}

// Hands the entries of weight_map to the visitor; everything else is skipped. Events, since a parser that builds a tree
// keeps the last of two equal keys.
class IndexEvents : public nlohmann::json_sax<json> {
 public:
  explicit IndexEvents(const IndexVisitor& visit) : visit_(visit) {}

  bool found() const { return seen_map_; }
  size_t entries() const { return entries_; }
  const std::string& error() const { return error_; }
  const absl::Status& visited() const { return visited_; }

  bool start_object(std::size_t) override {
    if (depth_ == 1 && at_map_)
      in_map_ = true;
    else if (in_map_)
      return NotAFile("an object");
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    if (depth_ == 1) in_map_ = false;
    return true;
  }
  bool start_array(std::size_t) override {
    if (!Value("an array")) return false;
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == 1) {
      at_map_ = name == "weight_map";
      if (at_map_ && seen_map_) return Fail("weight_map appears twice");
      seen_map_ = seen_map_ || at_map_;
    }
    if (in_map_ && name.size() > kMaxTensorName) {
      return Fail(absl::StrCat("weight_map has tensor ", QuotedName(name), " of ", name.size(), " bytes, wanted at most ",
                               kMaxTensorName));
    }
    name_ = std::move(name);
    return true;
  }
  bool string(std::string& file) override {
    if (!in_map_) return Value("a string");
    if (!IsPlainFileName(file)) {
      return Fail(absl::StrCat("tensor ", QuotedName(name_), " is mapped to ", QuotedName(file),
                               ", wanted the name of a file in the same directory"));
    }
    if (++entries_ > kMaxIndexTensors) return Fail(absl::StrCat("weight_map has more than ", kMaxIndexTensors, " tensors"));
    visited_ = visit_(name_, file);
    return visited_.ok();
  }

  bool null() override { return Value("null"); }
  bool boolean(bool) override { return Value("a boolean"); }
  bool number_integer(json::number_integer_t) override { return Value("a number"); }
  bool number_unsigned(json::number_unsigned_t) override { return Value("a number"); }
  bool number_float(json::number_float_t, const std::string&) override { return Value("a number"); }
  bool binary(json::binary_t&) override { return Value("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    return Fail(absl::StrCat("not JSON at byte ", position, ": ", std::string(error.what()).substr(0, kErrorShown)));
  }

 private:
  static constexpr size_t kErrorShown = 200;  // the parser quotes what it has read of a token

  bool Fail(const std::string& what) {
    if (error_.empty()) error_ = what;
    return false;
  }
  bool NotAFile(const char* got) {
    return Fail(absl::StrCat("weight_map maps tensor ", QuotedName(name_), " to ", got, ", wanted a file name"));
  }
  // A value that is no string of the map.
  bool Value(const char* got) {
    if (in_map_) return NotAFile(got);
    if (depth_ == 0) return Fail(absl::StrCat("wanted an object, found ", got));
    if (depth_ == 1 && at_map_) return Fail(absl::StrCat("weight_map is ", got, ", wanted an object"));
    return true;
  }

  const IndexVisitor& visit_;
  int depth_ = 0;
  bool at_map_ = false;  // the last key of the outermost object was weight_map
  bool in_map_ = false;
  bool seen_map_ = false;
  size_t entries_ = 0;
  std::string name_;
  std::string error_;
  absl::Status visited_;
};

// The name of entry number `ordinal`, for a message: names are not kept, so the index is read once more.
std::string NameOf(const std::string& path, size_t ordinal) {
  std::string found = absl::StrCat("number ", ordinal);
  size_t at = 0;
  (void)ScanIndex(path, [&](const std::string& tensor, const std::string&) {
    if (at++ == ordinal) found = QuotedName(tensor);
    return absl::OkStatus();
  });
  return found;
}

}  // namespace

absl::Status ScanIndex(const std::string& path, const IndexVisitor& visit) {
  const absl::StatusOr<std::unique_ptr<TextStream>> stream = TextStream::Open(path, kMaxIndexBytes);
  if (!stream.ok()) return stream.status();
  Source source(stream->get());
  IndexEvents events(visit);
  const bool parsed = json::sax_parse(SourceIterator(&source), SourceIterator(), &events);
  if (!(*stream)->status().ok()) return (*stream)->status();
  if (!events.visited().ok()) return events.visited();
  const auto refuse = [&path](const std::string& what) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", what));
  };
  if (source.token_too_long())
    return refuse(absl::StrCat("a text or number longer than ", TokenGauge::kLongest, " characters"));
  if (!parsed) return refuse(events.error());
  if (!events.found()) return refuse("has no weight_map");
  if (events.entries() == 0) return refuse("weight_map is empty");
  return absl::OkStatus();
}

absl::StatusOr<std::set<std::string>> CheckIndex(const std::string& path) {
  struct Entry {
    std::array<uint64_t, 2> hash;
    size_t ordinal;
  };
  std::vector<Entry> entries;
  std::set<std::string> files;
  const absl::Status status = ScanIndex(path, [&](const std::string& tensor, const std::string& file) {
    entries.push_back({HashName(tensor), entries.size()});
    files.insert(file);
    if (files.size() <= kMaxIndexFiles) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(path, ": names more than ", kMaxIndexFiles, " files"));
  });
  if (!status.ok()) return status;
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.hash < b.hash; });
  const auto twice =
      std::adjacent_find(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.hash == b.hash; });
  if (twice == entries.end()) return files;
  return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map has tensor ", NameOf(path, twice->ordinal), " twice"));
}

}  // namespace moed
