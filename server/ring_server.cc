#include "server/ring_server.h"

#include <pthread.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/ring/doorbell.h"

namespace moed {
namespace {

constexpr std::chrono::milliseconds kSleep(100);  // at most, so that the end of a session is seen

template <size_t kSize>
void EndText(char (&text)[kSize]) {
  text[kSize - 1] = 0;
}

}  // namespace

// What a ring's thread and its calls have in common.
class RingShare {
 public:
  RingShare(std::shared_ptr<Region> region, uint64_t offset, uint32_t slots)
      : region_(std::move(region)), count_(slots), header_(ring::HeaderAt(region_->memory().data() + offset)),
        slots_(ring::SlotsAt(header_)), held_(slots) {}

  // Copies the submission of `slot` if the client may post it now.
  absl::Status Take(uint32_t slot, ring::Submission* submission) {
    if (slot >= count_) return absl::InvalidArgumentError(absl::StrCat("ring: wanted a slot below ", count_, ", got ", slot));
    if (held_[slot].exchange(true)) return absl::InvalidArgumentError(absl::StrCat("ring: slot ", slot, " was posted before it was answered"));
    std::memcpy(submission, &slots_[slot].submission, sizeof(*submission));
    std::atomic_signal_fence(std::memory_order_seq_cst);  // from here on only the copy counts
    asm volatile("" ::: "memory");
    EndText(submission->model);
    EndText(submission->request_id);
    return absl::OkStatus();
  }

  void Answer(uint32_t slot, uint32_t sequence, const ring::Completion& completion) {
    ring::Slot& target = slots_[slot];
    std::memcpy(&target.completion, &completion, sizeof(completion));
    held_[slot].store(false);  // before the client knows, who may post it again at once
    target.done.store(sequence, std::memory_order_release);
    ring::Ring(target.done, target.waits);
  }

  ring::Header& header() { return *header_; }
  uint32_t count() const { return count_; }
  const std::shared_ptr<Region>& region() const { return region_; }
  std::atomic<bool> ended{false};

 private:
  const std::shared_ptr<Region> region_;
  const uint32_t count_;
  ring::Header* const header_;
  ring::Slot* const slots_;
  std::vector<std::atomic<bool>> held_;  // slots that the client must leave alone
};

RingCall::RingCall(std::shared_ptr<RingShare> ring, uint32_t slot, const ring::Submission& submission, bool last)
    : ring_(std::move(ring)), slot_(slot), submission_(submission), last_(last), started_(std::chrono::steady_clock::now()) {}

const std::shared_ptr<Region>& RingCall::region() const { return ring_->region(); }

bool RingCall::Gone() const { return ring_->ended.load(std::memory_order_relaxed); }

void RingCall::Answer(const ring::Completion& completion) { ring_->Answer(slot_, submission_.sequence, completion); }

ring::Completion FailedCompletion(const absl::Status& why) {
  ring::Completion completion = {};
  completion.code = static_cast<int32_t>(why.code());
  why.message().copy(completion.message, sizeof(completion.message) - 1);
  return completion;
}

RingServer::RingServer(std::shared_ptr<Region> region, uint64_t offset, uint32_t slots, Options options)
    : options_(std::move(options)), share_(std::make_shared<RingShare>(std::move(region), offset, slots)) {
  thread_ = std::thread([this] {
    pthread_setname_np(pthread_self(), "ring");  // as `top -H` shows it
    ThreadMain();
  });
}

RingServer::~RingServer() {
  stop_.store(true);
  share_->ended.store(true);
  ring::Ring(share_->header().posted, share_->header().server_waits);
  thread_.join();
}

// Takes what was posted since `*taken`, a number that the client cannot touch.
absl::Status RingServer::TakePosted(uint32_t* taken) {
  const uint32_t posted = share_->header().posted.load(std::memory_order_acquire);
  if (posted - *taken > share_->count()) {
    return absl::InvalidArgumentError(
        absl::StrCat("ring: ", posted - *taken, " submissions were posted at once, the ring has ", share_->count(), " slots"));
  }
  for (; *taken != posted; ++*taken) {
    const uint32_t slot = share_->header().queue[*taken % share_->count()].load(std::memory_order_relaxed);
    ring::Submission submission;
    if (absl::Status status = share_->Take(slot, &submission); !status.ok()) return status;
    options_.handle(std::make_shared<RingCall>(share_, slot, submission, *taken + 1 == posted));
  }
  return absl::OkStatus();
}

void RingServer::ThreadMain() {
  uint32_t taken = 0;
  while (!stop_.load(std::memory_order_relaxed)) {
    ring::Header& header = share_->header();
    if (!ring::Wait(header.posted, taken, header.server_waits, options_.spin, kSleep)) continue;
    absl::Status status;
    try {
      status = TakePosted(&taken);
    } catch (const std::bad_alloc&) {
      status = absl::ResourceExhaustedError("ring: no memory for a submission");
    }
    if (status.ok()) continue;
    share_->ended.store(true);
    options_.abandon(status);
    return;
  }
}

}  // namespace moed
