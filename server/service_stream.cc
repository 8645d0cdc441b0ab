// ForwardStream: many forwards over one call.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "server/forward_stream.h"
#include "server/message_forward.h"
#include "server/retry_info.h"
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
  response.mutable_status()->set_retry_us(RetryMicroseconds(why));
  return Serialised(response);
}

}  // namespace

// What is known of an item from its arrival on.
struct MoeService::Item {
  const steady_clock::time_point started = steady_clock::now();
  std::string request_id;
  ForwardRecord record;

  // `status`, and when it refuses the item, why.
  absl::Status Refused(Drop why, absl::Status status) {
    if (absl::IsResourceExhausted(status)) record.SetDrop(why);
    return status;
  }
  void End(const absl::Status& status) {
    record.End(status, started);
    const auto took = std::chrono::duration_cast<std::chrono::microseconds>(steady_clock::now() - started);
    record.Log("Forward by stream", status, took.count(), request_id);
  }
};

// A request of a stream, to its answer. The stream lives until each of its items wrote one.
class MoeService::StreamForward final : public MessageForward {
 public:
  StreamForward(StreamReactor* stream, std::unique_ptr<ReceivedForward> parsed, std::shared_ptr<Item> item, ByteBudget* budget,
                size_t bytes, ClientShare share)
      : MessageForward(std::move(parsed)), stream_(stream), item_(std::move(item)), budget_(budget), bytes_(bytes),
        share_(std::move(share)), deadline_(std::min(stream->deadline(), RequestDeadline(request->message(), item_->started))) {}
  ~StreamForward() override { budget_->Give(bytes_); }

  TimePoint started() const override { return item_->started; }
  TimePoint deadline() const override { return deadline_; }
  bool Gone() const override { return stream_->Gone(); }
  void Fail(const absl::Status& why) override {
    End(why);
    stream_->Write(FailedAnswer(request->message().request_id(), why));
  }
  absl::Status TakeRows(int64_t rows) override { return item_->Refused(Drop::kClient, share_.TakeRows(rows)); }
  ForwardRecord& record() override { return item_->record; }

 private:
  void Deliver(grpc::ByteBuffer response) override {
    End(absl::OkStatus());
    stream_->Write(std::move(response));
  }

  // Before the answer: whoever has it may call again at once, and look at what was counted.
  void End(const absl::Status& status) {
    share_ = ClientShare();
    item_->End(status);
  }

  StreamReactor* const stream_;
  const std::shared_ptr<Item> item_;
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
  std::shared_ptr<Item> item;
  absl::Status status;
  try {
    item = std::make_shared<Item>();
    item->record.Begin(observer_, Transport::kStream, bytes->Length());
    status = SubmitStreamForward(stream, bytes, item);
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("no memory for this request");
  }
  if (status.ok()) return;
  if (item != nullptr) item->End(status);
  stream->Write(FailedAnswer(item == nullptr ? "" : item->request_id, status));
}

absl::Status MoeService::SubmitStreamForward(StreamReactor* stream, grpc::ByteBuffer* bytes, const std::shared_ptr<Item>& item) {
  if (absl::Status status = Admit(Kind::kComputes); !status.ok()) return status;
  ClientShare share = gate_ == nullptr ? ClientShare() : gate_->ShareOf(Plane::kData, stream->context());
  const size_t size = bytes->Length();
  if (uses_gpu_) {
    queue_->Expect();
    helpers_->Expect(CopyHelpers::For(size));
  }
  absl::Status taken = item->Refused(Drop::kClient, share.TakeBytes(static_cast<int64_t>(size)));
  if (!taken.ok()) return taken;
  taken = item->Refused(Drop::kBytes, budget_.Take(size));
  if (!taken.ok()) return WithRetryInfo(std::move(taken), queue_->RetryDelay());
  auto parsed = std::make_unique<ReceivedForward>();
  if (absl::Status status = ParseRequest(bytes, parsed.get()); !status.ok()) return budget_.Give(size), status;
  item->request_id = parsed->message().request_id();
  return SubmitMessage(std::make_shared<StreamForward>(stream, std::move(parsed), item, &budget_, size, std::move(share)));
}

}  // namespace moed
