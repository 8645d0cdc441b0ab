// A block of memory aligned to a cache line, or to a huge page when it is large (then the kernel is asked for huge pages).
// Contents are undefined until written.
#ifndef MOED_KERNELS_ALIGNED_BUFFER_H_
#define MOED_KERNELS_ALIGNED_BUFFER_H_

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace moed {

class AlignedBuffer {
 public:
  AlignedBuffer() = default;

  // False when the system has not enough memory; the buffer is then unchanged.
  bool Allocate(size_t bytes) {
    constexpr size_t kHugePage = size_t{2} << 20;
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    void* data = nullptr;
    if (posix_memalign(&data, alignment, bytes == 0 ? alignment : bytes) != 0) return false;
    if (alignment == kHugePage) madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
    data_.reset(static_cast<uint8_t*>(data));
    size_ = bytes;
    return true;
  }

  uint8_t* data() { return data_.get(); }
  const uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* data) const { std::free(data); }
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

}  // namespace moed

#endif  // MOED_KERNELS_ALIGNED_BUFFER_H_
