// The shared-memory half of the wire contract: what a client and a server on one host read and write in memory that both see.
//
// A client makes a memfd, seals it against shrinking and growing, and passes it to the server over the session socket (session.h).
// That memory is the session's region. The client decides what lies where in it: one ring (optional) and tensors. Offsets are from
// the region's first byte. A request is either an RPC whose message names places in the region, or a slot of the ring.
//
// The ring: `slots` slots, each for one call at a time, and a queue of slot numbers through which the client posts them.
//   client: fills slot s, writes s to queue[posted % slots], then posted += 1 (release), then wakes the server when server_waits
//   server: copies the submission, runs it, fills the completion, then done = submission.sequence (release), then wakes the client
//           when the slot's `waits` is set
// A slot that is posted belongs to the server until done equals its sequence. Answers come in any order.
// Both sides wait in the same way (doorbell.h): they look at the word for some microseconds, set the flag that they wait, look once
// more, and sleep on the word with the kernel's futex.
//
// Trust: the server copies a submission, ids, weights and logits before it looks at them, and keeps its own count of what was
// posted and of which slots it holds; only hidden states and outputs are used where they lie. A client that writes there at the
// wrong time gets wrong answers of its own. One that posts more than `slots`, or a slot that the server holds, loses its session.
//
// Everything is little-endian and in the layout that these structs have on x86-64 and AArch64 Linux, which the assertions state.
#ifndef MOED_PROTO_RING_LAYOUT_H_
#define MOED_PROTO_RING_LAYOUT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moed::ring {

inline constexpr uint32_t kMagic = 0x64656f6d;  // "moed"
inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kMaxSlots = 256;
inline constexpr size_t kAlignment = 64;  // of the ring, and of every tensor in the region

enum class Routing : uint32_t { kGate = 0, kTopK = 1, kLogits = 2 };
inline constexpr uint32_t kRoutedOnly = 1;     // Submission::flags
inline constexpr uint32_t kReturnRouting = 2;  // then used_ids and used_weights are written
inline constexpr uint32_t kPerSlot = 4;        // the output is [M * k, H]

// One forward, as ForwardRequest says it. M is `rows`; dtypes are values of moe.v1.DType; texts end with a zero byte.
struct Submission {
  uint32_t sequence;  // of this use of the slot; never 0, and another than the slot's last one
  uint32_t flags;
  int32_t layer;
  Routing routing;
  uint32_t hidden_dtype;
  uint32_t output_dtype;  // 0: that of hidden
  uint64_t rows;
  uint64_t cols;            // H
  uint64_t top_k;           // kTopK: k, columns of ids and weights; else with kReturnRouting: the largest k that there is room for
  uint64_t num_experts;     // kLogits: E, columns of the logits
  uint64_t hidden_offset;   // [M, H]
  uint64_t output_offset;   // [M, H], written by the server; no byte of hidden
  uint64_t ids_offset;      // kTopK: [M, k] i32
  uint64_t weights_offset;  // kTopK: [M, k] f32
  uint64_t logits_offset;   // kLogits: [M, E] f32
  uint64_t used_ids_offset, used_weights_offset;  // kReturnRouting: [M, k], k of the completion
  uint64_t timeout_us;      // from the moment that the server takes it; 0: none
  char model[136];          // may be empty when the server has one model
  char request_id[136];
  uint64_t scales_offset;   // [M] f32, of hidden states in one byte an element
  uint8_t reserved[112];    // zero
};
static_assert(sizeof(Submission) == 512);

// The answer, as ForwardResponse says it; the output is at the submission's output_offset.
struct Completion {
  int32_t code;  // of grpc::StatusCode; 0: OK
  uint32_t top_k;        // kReturnRouting: k
  uint64_t generation;
  int64_t receive_us, queue_us, compute_us, send_us;
  int64_t batch_rows;    // of the run that computed it
  char backend[64];
  char scheme[256];
  char message[504];     // of an error, cut
  uint64_t weights_id;   // as ForwardResponse
  int64_t retry_us;      // of an error: how long to wait before the call is posted again; 0: not told
};
static_assert(sizeof(Completion) == 896);

struct alignas(64) Slot {
  Submission submission;
  alignas(64) std::atomic<uint32_t> done;   // the sequence of the last submission that was answered
  std::atomic<uint32_t> waits;              // the client sleeps, or is about to, on done
  alignas(64) Completion completion;
  uint8_t padding[576];
};
static_assert(sizeof(Slot) == 2048);

// Followed by `slots` slots.
struct alignas(64) Header {
  uint32_t magic, version, slots;
  alignas(64) std::atomic<uint32_t> posted;        // how many ever, modulo 2^32
  alignas(64) std::atomic<uint32_t> server_waits;  // the server sleeps, or is about to, on posted
  alignas(64) std::atomic<uint32_t> queue[kMaxSlots];
};
static_assert(sizeof(Header) == 192 + 4 * kMaxSlots);
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Bytes of a ring.
constexpr size_t RingBytes(uint32_t slots) { return sizeof(Header) + size_t{slots} * sizeof(Slot); }

// A ring at `memory`, aligned to kAlignment.
inline Header* HeaderAt(void* memory) { return static_cast<Header*>(memory); }
inline Slot* SlotsAt(void* memory) { return reinterpret_cast<Slot*>(static_cast<char*>(memory) + sizeof(Header)); }

}  // namespace moed::ring

#endif  // MOED_PROTO_RING_LAYOUT_H_
