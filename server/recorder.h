// Some of the real calls, each into a file of its own (engine/recorded_call.h): what `--record DIR` does.
//
// Which ones: calls are numbered in the order in which they come, whatever layer and transport; one is sampled when a fixed hash of
// its number, as a fraction of all hashes, is below the rate. The same order samples the same calls, and layers that are called in
// turn all have their share, which a simple "every n-th" would not give them.
// What it costs: a call that is not sampled one counter. One that is has its tensors copied, at the latest before its answer, since
// they belong to its caller after that; a thread of the recorder writes them. What waits for the disk is bounded, in calls and
// bytes that are taken when a call is sampled: without room a call is not recorded. No call waits for the disk or fails with it.
// Files appear complete: written under another name and renamed, whose drafts the next start removes after a kill.
// Threads: any; a Recording is one call's, on one thread at a time. Recordings hold their recorder.
#ifndef MOED_SERVER_RECORDER_H_
#define MOED_SERVER_RECORDER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "engine/engine.h"
#include "engine/recorded_call.h"
#include "server/call_observer.h"
#include "server/wire.h"

namespace moed {

// Why a sampled call is not recorded.
enum class RecordLoss : uint8_t {
  kRows,    // more rows than are recorded of one call
  kDevice,  // tensors in device memory
  kQueue,   // too much waited for the disk
  kMemory,  // no memory for the copies
  kFailed,  // the call had no result
  kDisk,    // the file could not be written
  kLimit,   // the folder is full
};
inline constexpr int kRecordLosses = 7;
// "rows", "device", "queue", "memory", "failed", "disk", "limit".
const char* RecordLossName(RecordLoss loss);

// OK when `folder` is one that this process may write to. INVALID_ARGUMENT, which starts with "--record".
absl::Status CheckRecordFolder(const std::string& folder);

class Recording;

class Recorder : public std::enable_shared_from_this<Recorder> {
 public:
  struct Options {
    std::string folder;
    double rate = 0.001;                          // 0 to 1
    uint64_t max_bytes = uint64_t{1} << 30;       // of all that lies in the folder
    int64_t max_rows = 256;                       // of one call
    size_t queue_bytes = size_t{256} << 20;       // of sampled calls that are not written yet
    int queue_calls = 64;
    // Of the server, for the files.
    bool deterministic = false;
    std::string activations = "file";
  };
  struct Counts {
    bool active = true;         // false: the folder is full
    uint64_t recorded = 0;      // files written
    uint64_t bytes = 0;         // of theirs
    uint64_t folder_bytes = 0;  // of all in the folder, with what was there before
    std::array<uint64_t, kRecordLosses> lost{};
  };
  using Clock = std::function<std::chrono::system_clock::time_point()>;
  using Write = std::function<absl::Status(const std::string& path, const RecordedCall& call)>;

  // Takes the folder for itself, counts what is there, and starts the thread. Errors as CheckRecordFolder; UNAVAILABLE when another
  // server records there.
  static absl::StatusOr<std::shared_ptr<Recorder>> Open(Options options, Clock clock, Write write = WriteRecordedCall);
  ~Recorder();

  // Counts the call; its recording when it is sampled and can be recorded, else null. `model` is the call's.
  std::shared_ptr<Recording> Sample(const CheckedForward& checked, const ModelFacts& model, const std::string& request_id,
                                    Transport transport);

  // Writes what waits and ends the thread; calls that are sampled later are lost. May be called again.
  void Stop();

  Counts counts() const;

 private:
  friend class Recording;
  Recorder(Options options, Clock clock, Write write, int folder_fd);
  bool Sampled();
  std::shared_ptr<Recording> Begin(const CheckedForward& checked, const ModelFacts& model, const std::string& request_id,
                                   Transport transport);
  bool Reserve(uint64_t bytes);
  void Release(uint64_t bytes);
  void Lose(RecordLoss loss) { lost_[static_cast<size_t>(loss)].fetch_add(1, std::memory_order_relaxed); }
  void Push(RecordedCall call, uint64_t reserved);
  void ThreadMain();
  void WriteOne(const RecordedCall& call);
  absl::StatusOr<uint64_t> WriteFile(const RecordedCall& call);

  struct Waiting {
    RecordedCall call;
    uint64_t reserved = 0;
  };

  const Options options_;
  const Clock clock_;
  const Write write_;
  const int folder_fd_;       // which is locked
  const uint64_t threshold_;  // of the rate
  std::atomic<uint64_t> calls_{0};
  std::atomic<bool> active_{true};
  std::atomic<uint64_t> recorded_{0}, bytes_{0}, folder_bytes_{0};
  std::array<std::atomic<uint64_t>, kRecordLosses> lost_{};
  uint64_t number_ = 0;       // of files; the thread's
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::deque<Waiting> waiting_;
  uint64_t reserved_bytes_ = 0;
  int reserved_calls_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

// A sampled call on its way to its answer. Without a Complete it counts as failed.
class Recording {
 public:
  Recording(std::shared_ptr<Recorder> recorder, RecordedCall call, uint64_t reserved);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // Copies the hidden states as they came, `bytes` of them, of a call that runs on others made of these.
  void KeepHidden(const void* came, size_t bytes);
  // The call's result, before its caller has it: `output` is on the host, as `checked` says. Copies and hands over. Never throws;
  // at most once.
  void Complete(const CheckedForward& checked, const void* output, const ForwardInfo& info, int64_t receive_us, int64_t queue_us);

 private:
  void Fill(const CheckedForward& checked, const void* output, const ForwardInfo& info);

  const std::shared_ptr<Recorder> recorder_;
  RecordedCall call_;
  uint64_t reserved_;
  bool kept_hidden_ = false;
  RecordLoss loss_ = RecordLoss::kFailed;  // should it end now
  bool complete_ = false;
};

}  // namespace moed

#endif  // MOED_SERVER_RECORDER_H_
