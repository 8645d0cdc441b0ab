// One stream of forwards: requests as they come, answers as they finish, each with its request's id.
//
// Threads: gRPC calls the reactor one event at a time; items may be answered on any thread. At most kWindow items are under way: then
// the stream reads no further until one was written, so a client that does not read its answers is held up, and nobody else. The
// stream ends when the client sends no more and every answer was written, or it is cancelled and its items are over.
#ifndef MOED_SERVER_FORWARD_STREAM_H_
#define MOED_SERVER_FORWARD_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "absl/status/status.h"
#include "server/call.h"

namespace moed {

class StreamReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  static constexpr int kWindow = 32;

  // Begins an item: it ends with one Write, which `begin` may make at once. Called on gRPC's threads.
  using Begin = std::function<void(StreamReactor* stream, grpc::ByteBuffer* bytes)>;

  StreamReactor(grpc::CallbackServerContext* context, OpenCalls* open, Begin begin);
  // Before Start: the stream ends with `why` at once. `this` may be gone then.
  void Refuse(const absl::Status& why);
  // Reads the first request.
  void Start();

  // The answer of an item. `this` may be gone then.
  void Write(grpc::ByteBuffer answer);

  grpc::CallbackServerContext& context() { return *context_; }
  // Whether the client went away, or the stream's deadline passed.
  bool Gone() const { return context_->IsCancelled(); }
  std::chrono::steady_clock::time_point deadline() const { return deadline_; }

 private:
  enum class Next { kNothing, kRead, kFinish };

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone() override;
  bool OverLocked() const { return ended_ && under_way_ == 0 && !writing_ && !finished_; }

  grpc::CallbackServerContext* const context_;
  OpenCalls* const open_;
  const Begin begin_;
  const std::chrono::steady_clock::time_point deadline_;
  grpc::ByteBuffer request_;
  std::mutex mutex_;                       // guards what follows
  std::deque<grpc::ByteBuffer> answers_;   // the first is being written when writing_
  int under_way_ = 0;                      // items begun and not yet written
  bool ended_ = false;                     // the client sends no more
  bool paused_ = false;                    // for the window
  bool writing_ = false, finished_ = false;
};

}  // namespace moed

#endif  // MOED_SERVER_FORWARD_STREAM_H_
