#include "engine/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

using nlohmann::json;

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr uint64_t kMaxIndexBytes = 64ull << 20;
constexpr size_t kNamesShown = 10;

// weight_map: tensor name -> file name.
using WeightMap = absl::flat_hash_map<std::string, std::string>;

// Reads weight_map from the events of the index; everything else in it is skipped. Events, since a parser that builds a
// tree keeps the last of two equal keys.
class IndexEvents : public nlohmann::json_sax<json> {
 public:
  explicit IndexEvents(WeightMap* map) : map_(map) {}

  bool found() const { return seen_map_; }
  const std::string& error() const { return error_; }

  bool start_object(std::size_t) override {
    if (depth_ == 1 && at_map_) in_map_ = true;
    else if (in_map_) return NotAString("an object");
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
    name_ = std::move(name);
    return true;
  }
  bool string(std::string& file) override {
    if (!in_map_) return Value("a string");
    if (map_->emplace(name_, std::move(file)).second) return true;
    return Fail(absl::StrCat("weight_map has tensor \"", name_, "\" twice"));
  }

  bool null() override { return Value("null"); }
  bool boolean(bool) override { return Value("a boolean"); }
  bool number_integer(json::number_integer_t) override { return Value("a number"); }
  bool number_unsigned(json::number_unsigned_t) override { return Value("a number"); }
  bool number_float(json::number_float_t, const std::string&) override { return Value("a number"); }
  bool binary(json::binary_t&) override { return Value("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    return Fail(absl::StrCat("not JSON at byte ", position, ": ", error.what()));
  }

 private:
  bool Fail(const std::string& what) {
    if (error_.empty()) error_ = what;
    return false;
  }
  bool NotAString(const char* got) {
    return Fail(absl::StrCat("weight_map maps tensor \"", name_, "\" to ", got, ", wanted a file name"));
  }
  // A value that is no string of the map.
  bool Value(const char* got) {
    if (in_map_) return NotAString(got);
    if (depth_ == 0) return Fail(absl::StrCat("wanted an object, found ", got));
    if (depth_ == 1 && at_map_) return Fail(absl::StrCat("weight_map is ", got, ", wanted an object"));
    return true;
  }

  WeightMap* const map_;
  int depth_ = 0;
  bool at_map_ = false;   // the last key of the outermost object was weight_map
  bool in_map_ = false;
  bool seen_map_ = false;
  std::string name_;
  std::string error_;
};

absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  const absl::StatusOr<std::string> text = ReadTextFile(path, kMaxIndexBytes);
  if (!text.ok()) return text.status();
  WeightMap map;
  IndexEvents events(&map);
  if (!json::sax_parse(*text, &events)) return absl::InvalidArgumentError(absl::StrCat(path, ": ", events.error()));
  if (!events.found()) return absl::InvalidArgumentError(absl::StrCat(path, ": has no weight_map"));
  if (map.empty()) return absl::InvalidArgumentError(absl::StrCat(path, ": weight_map is empty"));
  return map;
}

// A file name of the index stays in the directory.
bool IsPlainFileName(const std::string& name) {
  return !name.empty() && name != "." && name.find_first_of(std::string("/\\\0", 3)) == std::string::npos &&
         name.find("..") == std::string::npos;
}

// "12: a, b, ... (the first 10)", sorted.
std::string NameList(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  std::string out = absl::StrCat(names.size(), ": ");
  for (size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) absl::StrAppend(&out, i == 0 ? "" : ", ", names[i]);
  if (names.size() > kNamesShown) absl::StrAppend(&out, ", ... (the first ", kNamesShown, ")");
  return out;
}

// Names in `directory` that end in ".safetensors", sorted.
absl::StatusOr<std::vector<std::string>> ListSafetensors(const std::string& directory) {
  DIR* dir = ::opendir(directory.c_str());
  if (dir == nullptr) {
    const int error = errno;
    if (error == ENOENT) return absl::NotFoundError(absl::StrCat("no such directory: ", directory));
    if (error == ENOTDIR) return absl::InvalidArgumentError(absl::StrCat(directory, " is not a directory"));
    return absl::ErrnoToStatus(error, absl::StrCat("cannot list ", directory));
  }
  const std::string suffix = ".safetensors";
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name.size() > suffix.size() && name.compare(name.size() - suffix.size(), suffix.size(), suffix) == 0) {
      names.push_back(name);
    }
  }
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

bool Exists(const std::string& path) {
  struct stat facts;
  return ::lstat(path.c_str(), &facts) == 0;
}

// The files of a checkpoint, opened, and by file name.
struct Shards {
  std::vector<std::unique_ptr<SafetensorsFile>> files;  // in the order of their names
  std::map<std::string, const SafetensorsFile*> by_name;
};

absl::StatusOr<Shards> OpenShards(const std::string& directory, const std::set<std::string>& names) {
  Shards shards;
  for (const std::string& name : names) {
    absl::StatusOr<std::unique_ptr<SafetensorsFile>> file = SafetensorsFile::Open(absl::StrCat(directory, "/", name));
    if (!file.ok()) return file.status();
    shards.by_name[name] = file->get();
    shards.files.push_back(*std::move(file));
  }
  return shards;
}

// The table of an indexed checkpoint: mapped names only, each from the file that the index says.
absl::Status FillFromIndex(const std::string& index_path, const WeightMap& map, const Shards& shards, TensorTable* tensors) {
  std::vector<std::string> missing;
  tensors->reserve(map.size());
  for (const auto& [name, file_name] : map) {
    const SafetensorsFile* file = shards.by_name.at(file_name);
    const auto found = file->tensors().find(name);
    if (found == file->tensors().end()) {
      missing.push_back(absl::StrCat(name, " (", file_name, ")"));
    } else {
      tensors->emplace(found->first, TensorRef{file, &found->second});
    }
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensors that their file lacks, ", NameList(missing)));
}

// A mapped name that a second mapped file holds too: which of the two is meant cannot be known. Counts the names that the
// index leaves out.
absl::StatusOr<size_t> CountUnmapped(const std::string& index_path, const Shards& shards,
                                     const TensorTable& tensors) {
  std::vector<std::string> twice;
  size_t unmapped = 0;
  for (const auto& [file_name, file] : shards.by_name) {
    for (const auto& [name, info] : file->tensors()) {
      const auto mapped = tensors.find(name);
      if (mapped == tensors.end()) {
        ++unmapped;
      } else if (mapped->second.file != file) {
        twice.push_back(absl::StrCat(name, " (", mapped->second.file->path(), " and ", file->path(), ")"));
      }
    }
  }
  if (twice.empty()) return unmapped;
  return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensors in two mapped files, ", NameList(twice)));
}

absl::StatusOr<std::set<std::string>> MappedFiles(const std::string& index_path, const WeightMap& map) {
  std::set<std::string> names;
  for (const auto& [name, file] : map) {
    if (!IsPlainFileName(file)) {
      return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensor \"", name, "\" is mapped to \"", file,
                                                     "\", wanted the name of a file in the same directory"));
    }
    names.insert(file);
  }
  return names;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> present = ListSafetensors(path);
  if (!present.ok()) return present.status();
  const std::string index_path = absl::StrCat(path, "/", kIndexName);
  const bool indexed = Exists(index_path);

  WeightMap map;
  std::set<std::string> names = {kSingleName};
  if (indexed) {
    absl::StatusOr<WeightMap> read = ReadIndex(index_path);
    if (!read.ok()) return read.status();
    map = *std::move(read);
    absl::StatusOr<std::set<std::string>> mapped = MappedFiles(index_path, map);
    if (!mapped.ok()) return mapped.status();
    names = *std::move(mapped);
  } else if (!Exists(absl::StrCat(path, "/", kSingleName))) {
    return absl::NotFoundError(absl::StrCat(path, ": holds neither ", kSingleName, " nor ", kIndexName, "; ",
                                            present->size(), " other .safetensors files"));
  }

  absl::StatusOr<Shards> shards = OpenShards(path, names);
  if (!shards.ok()) return shards.status();
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  checkpoint->path_ = path;
  if (indexed) {
    const absl::Status status = FillFromIndex(index_path, map, *shards, &checkpoint->tensors_);
    if (!status.ok()) return status;
    const absl::StatusOr<size_t> unmapped = CountUnmapped(index_path, *shards, checkpoint->tensors_);
    if (!unmapped.ok()) return unmapped.status();
    if (*unmapped > 0) {
      checkpoint->warnings_.push_back(
          absl::StrCat(index_path, ": ignored ", *unmapped, " tensors that the index does not map"));
    }
  } else {
    const SafetensorsFile* file = shards->files.front().get();
    checkpoint->tensors_.reserve(file->tensors().size());
    for (const auto& [name, info] : file->tensors()) checkpoint->tensors_.emplace(name, TensorRef{file, &info});
  }
  for (const std::string& name : *present) {
    if (names.count(name) > 0) continue;
    checkpoint->warnings_.push_back(absl::StrCat(path, "/", name, ": ignored, ",
                                                 indexed ? "the index does not map it" : "there is no index that maps it"));
  }
  checkpoint->files_ = std::move(shards->files);
  return checkpoint;
}

TensorRef Checkpoint::Find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? TensorRef{} : found->second;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, uint64_t limit) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat facts;
  absl::Status status;
  if (::fstat(fd, &facts) != 0) {
    status = absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
  } else if (!S_ISREG(facts.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  }
  // In steps, up to one byte beyond the limit: the size on disk is a hint only.
  std::string text;
  char buffer[64 * 1024];
  while (status.ok() && text.size() <= limit) {
    const size_t wanted = static_cast<size_t>(std::min<uint64_t>(sizeof(buffer), limit + 1 - text.size()));
    const ssize_t got = ::read(fd, buffer, wanted);
    if (got == 0) break;
    if (got < 0 && errno != EINTR) status = absl::DataLossError(absl::StrCat(path, ": ", strerror(errno)));
    if (got > 0) text.append(buffer, static_cast<size_t>(got));
  }
  ::close(fd);
  if (!status.ok()) return status;
  if (text.size() > limit) return absl::InvalidArgumentError(absl::StrCat(path, ": wanted at most ", limit, " bytes"));
  return text;
}

}  // namespace moed
