// Rows of a call that are still being written when the call starts, so that what needs no row is done meanwhile.
//
// Threads: WaitPast is called by one thread at a time, the one that the call runs on; others write the rows meanwhile. Whoever gave
// the rows to a call keeps their memory as long as anybody writes to it, also when the call fails before it waited.
#ifndef MOED_KERNELS_INCOMING_ROWS_H_
#define MOED_KERNELS_INCOMING_ROWS_H_

#include <cstddef>

namespace moed {

class IncomingRows {
 public:
  virtual ~IncomingRows() = default;

  // Waits until more than `bytes` bytes from the first one on are there, or all, and returns how many are: they may be read and do
  // not change any more. Ends whatever other threads do, since the caller helps to write; later answers are never smaller.
  virtual size_t WaitPast(size_t bytes) = 0;
};

}  // namespace moed

#endif  // MOED_KERNELS_INCOMING_ROWS_H_
