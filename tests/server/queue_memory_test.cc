// Memory that ends between two runs of a work: it is dropped, once, and the queue goes on.
#include <catch2/catch.hpp>

#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "server/work_queue.h"
#include "tests/support/sanitizer.h"
#include "tests/support/skip.h"

namespace moed {
namespace {

// What a std::deque of parts asks for when its last piece is full: the only memory that putting a work back may need.
constexpr size_t kPiece = 512 / sizeof(QueuedWork::Part) * sizeof(QueuedWork::Part);
thread_local bool no_memory = false;  // for such pieces

}  // namespace
}  // namespace moed

// Sanitizers have operators of their own, which cannot be replaced.
#if !MOED_ADDRESS_SANITIZER && !MOED_THREAD_SANITIZER
void* operator new(size_t bytes) {
  void* const memory = moed::no_memory && bytes == moed::kPiece ? nullptr : std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
#endif

namespace moed {
namespace {

constexpr std::chrono::microseconds kHere(100);

// Its first run leaves the queue without memory, its second is the last.
class Work final : public QueuedWork {
 public:
  explicit Work(std::vector<absl::Status>* dropped) : QueuedWork({.group = "layer", .rows = 1}), dropped_(dropped) {}
  void Run(std::span<Part> parts) override {
    no_memory = ++runs_ == 1;
    parts.front().done = runs_ == 2;
    parts.front().next = 0;
  }
  void Drop(const absl::Status& why) override {
    no_memory = false;
    dropped_->push_back(why);
  }

 private:
  std::vector<absl::Status>* const dropped_;
  int runs_ = 0;
};

class Short final : public QueuedWork {
 public:
  Short() : QueuedWork({.group = "layer", .rows = 1}) {}
  void Run(std::span<Part> parts) override { parts.front().done = true; }
  void Drop(const absl::Status&) override {}
};

}  // namespace

TEST_CASE("A work that cannot be put back for lack of memory is dropped once, on whatever thread it ran, and others run") {
  if (testing::kAddressSanitizer || testing::kThreadSanitizer) return testing::Skip("a sanitizer's operator new never fails");
  for (const bool here : {false, true}) {
    int drops = 0;
    for (int before = 1; before < 20; ++before) {  // a new piece is due after some works
      INFO("on the thread that brought it: " << here << ", works before: " << before);
      WorkQueue queue({}, [] { return WorkQueue::TimePoint{}; });
      const auto run_short = [&queue] {
        REQUIRE(queue.Push(std::make_shared<Short>()).ok());
        REQUIRE(queue.RunNext());
      };
      for (int i = 0; i < before; ++i) run_short();
      std::vector<absl::Status> dropped;
      REQUIRE(queue.Push(std::make_shared<Work>(&dropped), here ? kHere : std::chrono::microseconds(0)).ok());
      if (!here) REQUIRE(queue.RunNext());
      no_memory = false;
      CHECK(queue.RunNext() == dropped.empty());  // its second run
      CHECK(dropped.size() <= 1);
      if (!dropped.empty()) CHECK(absl::IsResourceExhausted(dropped[0]));
      drops += static_cast<int>(dropped.size());
      run_short();
      CHECK(queue.counters().finished == queue.counters().accepted);
    }
    CHECK(drops > 0);
  }
}

}  // namespace moed
