#include "server/region.h"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "proto/ring/session.h"

namespace moed {

absl::StatusOr<std::shared_ptr<Region>> Region::Map(int fd, uint64_t bytes) {
  if (const std::string wrong = ring::CheckRegion(fd, bytes); !wrong.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("region: ", wrong));
  }
  void* data = ring::MapRegion(fd, bytes);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("region of ", bytes, " bytes: ", std::generic_category().message(errno)));
  }
  return std::shared_ptr<Region>(new Region({static_cast<std::byte*>(data), bytes}));
}

Region::~Region() {
  pin_.reset();  // before the memory goes
  munmap(memory_.data(), memory_.size());
}

absl::StatusOr<std::byte*> Region::At(const std::string& field, uint64_t offset, uint64_t bytes) const {
  if (offset % ring::kAlignment != 0) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": wanted an offset that is a multiple of ", ring::kAlignment, ", got ", offset));
  }
  if (offset <= memory_.size() && bytes <= memory_.size() - offset) return memory_.data() + offset;
  return absl::InvalidArgumentError(absl::StrCat(field, ": wanted a tensor within the ", memory_.size(), " bytes of the session, got ",
                                                 bytes, " bytes from ", offset, " on"));
}

}  // namespace moed
