#include "engine/checkpoint.h"

#include <dirent.h>
#include <errno.h>
#include <sys/stat.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "engine/checkpoint_index.h"

namespace moed {
namespace {

constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kSingleName[] = "model.safetensors";
constexpr size_t kNamesShown = 10;

// Names for a message: how many, and the first ten in the order of the alphabet, however many come.
class NameSample {
 public:
  void Add(std::string name) {
    ++count_;
    first_.insert(std::move(name));
    if (first_.size() > kNamesShown) first_.erase(std::prev(first_.end()));
  }
  bool empty() const { return count_ == 0; }

  // "12: a, b, ... (the first 10)".
  std::string Text() const {
    std::string out = absl::StrCat(count_, ": ");
    for (const std::string& name : first_) absl::StrAppend(&out, name == *first_.begin() ? "" : ", ", name);
    if (count_ > kNamesShown) absl::StrAppend(&out, ", ... (the first ", kNamesShown, ")");
    return out;
  }

 private:
  size_t count_ = 0;
  std::multiset<std::string> first_;
};

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
absl::Status FillFromIndex(const std::string& index_path, const Shards& shards, TensorTable* tensors) {
  NameSample missing;
  absl::Status status = ScanIndex(index_path, [&](const std::string& name, const std::string& file_name) {
    const auto shard = shards.by_name.find(file_name);
    if (shard == shards.by_name.end()) return absl::DataLossError(absl::StrCat(index_path, ": changed while it was read"));
    const auto found = shard->second->tensors().find(name);
    if (found == shard->second->tensors().end()) {
      missing.Add(absl::StrCat(name, " (", file_name, ")"));
    } else {
      tensors->emplace(found->first, TensorRef{shard->second, &found->second});
    }
    return absl::OkStatus();
  });
  if (!status.ok() || missing.empty()) return status;
  return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensors that their file lacks, ", missing.Text()));
}

// A mapped name that a second mapped file holds too: which of the two is meant cannot be known. Counts the names that the
// index leaves out.
absl::StatusOr<size_t> CountUnmapped(const std::string& index_path, const Shards& shards,
                                     const TensorTable& tensors) {
  NameSample twice;
  size_t unmapped = 0;
  for (const auto& [file_name, file] : shards.by_name) {
    for (const auto& [name, info] : file->tensors()) {
      const auto mapped = tensors.find(name);
      if (mapped == tensors.end()) {
        ++unmapped;
      } else if (mapped->second.file != file) {
        twice.Add(absl::StrCat(name, " (", mapped->second.file->path(), " and ", file->path(), ")"));
      }
    }
  }
  if (twice.empty()) return unmapped;
  return absl::InvalidArgumentError(absl::StrCat(index_path, ": tensors in two mapped files, ", twice.Text()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(const std::string& path) {
  const absl::StatusOr<std::vector<std::string>> present = ListSafetensors(path);
  if (!present.ok()) return present.status();
  const std::string index_path = absl::StrCat(path, "/", kIndexName);
  const bool indexed = Exists(index_path);

  std::set<std::string> names = {kSingleName};
  if (indexed) {
    absl::StatusOr<std::set<std::string>> mapped = CheckIndex(index_path);
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
    const absl::Status status = FillFromIndex(index_path, *shards, &checkpoint->tensors_);
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

}  // namespace moed
