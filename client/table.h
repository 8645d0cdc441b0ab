// Plain-text tables for people: columns as wide as their widest cell, numbers right-aligned. Not thread-safe.
#ifndef MOED_CLIENT_TABLE_H_
#define MOED_CLIENT_TABLE_H_

#include <string>
#include <vector>

namespace moed::client {

class Table {
 public:
  // Columns whose title starts with '>' are right-aligned; the mark is not printed.
  explicit Table(std::vector<std::string> titles);

  // A row; missing cells are empty, surplus cells are dropped.
  void Add(std::vector<std::string> cells);
  std::string Text() const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;  // the titles first
};

// "123 B", "12.3 KiB", "4.0 MiB", ...
std::string BytesText(double bytes);

}  // namespace moed::client

#endif  // MOED_CLIENT_TABLE_H_
