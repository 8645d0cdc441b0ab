#include "server/message_forward.h"

#include <chrono>
#include <utility>

namespace moed {
namespace {

using std::chrono::steady_clock;

int64_t Microseconds(steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
}

// A slice of `bytes` that owns `memory`: it goes back where it came from with the slice's last reference, on whatever thread.
grpc::Slice SliceOf(CallMemory memory, size_t bytes) {
  auto owner = std::make_unique<CallMemory>(std::move(memory));
  void* data = owner->data();
  return grpc::Slice(data, bytes, [](void* held) { delete static_cast<CallMemory*>(held); }, owner.release());
}

}  // namespace

void MessageForward::Prepare() {
  head_ = grpc::Slice(OutputHead(output.dtype, output.rows, output.cols, output_follows));
  rest_ = BeginAnswer(request->message());
}

void MessageForward::Answer(ForwardAnswer answer) {
  EndAnswer(answer.info, output.rows, &rest_);
  moe::v1::Timing* timing = rest_.mutable_timing();
  timing->set_receive_us(answer.receive_us);
  timing->set_queue_us(answer.queue_us);
  timing->set_send_us(Microseconds(steady_clock::now() - answer.computed));
  record().SetTimes(answer, timing->send_us());
  const grpc::Slice data = answer.output ? SliceOf(*std::move(answer.output), output.bytes()) : grpc::Slice();
  const grpc::Slice slices[] = {std::move(head_), data, grpc::Slice(rest_.SerializeAsString())};
  grpc::ByteBuffer response(slices, 3);
  record().SetSent(response.Length() + (output_follows ? 0 : output.bytes()));
  Deliver(std::move(response));
}

}  // namespace moed
