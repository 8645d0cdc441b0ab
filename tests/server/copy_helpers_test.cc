// Threads that help to copy: they come when they are expected, are never needed, hold what they copy, and end with a stop.
#include "server/copy_helpers.h"

#include <catch2/catch.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace moed {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

template <typename Condition>
bool Soon(const Condition& condition) {
  const auto end = steady_clock::now() + std::chrono::seconds(10);
  while (!condition() && steady_clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
  return condition();
}

// Pieces that are counted; the first `meeting` threads that take part wait for each other before they take one.
struct Pieces : SharedCopy {
  Pieces(int pieces, int meeting, std::atomic<int>* alive) : left(pieces), meeting(meeting), alive(alive) { ++*alive; }
  ~Pieces() override { --*alive; }
  void TakePart() override {
    {
      std::unique_lock<std::mutex> lock(mutex);
      if (++came >= meeting) all_came.notify_all();
      if (!all_came.wait_for(lock, std::chrono::seconds(10), [this] { return came >= meeting; })) met = false;
    }
    while (left.fetch_sub(1) > 0) ++copied;
  }

  std::atomic<int> left, copied{0};
  const int meeting;
  std::atomic<int>* const alive;
  std::mutex mutex;
  std::condition_variable all_came;
  std::atomic<int> came{0};
  std::atomic<bool> met{true};
};

}  // namespace

TEST_CASE("Messages of several hundred KiB have a helper, larger ones more, small ones none") {
  CHECK(CopyHelpers::For(0) == 0);
  CHECK(CopyHelpers::For(size_t{128} << 10) == 0);
  CHECK(CopyHelpers::For(size_t{256} << 10) == 1);
  CHECK(CopyHelpers::For(size_t{1} << 20) == 4);
  CHECK(CopyHelpers::For(size_t{256} << 20) == CopyHelpers::kMost);
}

TEST_CASE("As many helpers as are wanted come, expected or not, and no more") {
  std::atomic<int> alive{0};
  CopyHelpers helpers;
  helpers.Start(2);
  for (const int wanted : {1, 2}) {
    for (const bool expected : {true, false}) {
      for (int round = 0; round < 20; ++round) {
        auto copy = std::make_shared<Pieces>(100, 1 + wanted, &alive);
        if (expected) helpers.Expect(wanted);
        helpers.Copy(copy, wanted);  // hangs for ten seconds where a helper does not come
        CHECK(copy->met);
        CHECK(copy->came == 1 + wanted);
        CHECK(Soon([&] { return copy->copied == 100; }));
      }
    }
  }
  CHECK(Soon([&] { return alive == 0; }));
}

TEST_CASE("Without helpers, before a start and after a stop, the caller copies everything") {
  std::atomic<int> alive{0};
  CopyHelpers helpers;
  const auto copy_alone = [&] {
    auto copy = std::make_shared<Pieces>(10, 1, &alive);
    helpers.Expect(2);
    helpers.Copy(copy, 2);
    CHECK(copy->copied == 10);
    CHECK(copy->came == 1);
    copy.reset();
    CHECK(alive == 0);
  };
  copy_alone();
  helpers.Start(0);
  copy_alone();
  helpers.Stop();
  copy_alone();
  CopyHelpers started;
  started.Start(2);
  started.Expect(2);
  started.Stop();
  auto copy = std::make_shared<Pieces>(10, 1, &alive);
  started.Copy(copy, 2);
  CHECK(copy->came == 1);
}

TEST_CASE("Helpers that were expected for nothing sleep again, and come for the next copy") {
  std::atomic<int> alive{0};
  CopyHelpers helpers;
  helpers.Start(2);
  for (int i = 0; i < 200; ++i) {
    helpers.Expect(1 + i % 2);
    std::this_thread::sleep_for(std::chrono::microseconds(i % 5 * 40));
  }
  auto copy = std::make_shared<Pieces>(10, 3, &alive);
  helpers.Copy(copy, 2);
  CHECK(copy->met);
}

TEST_CASE("A copy stays as long as a helper is at it, and a stop waits for that helper") {
  struct Blocked : SharedCopy {
    explicit Blocked(std::atomic<int>* alive) : alive(alive) { ++*alive; }
    ~Blocked() override { --*alive; }
    // The caller waits for the helper to come, which stays.
    void TakePart() override {
      ++came;
      if (std::this_thread::get_id() == caller) {
        Soon([this] { return came == 2; });
      } else {
        while (!go_on) std::this_thread::sleep_for(milliseconds(1));
      }
    }
    std::thread::id caller;
    std::atomic<int> came{0};
    std::atomic<bool> go_on{false};
    std::atomic<int>* const alive;
  };
  std::atomic<int> alive{0};
  CopyHelpers helpers;
  helpers.Start(1);
  auto copy = std::make_shared<Blocked>(&alive);
  std::thread caller([&] {
    copy->caller = std::this_thread::get_id();
    helpers.Copy(copy, 1);
  });
  CHECK(Soon([&] { return copy->came == 2; }));
  std::atomic<bool> stopped{false};
  std::thread stopper([&] {
    helpers.Stop();
    stopped = true;
  });
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(copy.use_count() > 1);  // somebody is at it
  CHECK_FALSE(stopped);
  copy->go_on = true;
  caller.join();
  stopper.join();
  CHECK(copy.use_count() == 1);
}

TEST_CASE("Many copies at once all end, whoever helps, also across a stop") {
  std::atomic<int> alive{0}, wrong{0};
  CopyHelpers helpers;
  helpers.Start(2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < 2000; ++i) {
        auto copy = std::make_shared<Pieces>(5, 1, &alive);
        if (i % (caller + 1) == 0) helpers.Expect(2);
        helpers.Copy(copy, 1 + i % 2);
        wrong += copy->left > 0;
        wrong += !Soon([&] { return copy->copied == 5; });
        if (caller == 0 && i == 1500) helpers.Stop();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
  CHECK(alive == 0);
}

}  // namespace moed
