// What is known of one forward on its way, and the one place where its end is recorded: counted by an observer, and logged.
//
// Every transport has one for each call, from the moment it took it until it answers, whatever the answer. Threads: one at a time.
#ifndef MOED_SERVER_FORWARD_RECORD_H_
#define MOED_SERVER_FORWARD_RECORD_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/call_observer.h"
#include "server/forward_caller.h"
#include "server/wire.h"

namespace moed {

// A client's request id as it may be logged, cut to what a valid one has.
std::string PrintableId(const std::string& id);

class ForwardRecord {
 public:
  // `observer` may be null and must outlive the record.
  void Begin(CallObserver* observer, Transport transport, size_t received_bytes);
  // What a request asks for that is not valid otherwise, as far as it can be told.
  void SetAsked(const ModelTable& models, const std::string& model, int layer);
  // What the request turned out to be.
  void SetCall(const CheckedForward& checked);
  // How it came, as far as that is known.
  Transport transport() const { return forward_.transport; }
  void AddReceived(size_t bytes) { forward_.received_bytes += static_cast<int64_t>(bytes); }
  void SetSent(size_t bytes) { forward_.sent_bytes = static_cast<int64_t>(bytes); }
  // Why the call will be refused; without it RESOURCE_EXHAUSTED counts as a lack of memory. The first reason stays.
  void SetDrop(Drop drop) { forward_.drop = forward_.drop == Drop::kNone ? drop : forward_.drop; }
  // The times of an answer that is about to be handed over.
  void SetTimes(const ForwardAnswer& answer, int64_t send_us);

  // Counts the forward, once: later calls do nothing, and neither does a record that was not begun.
  void End(const absl::Status& status, std::chrono::steady_clock::time_point started);
  // The line of the log for a call of `method`, which took `took_us`: at debug, or at error when the server is at fault. For any
  // call, also one whose record was not begun. Never throws.
  void Log(const char* method, const absl::Status& status, int64_t took_us, const std::string& request_id) const;

 private:
  bool begun_ = false;
  CallObserver* observer_ = nullptr;
  std::shared_ptr<LayerObserver> layer_observer_;  // null: the layer is not known, or nobody observes
  std::string model_;
  int layer_ = 0;
  FinishedForward forward_;
};

}  // namespace moed

#endif  // MOED_SERVER_FORWARD_RECORD_H_
