// ForwardStream: many forwards over one call.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "server/forward_stream.h"
#include "server/message_forward.h"
#include "server/service.h"

namespace moed {
namespace {

namespace v1 = moe::v1;
using std::chrono::steady_clock;

grpc::ByteBuffer FailedAnswer(const std::string& request_id, const absl::Status& why) {
  v1::ForwardResponse response;
  response.set_request_id(request_id);
  response.mutable_status()->set_code(static_cast<int32_t>(why.code()));
  response.mutable_status()->set_message(std::string(why.message()));
  return Serialised(response);
}

}  // namespace

// A request of a stream, to its answer. The stream lives until each of its items wrote one.
class MoeService::StreamForward final : public MessageForward {
 public:
  StreamForward(StreamReactor* stream, std::unique_ptr<ReceivedForward> parsed, steady_clock::time_point started, ByteBudget* budget,
                size_t bytes, ClientShare share)
      : MessageForward(std::move(parsed)), stream_(stream), started_(started), budget_(budget), bytes_(bytes),
        share_(std::move(share)), deadline_(std::min(stream->deadline(), RequestDeadline(request->message(), started))) {}
  ~StreamForward() override { budget_->Give(bytes_); }

  TimePoint started() const override { return started_; }
  TimePoint deadline() const override { return deadline_; }
  bool Gone() const override { return stream_->Gone(); }
  void Fail(const absl::Status& why) override {
    share_ = ClientShare();  // before the answer: whoever has it may call again at once
    stream_->Write(FailedAnswer(request->message().request_id(), why));
  }
  absl::Status TakeRows(int64_t rows) override { return share_.TakeRows(rows); }

 private:
  void Deliver(grpc::ByteBuffer response) override {
    share_ = ClientShare();
    stream_->Write(std::move(response));
  }

  StreamReactor* const stream_;
  const steady_clock::time_point started_;
  ByteBudget* const budget_;  // from which bytes_ were taken
  const size_t bytes_;
  ClientShare share_;
  const TimePoint deadline_;
};

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* MoeService::ForwardStream(grpc::CallbackServerContext* context) {
  auto* stream = new StreamReactor(context, &open_, [this](StreamReactor* from, grpc::ByteBuffer* bytes) {
    BeginStreamForward(from, bytes);
  });
  absl::Status status = gate_ == nullptr ? absl::OkStatus() : gate_->Admit(Plane::kData, *context);
  if (status.ok()) status = Admit(Kind::kComputes);
  if (status.ok()) {
    stream->Start();
  } else {
    stream->Refuse(status);
  }
  return stream;
}

void MoeService::BeginStreamForward(StreamReactor* stream, grpc::ByteBuffer* bytes) {
  std::string request_id;
  absl::Status status;
  try {
    status = SubmitStreamForward(stream, bytes, &request_id);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (!status.ok()) stream->Write(FailedAnswer(request_id, status));
}

absl::Status MoeService::SubmitStreamForward(StreamReactor* stream, grpc::ByteBuffer* bytes, std::string* request_id) {
  const steady_clock::time_point started = steady_clock::now();
  if (absl::Status status = Admit(Kind::kComputes); !status.ok()) return status;
  ClientShare share = gate_ == nullptr ? ClientShare() : gate_->ShareOf(Plane::kData, stream->context());
  const size_t size = bytes->Length();
  if (uses_gpu_) {
    queue_->Expect();
    helpers_->Expect(CopyHelpers::For(size));
  }
  if (absl::Status status = share.TakeBytes(static_cast<int64_t>(size)); !status.ok()) return status;
  if (absl::Status status = budget_.Take(size); !status.ok()) return WithRetryInfo(std::move(status), queue_->RetryDelay());
  auto parsed = std::make_unique<ReceivedForward>();
  if (absl::Status status = ParseRequest(bytes, parsed.get()); !status.ok()) return budget_.Give(size), status;
  *request_id = parsed->message().request_id();
  const auto caller = std::make_shared<StreamForward>(stream, std::move(parsed), started, &budget_, size, std::move(share));
  return SubmitMessage(caller);
}

}  // namespace moed
