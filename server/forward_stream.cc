#include "server/forward_stream.h"

#include <utility>

namespace moed {

StreamReactor::StreamReactor(grpc::CallbackServerContext* context, OpenCalls* open, Begin begin)
    : context_(context), open_(open), begin_(std::move(begin)), deadline_(SteadyDeadline(context->deadline())) {
  open_->Add();
}

void StreamReactor::Refuse(const absl::Status& why) {
  finished_ = true;
  Finish(ToGrpc(why));
}

void StreamReactor::Start() { StartRead(&request_); }

void StreamReactor::OnReadDone(bool ok) {
  bool finish = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ok) {
      ++under_way_;
    } else {
      ended_ = true;
      finish = OverLocked();
      finished_ = finished_ || finish;
    }
  }
  if (finish) return Finish(grpc::Status::OK);
  if (!ok) return;
  grpc::ByteBuffer bytes;
  bytes.Swap(&request_);
  begin_(this, &bytes);  // the stream is not over before a read said so
  {
    std::lock_guard<std::mutex> lock(mutex_);
    paused_ = under_way_ >= kWindow;
    if (paused_) return;
  }
  StartRead(&request_);
}

void StreamReactor::Write(grpc::ByteBuffer answer) {
  grpc::ByteBuffer* first = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    answers_.push_back(std::move(answer));
    if (!writing_) {
      writing_ = true;
      first = &answers_.front();
    }
  }
  if (first != nullptr) StartWrite(first);
}

void StreamReactor::OnWriteDone(bool ok) {
  grpc::ByteBuffer* next = nullptr;
  bool read = false, finish = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    answers_.pop_front();
    --under_way_;
    if (!ok) {  // the client is gone: what waits to be written is over as well
      under_way_ -= static_cast<int>(answers_.size());
      answers_.clear();
    }
    writing_ = !answers_.empty();
    if (writing_) next = &answers_.front();
    read = std::exchange(paused_, paused_ && under_way_ >= kWindow) && !paused_;
    finish = OverLocked();
    finished_ = finished_ || finish;
  }
  if (next != nullptr) StartWrite(next);
  if (read) StartRead(&request_);
  if (finish) Finish(grpc::Status::OK);
}

void StreamReactor::OnDone() {
  OpenCalls* open = open_;
  delete this;
  open->Remove();
}

}  // namespace moed
