// The server's end of one client's ring (proto/ring/layout.h): takes submissions, hands them on, writes completions.
//
// Threads: one of its own per ring takes submissions, in the order in which they were posted; it looks at the ring for some
// microseconds after each one and then sleeps. A RingCall may be answered on any thread, also when the ring is gone.
// A client that breaks the contract is abandoned: nothing of its ring is looked at any more.
#ifndef MOED_SERVER_RING_SERVER_H_
#define MOED_SERVER_RING_SERVER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "proto/ring/layout.h"
#include "server/region.h"
#include "server/sessions.h"

namespace moed {

class RingServer;
class RingShare;

// One submission on its way. Whoever holds it must call Answer once; the region stays mapped until the object goes.
class RingCall {
 public:
  // `last`: no other was posted behind it yet.
  RingCall(std::shared_ptr<RingShare> ring, uint32_t slot, const ring::Submission& submission, bool last);

  // The server's own copy, with every text ended.
  const ring::Submission& submission() const { return submission_; }
  const std::shared_ptr<Region>& region() const;
  std::chrono::steady_clock::time_point started() const { return started_; }
  bool last() const { return last_; }
  // Whether the session is over, so that nobody waits for the answer.
  bool Gone() const;
  // Hands the slot back to the client. `completion` is copied; its texts may be cut.
  void Answer(const ring::Completion& completion);

 private:
  const std::shared_ptr<RingShare> ring_;
  const uint32_t slot_;
  const ring::Submission submission_;
  const bool last_;
  const std::chrono::steady_clock::time_point started_;
};

// A completion that says why a submission failed.
ring::Completion FailedCompletion(const absl::Status& why);

class RingServer final : public SessionRing {
 public:
  struct Options {
    // How long to look for the next submission before sleeping; 0 where processors are scarce.
    std::chrono::microseconds spin{50};
    // Takes each submission; runs on the ring's thread, for which those behind it wait. It must see to it that the call is
    // answered.
    std::function<void(std::shared_ptr<RingCall>)> handle;
    // Called at most once, when the client broke the contract.
    std::function<void(const absl::Status&)> abandon;
  };

  // A ring of `slots` at `offset` of `region`, within it.
  RingServer(std::shared_ptr<Region> region, uint64_t offset, uint32_t slots, Options options);
  // Takes no more; calls on their way find that their client is gone.
  ~RingServer() override;

 private:
  void ThreadMain();
  absl::Status TakePosted(uint32_t* taken);

  const Options options_;
  const std::shared_ptr<RingShare> share_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace moed

#endif  // MOED_SERVER_RING_SERVER_H_
