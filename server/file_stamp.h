// What tells one state of a file from another, so that a file is read again only when it was replaced or written to.
#ifndef MOED_SERVER_FILE_STAMP_H_
#define MOED_SERVER_FILE_STAMP_H_

#include <cstdint>
#include <string>

namespace moed {

struct FileStamp {
  uint64_t device = 0, inode = 0;  // zeros: there is no such file
  int64_t bytes = 0;
  int64_t written_ns = 0, changed_ns = 0;  // since the epoch: of the content, and of content, name or permissions

  bool operator==(const FileStamp&) const = default;
};

// Of the file that `path` leads to, through links. Take it before reading: then a write in between is seen next time.
FileStamp StampOf(const std::string& path);

}  // namespace moed

#endif  // MOED_SERVER_FILE_STAMP_H_
