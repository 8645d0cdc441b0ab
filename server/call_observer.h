// Who is told how forwards went: the interface between those that carry and run calls and whoever counts them.
//
// Threads: any, several at once; an observer must neither block nor throw, since calls wait for it. A layer's observer is found
// once, when a model is known, and shared by all who work for the layer: what it counts is there for as long as one of them holds
// it.
#ifndef MOED_SERVER_CALL_OBSERVER_H_
#define MOED_SERVER_CALL_OBSERVER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace moed {

// How a forward came.
enum class Transport : uint8_t {
  kRpc,      // a message with all tensors in it
  kSession,  // a message, hidden states or output in memory that the client shares, of the host or of the device
  kRing,     // a submission of a ring
  kStream,   // an item of a stream of messages
};
inline constexpr int kTransports = 4;
// "rpc", "session", "ring", "stream".
inline const char* TransportName(Transport transport) {
  constexpr const char* kNames[kTransports] = {"rpc", "session", "ring", "stream"};
  return kNames[static_cast<size_t>(transport)];
}

// Why a forward was not computed although nothing was wrong with it.
enum class Drop : uint8_t {
  kNone,
  kExpired,    // its deadline passed
  kCancelled,  // its caller went away
  kQueue,      // the queue was full
  kBytes,      // too many bytes of requests were in flight
  kClient,     // its client had too much in flight
  kMemory,     // no memory for it
};
inline constexpr int kDrops = 7;

// A forward that has its answer, or that has none and never will.
struct FinishedForward {
  Transport transport = Transport::kRpc;
  absl::StatusCode code = absl::StatusCode::kOk;
  Drop drop = Drop::kNone;
  int64_t rows = 0;                          // 0 where that was not known
  int64_t received_bytes = 0, sent_bytes = 0;  // of the message, or of tensors where they are shared
  // Of a forward that was answered, in microseconds: see ForwardAnswer. send: until the answer was handed to the transport.
  int64_t receive_us = 0, queue_us = 0, compute_us = 0, send_us = 0;
  int64_t total_us = 0;                      // since the request was there, whatever its end
};

// What a device computed at once: rows of one layer, of one call or several.
struct FinishedRun {
  int calls = 0;
  int64_t rows = 0;
  int64_t compute_us = 0;
  // The experts of the rows, in any order, -1 for none, in one piece for each call; empty where they are not known on the host.
  std::span<const std::span<const int32_t>> ids;
};

class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  virtual void Finished(const FinishedForward& forward) = 0;
  virtual void Ran(const FinishedRun& run) = 0;
};

// A layer as its observer has to know it.
struct ObservedLayer {
  std::string model;
  int layer = 0;
  int first_expert = 0, end_expert = 0;  // experts [first_expert, end_expert) are held
};

class CallObserver {
 public:
  virtual ~CallObserver() = default;
  // The observer of a layer; the same one as long as anybody holds it. May lock and allocate.
  virtual std::shared_ptr<LayerObserver> OfLayer(const ObservedLayer& layer) = 0;
  // A forward that ended before its layer was known.
  virtual void Finished(const FinishedForward& forward) = 0;
};

}  // namespace moed

#endif  // MOED_SERVER_CALL_OBSERVER_H_
