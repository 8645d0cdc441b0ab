// The reference's prepared layer: weights on the device, calls in chunks of rows.
//
// Threads: the layer is immutable; each call has a stream and memory of its own and leaves nothing behind.
#include "kernels/cuda/reference_layer.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "kernels/activation_quant.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/reference_kernels.h"
#include "kernels/cuda/reference_quantize.h"
#include "kernels/cuda/reference_rows.h"
#include "kernels/prepare_experts.h"

namespace moed::cuda {
namespace {

// Slots computed at once: bounds the doubles on the device whatever M is.
constexpr int64_t kChunkSlots = 2048;

// What was tried when a call's work on the device failed.
constexpr char kCall[] = "reference call";

// The first error of several calls.
class FirstError {
 public:
  void Add(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  cudaError_t get() const { return error_; }

 private:
  cudaError_t error_ = cudaSuccess;
};

// An ordered stream of work. The destructor waits for the work: whatever it reads or writes is declared before the stream.
class Stream {
 public:
  Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() {
    if (stream_ == nullptr) return;
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }

  absl::Status Open() { return ToStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), kCall); }
  absl::Status Wait() const { return ToStatus(cudaStreamSynchronize(stream_), kCall); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

template <typename T>
T* As(const DeviceBuffer& buffer) {
  return reinterpret_cast<T*>(buffer.data());
}

// One projection of all experts on the device.
struct Projection {
  DeviceBuffer weights;       // float [E, rows, cols], exact
  DeviceBuffer bias;          // float [E, rows], empty without biases
  DeviceBuffer input_scales;  // float [E]

  absl::Status Allocate(int64_t experts, int64_t rows, int64_t cols, bool biases) {
    absl::Status status = weights.Allocate(static_cast<size_t>(experts * rows * cols) * sizeof(float), "weights of the reference");
    if (!status.ok()) return status;
    status = bias.Allocate(biases ? static_cast<size_t>(experts * rows) * sizeof(float) : 0, "biases of the reference");
    if (!status.ok()) return status;
    return input_scales.Allocate(static_cast<size_t>(experts) * sizeof(float), "input scales of the reference");
  }

  // Decodes expert `expert` into `staging`, which is reused, and copies it.
  absl::Status Put(int expert, const LinearWeights& linear, std::vector<float>* staging) {
    const int64_t size = linear.rows * linear.cols;
    staging->resize(static_cast<size_t>(size));
    for (int64_t row = 0; row < linear.rows; ++row) DequantizeRow(linear, row, staging->data() + row * linear.cols);
    FirstError error;
    error.Add(cudaMemcpy(As<float>(weights) + expert * size, staging->data(), static_cast<size_t>(size) * sizeof(float),
                         cudaMemcpyHostToDevice));
    if (!linear.bias.empty()) {
      error.Add(cudaMemcpy(As<float>(bias) + expert * linear.rows, linear.bias.data(), linear.bias.size() * sizeof(float),
                           cudaMemcpyHostToDevice));
    }
    error.Add(cudaMemcpy(As<float>(input_scales) + expert, &linear.input_scale, sizeof(float), cudaMemcpyHostToDevice));
    return ToStatus(error.get(), "copy of the reference's weights");
  }

  size_t bytes() const { return weights.size() + bias.size() + input_scales.size(); }
};

struct LayerWeights {
  Projection gate, up, down;
};

absl::Status AllocateLayer(const MoeDesc& desc, LayerWeights* layer) {
  absl::Status status = layer->gate.Allocate(desc.num_experts, desc.intermediate, desc.hidden, desc.biases);
  if (status.ok()) status = layer->up.Allocate(desc.num_experts, desc.intermediate, desc.hidden, desc.biases);
  if (status.ok()) status = layer->down.Allocate(desc.num_experts, desc.hidden, desc.intermediate, desc.biases);
  return status;
}

// Memory of one call on the device, for chunks of up to `rows` rows with `slots` slots.
struct CallMemory {
  DeviceBuffer x, out;        // the chunk's hidden states and results, as the call has them
  DeviceBuffer sources, experts, positions, weights, tiles;  // SortedRows; grown where needed. `weights` by copy or by slot
  DeviceBuffer copies;        // double [slots, H]: the experts' rows, then their results
  DeviceBuffer gate_x, up_x;  // double [slots, H]: quantized rows, empty when they are not
  DeviceBuffer gate, up;      // double [slots, I]; gate becomes h
  DeviceBuffer largest;       // float [2]: of x and of h

  absl::Status Allocate(const MoeDesc& desc, int64_t rows, int64_t slots, DType x_dtype, DType out_dtype) {
    const auto quantized = [](const LinearScheme& linear) { return linear.input.mode == ActivationMode::kNone ? 0 : 1; };
    const int64_t hidden = slots * desc.hidden * static_cast<int64_t>(sizeof(double));
    const int64_t intermediate = slots * desc.intermediate * static_cast<int64_t>(sizeof(double));
    const std::pair<DeviceBuffer*, int64_t> wanted[] = {
        {&x, rows * desc.hidden * static_cast<int64_t>(DTypeBytes(x_dtype))},
        {&out, rows * desc.hidden * static_cast<int64_t>(DTypeBytes(out_dtype))},
        {&copies, hidden},
        {&gate_x, hidden * quantized(desc.scheme.gate)},
        {&up_x, hidden * quantized(desc.scheme.up)},
        {&gate, intermediate},
        {&up, intermediate},
        {&largest, 2 * static_cast<int64_t>(sizeof(float))}};
    for (const auto& [buffer, bytes] : wanted) {
      absl::Status status = buffer->Allocate(static_cast<size_t>(bytes), kCall);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }
};

// Copies an array of the host into `buffer`. The array outlives the stream's work.
template <typename T>
absl::Status Upload(std::span<const T> values, DeviceBuffer* buffer, const Stream& stream) {
  if (buffer->size() < values.size_bytes()) {
    absl::Status status = buffer->Allocate(values.size_bytes(), kCall);
    if (!status.ok()) return status;
  }
  if (values.empty()) return absl::OkStatus();
  return ToStatus(cudaMemcpyAsync(buffer->data(), values.data(), values.size_bytes(), cudaMemcpyHostToDevice, stream.get()), kCall);
}

absl::Status CopyIn(const TensorView& view, void* device, const Stream& stream) {
  if (view.bytes() == 0) return absl::OkStatus();
  const cudaMemcpyKind kind = view.place == Place::kDevice ? cudaMemcpyDeviceToDevice : cudaMemcpyHostToDevice;
  return ToStatus(cudaMemcpyAsync(device, view.data, view.bytes(), kind, stream.get()), kCall);
}

absl::Status CopyOut(const void* device, const MutableTensorView& view, const Stream& stream) {
  if (view.bytes() == 0) return absl::OkStatus();
  const cudaMemcpyKind kind = view.place == Place::kDevice ? cudaMemcpyDeviceToDevice : cudaMemcpyDeviceToHost;
  return ToStatus(cudaMemcpyAsync(view.data, device, view.bytes(), kind, stream.get()), kCall);
}

class PreparedReference : public PreparedMoe {
 public:
  PreparedReference(MoeDesc desc, LayerWeights weights, int device)
      : desc_(std::move(desc)), weights_(std::move(weights)), device_(device) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext&) const override {
    absl::Status valid = ValidateBatch(desc_, batch, out);
    if (!valid.ok()) return valid;
    return RunChunks(batch, out);
  }

  // As a standard call of the counted rows, each with one slot of weight 1.
  absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext&) const override {
    absl::Status valid = ValidateBatchedExperts(desc_, batch, out);
    if (!valid.ok()) return valid;
    std::vector<int32_t> ids;
    for (int32_t e = 0; e < desc_.num_experts; ++e) ids.insert(ids.end(), static_cast<size_t>(batch.counts[e]), e);
    const int64_t rows = static_cast<int64_t>(ids.size());
    const std::vector<float> weights(ids.size(), 1.0f);
    TensorView x = {nullptr, batch.x.dtype, rows, desc_.hidden, Place::kDevice};
    MutableTensorView y = {nullptr, out.dtype, rows, desc_.hidden, Place::kDevice};
    absl::Status status = ToStatus(cudaSetDevice(device_), kCall);
    DeviceBuffer x_memory, y_memory;
    if (status.ok()) status = x_memory.Allocate(x.bytes(), kCall);
    if (status.ok()) status = y_memory.Allocate(y.bytes(), kCall);
    if (!status.ok()) return status;
    x.data = x_memory.data();
    y.data = y_memory.data();
    status = ForCounted(batch, [&](int64_t row, int64_t at, int64_t count, const Stream& stream) {
      return CopyIn(batch.x.slice(row, count), x_memory.data() + static_cast<size_t>(at) * x.row_bytes(), stream);
    });
    if (status.ok()) status = RunChunks({x, ids, weights, 1}, y);
    if (!status.ok()) return status;
    return ForCounted(batch, [&](int64_t row, int64_t at, int64_t count, const Stream& stream) {
      return CopyOut(y.row(at), out.slice(row, count), stream);
    });
  }

  size_t WorkspaceBytes(int64_t, int) const override { return 0; }
  size_t BatchedWorkspaceBytes(int64_t) const override { return 0; }
  size_t ResidentBytes() const override { return weights_.gate.bytes() + weights_.up.bytes() + weights_.down.bytes(); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  // copy(row, at, count, stream) for each expert's counted rows: [row, row + count) of the batch, [at, at + count) without padding.
  template <typename Copy>
  static absl::Status ForCounted(const BatchedExperts& batch, const Copy& copy) {
    Stream stream;
    absl::Status status = stream.Open();
    int64_t at = 0;
    for (size_t e = 0; status.ok() && e < batch.counts.size(); ++e) {
      const int64_t count = batch.counts[e];
      status = copy(static_cast<int64_t>(e) * batch.max_m, at, count, stream);
      at += count;
    }
    return status.ok() ? stream.Wait() : status;
  }

  absl::Status RunChunks(const MoeBatch& batch, const MutableTensorView& out) const {
    const int64_t rows = batch.x.rows;
    if (rows == 0) return absl::OkStatus();
    const int64_t fitting = std::max<int64_t>(1, kChunkSlots / batch.top_k);
    const int64_t step = SpansRows(desc_.scheme) ? rows : std::min(rows, fitting);
    CallMemory memory;
    Stream stream;
    absl::Status status = ToStatus(cudaSetDevice(device_), kCall);
    if (status.ok()) status = memory.Allocate(desc_, step, step * batch.top_k, batch.x.dtype, out.dtype);
    if (status.ok()) status = stream.Open();
    for (int64_t first = 0; status.ok() && first < rows; first += step) {
      const int64_t count = std::min(step, rows - first);
      MoeBatch chunk = batch;
      chunk.x = batch.x.slice(first, count);
      chunk.ids = batch.ids.subspan(first * batch.top_k, count * batch.top_k);
      chunk.weights = batch.weights.subspan(first * batch.top_k, count * batch.top_k);
      status = RunChunk(chunk, out.slice(first, count), &memory, stream);
    }
    return status;
  }

  absl::Status RunChunk(const MoeBatch& batch, const MutableTensorView& out, CallMemory* memory, const Stream& stream) const {
    const SortedRows sorted = SortRows(batch.ids, batch.weights, batch.top_k, desc_.num_experts);
    absl::Status status = CopyIn(batch.x, memory->x.data(), stream);
    if (status.ok()) status = Upload(std::span(sorted.sources), &memory->sources, stream);
    if (status.ok()) status = Upload(std::span(sorted.experts), &memory->experts, stream);
    if (status.ok()) status = Upload(std::span(sorted.positions), &memory->positions, stream);
    if (status.ok()) status = Upload(std::span(sorted.tiles), &memory->tiles, stream);
    const std::span<const float> sorted_weights = sorted.weights;
    if (status.ok()) status = Upload(desc_.weight_on_input ? sorted_weights : batch.weights, &memory->weights, stream);
    if (status.ok()) status = Compute(batch, out.dtype, sorted, *memory, stream.get());
    if (status.ok()) status = CopyOut(memory->out.data(), out, stream);
    const absl::Status done = stream.Wait();  // in any case: `sorted` and the caller's tensors are read until then
    return status.ok() ? done : status;
  }

  // memory.out = the layer of memory.x.
  absl::Status Compute(const MoeBatch& batch, DType out_dtype, const SortedRows& sorted, const CallMemory& memory,
                       cudaStream_t stream) const {
    const int64_t routed = static_cast<int64_t>(sorted.sources.size());
    const float* weights = As<float>(memory.weights);
    double *copies = As<double>(memory.copies), *h = As<double>(memory.gate), *up = As<double>(memory.up);
    float* largest = As<float>(memory.largest);
    FirstError error;
    error.Add(LaunchGather({memory.x.data(), batch.x.dtype, As<int32_t>(memory.sources), desc_.weight_on_input ? weights : nullptr,
                            copies, routed, desc_.hidden},
                           stream));
    error.Add(cudaMemsetAsync(largest, 0, 2 * sizeof(float), stream));
    if (SpansRows(desc_.scheme)) error.Add(LargestInput(batch, routed, memory, stream));

    const QuantScheme& scheme = desc_.scheme;
    const auto product = [&](const LinearScheme& linear, const Projection& projection, const double* rows, double* quantized,
                             const float* absmax, int64_t inputs, int64_t outputs, double* y) {
      if (linear.input.mode != ActivationMode::kNone) {
        error.Add(LaunchQuantizeRows({linear.input, rows, quantized, routed, inputs, As<int32_t>(memory.experts),
                                      As<float>(projection.input_scales), absmax},
                                     stream));
        rows = quantized;
      }
      error.Add(LaunchProduct({As<RowTile>(memory.tiles), static_cast<int64_t>(sorted.tiles.size()), rows,
                               As<float>(projection.weights), As<float>(projection.bias), y, inputs, outputs},
                              stream));
    };
    product(scheme.gate, weights_.gate, copies, As<double>(memory.gate_x), largest, desc_.hidden, desc_.intermediate, h);
    product(scheme.up, weights_.up, copies, As<double>(memory.up_x), largest, desc_.hidden, desc_.intermediate, up);
    error.Add(LaunchActivate(desc_.activation, h, up, routed * desc_.intermediate, stream));
    if (SpansRows(scheme)) error.Add(LaunchAbsMax(h, routed * desc_.intermediate, largest + 1, stream));
    product(scheme.down, weights_.down, h, h, largest + 1, desc_.intermediate, desc_.hidden, copies);

    error.Add(LaunchCombine({copies, As<int32_t>(memory.positions), desc_.weight_on_input ? nullptr : weights, batch.x.rows,
                             desc_.hidden, batch.top_k, memory.out.data(), out_dtype},
                            stream));
    return ToStatus(error.get(), kCall);
  }

  // The scale of x spans the request's rows, whether this layer holds their experts or not; with the weight on the input, the
  // copies.
  cudaError_t LargestInput(const MoeBatch& batch, int64_t routed, const CallMemory& memory, cudaStream_t stream) const {
    float* largest = As<float>(memory.largest);
    if (desc_.weight_on_input) return LaunchAbsMax(As<double>(memory.copies), routed * desc_.hidden, largest, stream);
    return LaunchInputAbsMax(memory.x.data(), batch.x.dtype, batch.x.rows * desc_.hidden, largest, stream);
  }

  const MoeDesc desc_;
  const LayerWeights weights_;
  const int device_;
};

}  // namespace

bool ReferenceIsBuilt() { return true; }

absl::StatusOr<std::unique_ptr<PreparedMoe>> PrepareReference(const MoeDesc& desc, const ExpertReader& reader, WorkerPool& pool) {
  constexpr int kDevice = 0;
  constexpr char kPrepare[] = "preparing the reference";
  absl::Status status = ToStatus(cudaSetDevice(kDevice), kPrepare);
  LayerWeights weights;
  if (status.ok()) status = AllocateLayer(desc, &weights);
  if (!status.ok()) return status;
  status = ForEachExpert(desc.num_experts, reader, pool, [&](int expert, const ExpertWeights& read) {
    absl::Status put = CheckExpert(desc, expert, read);
    if (put.ok()) put = ToStatus(cudaSetDevice(kDevice), kPrepare);
    std::vector<float> staging;
    if (put.ok()) put = weights.gate.Put(expert, read.gate, &staging);
    if (put.ok()) put = weights.up.Put(expert, read.up, &staging);
    if (put.ok()) put = weights.down.Put(expert, read.down, &staging);
    return put;
  });
  // A copy from ordinary memory may return before its last bytes have arrived, and streams of calls do not wait for them.
  if (status.ok()) status = ToStatus(cudaDeviceSynchronize(), kPrepare);
  if (!status.ok()) return status;
  return std::make_unique<PreparedReference>(desc, std::move(weights), kDevice);
}

}  // namespace moed::cuda
