// Hidden states of a call that another thread writes a part at a time.
#ifndef MOED_TESTS_SUPPORT_COMING_ROWS_H_
#define MOED_TESTS_SUPPORT_COMING_ROWS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <thread>

#include "kernels/incoming_rows.h"

namespace moed::testing {

class ComingRows : public IncomingRows {
 public:
  // `bytes` at `from` are to go to `to`, `part` at a time, once Start is called. Both must outlive the object.
  ComingRows(const void* from, void* to, size_t bytes, size_t part)
      : from_(static_cast<const char*>(from)), to_(static_cast<char*>(to)), bytes_(bytes), part_(part) {}
  ~ComingRows() override {
    if (writer_.joinable()) writer_.join();
  }

  // At most once; without it nothing ever comes.
  void Start() {
    writer_ = std::thread([this] {
      for (size_t at = 0; at < bytes_; at += part_) {
        const size_t end = std::min(at + part_, bytes_);
        std::memcpy(to_ + at, from_ + at, end - at);
        there_.store(end, std::memory_order_release);
        std::this_thread::yield();
      }
    });
  }

  size_t WaitPast(size_t past) override {
    ++waits_;
    for (;; std::this_thread::yield()) {
      const size_t there = there_.load(std::memory_order_acquire);
      if (there > past || there == bytes_) return there;
    }
  }
  int waits() const { return waits_; }  // calls of WaitPast

 private:
  const char* const from_;
  char* const to_;
  const size_t bytes_, part_;
  std::atomic<size_t> there_{0};
  std::thread writer_;
  int waits_ = 0;
};

}  // namespace moed::testing

#endif  // MOED_TESTS_SUPPORT_COMING_ROWS_H_
