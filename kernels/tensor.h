// Tensor views: the element types and the two-dimensional views that cross the kernel interface.
//
// A view owns nothing; whoever made the memory keeps it alive for as long as the view is used. All views are dense and
// row-major: element (r, c) is at index r * cols + c. Views may be copied freely between threads; the memory behind a
// MutableTensorView has one writer at a time.
#ifndef MOED_KERNELS_TENSOR_H_
#define MOED_KERNELS_TENSOR_H_

#include <cstddef>
#include <cstdint>

namespace moed {

// Element type of activations and of unquantized tensors.
enum class DType : uint8_t { kF32, kBf16, kF16 };

// Bytes of one element.
constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Lower-case name as it appears on command lines and in messages: "f32", "bf16", "f16".
constexpr const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32: return "f32";
    case DType::kBf16: return "bf16";
    case DType::kF16: return "f16";
  }
  return "?";
}

// Where the memory behind a view lies. Whoever takes a view says which places it takes; without a word it is the host.
enum class Place : uint8_t { kHost, kDevice };

// A read-only matrix [rows, cols].
struct TensorView {
  const void* data = nullptr;  // may be null when rows == 0
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  Place place = Place::kHost;

  size_t row_bytes() const { return static_cast<size_t>(cols) * DTypeBytes(dtype); }
  size_t bytes() const { return static_cast<size_t>(rows) * row_bytes(); }
  const void* row(int64_t r) const { return static_cast<const char*>(data) + static_cast<size_t>(r) * row_bytes(); }
  // Rows [first, first + count) of this view.
  TensorView slice(int64_t first, int64_t count) const { return {row(first), dtype, count, cols, place}; }
};

// A matrix [rows, cols] that is written.
struct MutableTensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  Place place = Place::kHost;

  size_t row_bytes() const { return static_cast<size_t>(cols) * DTypeBytes(dtype); }
  size_t bytes() const { return static_cast<size_t>(rows) * row_bytes(); }
  void* row(int64_t r) const { return static_cast<char*>(data) + static_cast<size_t>(r) * row_bytes(); }
  MutableTensorView slice(int64_t first, int64_t count) const { return {row(first), dtype, count, cols, place}; }
};

}  // namespace moed

#endif  // MOED_KERNELS_TENSOR_H_
