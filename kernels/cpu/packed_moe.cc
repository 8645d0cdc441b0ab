#include "kernels/cpu/packed_moe.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/token_sort.h"

namespace moed::cpu {
namespace {

// Tasks per worker and stage: enough for balance, few enough that each one reads a long run of weights.
constexpr int64_t kTasksPerWorker = 8;
// Columns combined at once: 2 KiB of sums on the stack.
constexpr int64_t kCombineColumns = 512;

int64_t RoundUp(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Floats of workspace by purpose; every array starts on a cache line.
struct Plan {
  int64_t input_rows = 0, input_stride = 0;    // x in packed order: one row a token, or one a slot with weight_on_input
  int64_t slots = 0;
  int64_t hidden_act_stride = 0;               // h as the activation writes it
  int64_t gathered_stride = 0;                 // h in packed order; 0 when that is the same
  int64_t output_stride = 0;                   // y per slot

  Plan(const MoeDesc& desc, const LayerShape& shape, int64_t tokens, int top_k) {
    slots = tokens * top_k;
    input_rows = desc.weight_on_input ? slots : tokens;
    input_stride = RoundUp(shape.gate_up.format.depth, 16);
    hidden_act_stride = shape.intermediate_stride();
    gathered_stride = shape.down.source.empty() ? 0 : RoundUp(shape.down.format.depth, 16);
    output_stride = shape.hidden_stride();
  }
  int64_t floats() const {
    return input_rows * input_stride + slots * (hidden_act_stride + gathered_stride + output_stride);
  }
  // The pointers and weights of the combine, in slot order.
  int64_t bytes() const { return floats() * 4 + RoundUp(slots * static_cast<int64_t>(sizeof(float*)), 64) + slots * 4; }
};

// One piece of a stage: pairs [first, last) of one expert, for all of its rows.
struct Task {
  int expert = 0;
  int64_t first = 0;
  int64_t last = 0;
};

std::vector<Task> SplitTasks(const SortedSlots& sorted, int experts, int64_t pairs, int threads) {
  int64_t active = 0;
  for (int e = 0; e < experts; ++e) active += sorted.begin[e] != sorted.begin[e + 1];
  const int64_t chunk = std::max<int64_t>(1, active * pairs / (threads * kTasksPerWorker));
  std::vector<Task> tasks;
  for (int e = 0; e < experts; ++e) {
    if (sorted.begin[e] == sorted.begin[e + 1]) continue;
    for (int64_t first = 0; first < pairs; first += chunk) tasks.push_back({e, first, std::min(first + chunk, pairs)});
  }
  return tasks;
}

class PackedMoe : public PreparedMoe {
 public:
  PackedMoe(MoeDesc desc, const KernelTable& kernels, std::unique_ptr<PackedLayer> layer)
      : desc_(std::move(desc)), kernels_(kernels), layer_(std::move(layer)) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override;

  size_t WorkspaceBytes(int64_t tokens, int top_k) const override {
    return static_cast<size_t>(Plan(desc_, layer_->shape(), tokens, top_k).bytes());
  }
  size_t ResidentBytes() const override { return layer_->bytes(); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  friend class Call;
  const MoeDesc desc_;
  const KernelTable& kernels_;
  const std::unique_ptr<PackedLayer> layer_;
};

// The state of one Run: the stages share it, tasks of a stage write disjoint parts of it.
class Call {
 public:
  Call(const PackedMoe& moe, const MoeBatch& batch, MutableTensorView out, ExecContext& context)
      : desc_(moe.desc_), kernels_(moe.kernels_), layer_(*moe.layer_), shape_(moe.layer_->shape()), batch_(batch), out_(out),
        pool_(*context.pool), plan_(moe.desc_, moe.layer_->shape(), batch.x.rows, batch.top_k) {
    SortSlots(batch.ids, desc_.num_experts, &sorted_);
    float* next = reinterpret_cast<float*>(context.workspace.data());
    input_ = std::exchange(next, next + plan_.input_rows * plan_.input_stride);
    hidden_act_ = std::exchange(next, next + plan_.slots * plan_.hidden_act_stride);
    gathered_ = std::exchange(next, next + plan_.slots * plan_.gathered_stride);
    output_ = std::exchange(next, next + plan_.slots * plan_.output_stride);
    combine_rows_ = reinterpret_cast<const float**>(next);
    combine_weights_ = reinterpret_cast<float*>(reinterpret_cast<char*>(next) +
                                                RoundUp(plan_.slots * static_cast<int64_t>(sizeof(float*)), 64));
  }

  // The layer in five stages.
  void Run() {
    pool_.ParallelFor(plan_.input_rows, [&](int64_t row, int) { PackInput(row); });
    RunTasks(shape_.gate_up_pairs, [&](const Task& task) { GateUp(task); });
    if (plan_.gathered_stride > 0) {
      pool_.ParallelFor(static_cast<int64_t>(sorted_.slots.size()), [&](int64_t at, int) { GatherHidden(at); });
    }
    RunTasks(shape_.down_pairs, [&](const Task& task) { Down(task); });
    pool_.ParallelFor(batch_.x.rows, [&](int64_t row, int) { Combine(row); });
  }

 private:
  template <typename Body>
  void RunTasks(int64_t pairs, const Body& body) {
    const std::vector<Task> tasks = SplitTasks(sorted_, desc_.num_experts, pairs, pool_.threads());
    pool_.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t at, int) { body(tasks[at]); });
  }

  // Row of x as float32 in packed order, zero-padded; scaled by the slot's weight when the weight goes to the input.
  void PackInput(int64_t row) {
    float* out = input_ + row * plan_.input_stride;
    float weight = 1.0f;
    int64_t token = row;
    if (desc_.weight_on_input) {
      if (sorted_.position[row] < 0) return;
      token = row / batch_.top_k;
      weight = batch_.weights[row];
    }
    const void* source = batch_.x.row(token);
    const std::vector<int32_t>& order = shape_.gate_up.source;
    if (order.empty()) {
      Widen(source, out);
      std::fill(out + desc_.hidden, out + plan_.input_stride, 0.0f);
    } else {
      std::vector<float> plain(desc_.hidden);
      Widen(source, plain.data());
      for (size_t k = 0; k < order.size(); ++k) out[k] = order[k] < 0 ? 0.0f : plain[order[k]];
      std::fill(out + order.size(), out + plan_.input_stride, 0.0f);
    }
    if (desc_.weight_on_input) {
      for (int64_t k = 0; k < plan_.input_stride; ++k) out[k] *= weight;
    }
  }

  void Widen(const void* source, float* out) {
    if (batch_.x.dtype == DType::kF32) {
      std::memcpy(out, source, batch_.x.row_bytes());
    } else {
      kernels_.widen(batch_.x.dtype == DType::kBf16, source, desc_.hidden, out);
    }
  }

  // Multiplies pairs [task.first, task.last) with all rows of the task's expert; row_of(position) gives an input row, and
  // take(pair, first position, count, tile) receives each result tile [count][32].
  template <typename RowOf, typename Take>
  void Multiply(const Task& task, const PanelFormat& format, const uint8_t* weights, const RowOf& row_of, const Take& take) {
    alignas(64) float tile[kRowBlock * kPairWidth];
    alignas(64) float decoded[kMaxDecodedDepth * kPairWidth];
    const float* rows[kRowBlock];
    const int32_t end = sorted_.begin[task.expert + 1];
    for (int32_t begin = sorted_.begin[task.expert]; begin < end; begin += kRowBlock) {
      MultiplyArgs args;
      args.format = &format;
      args.count = std::min<int64_t>(kRowBlock, end - begin);
      args.rows = rows;
      args.tile = tile;
      args.decoded = decoded;
      for (int64_t r = 0; r < args.count; ++r) rows[r] = row_of(begin + r);
      const int64_t at_once = kRowBlock / args.count;
      for (int64_t pair = task.first; pair < task.last; pair += args.pairs) {
        args.pairs = std::min(at_once, task.last - pair);
        args.weights = weights + pair * 2 * format.panel_bytes;
        kernels_.multiply(args);
        for (int64_t p = 0; p < args.pairs; ++p) take(pair + p, begin, args.count, tile + p * args.count * kPairWidth);
      }
    }
  }

  void GateUp(const Task& task) {
    ActivateArgs act;
    act.kind = static_cast<int>(desc_.activation.kind);
    act.alpha = desc_.activation.alpha;
    act.clamped = desc_.activation.clamped;
    act.limit = desc_.activation.limit;
    float* rows[kRowBlock];
    Multiply(
        task, shape_.gate_up.format, layer_.gate_up(task.expert),
        [&](int64_t position) {
          const int64_t slot = sorted_.slots[position];
          return input_ + (desc_.weight_on_input ? slot : slot / batch_.top_k) * plan_.input_stride;
        },
        [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
          for (int64_t r = 0; r < count; ++r) {
            rows[r] = hidden_act_ + (begin + r) * plan_.hidden_act_stride + pair * kPanelWidth;
          }
          act.tile = tile;
          act.count = count;
          act.rows = rows;
          act.gate_bias = layer_.gate_bias(task.expert) + pair * kPanelWidth;
          act.up_bias = layer_.up_bias(task.expert) + pair * kPanelWidth;
          kernels_.activate(act);
        });
  }

  void GatherHidden(int64_t position) {
    const float* from = hidden_act_ + position * plan_.hidden_act_stride;
    float* to = gathered_ + position * plan_.gathered_stride;
    const std::vector<int32_t>& order = shape_.down.source;
    for (size_t k = 0; k < order.size(); ++k) to[k] = order[k] < 0 ? 0.0f : from[order[k]];
  }

  void Down(const Task& task) {
    const bool gathered = plan_.gathered_stride > 0;
    const float* base = gathered ? gathered_ : hidden_act_;
    const int64_t stride = gathered ? plan_.gathered_stride : plan_.hidden_act_stride;
    Multiply(
        task, shape_.down.format, layer_.down(task.expert), [&](int64_t position) { return base + position * stride; },
        [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
          const float* bias = layer_.down_bias(task.expert) + pair * kPairWidth;
          for (int64_t r = 0; r < count; ++r) {
            float* out = output_ + (begin + r) * plan_.output_stride + pair * kPairWidth;
            for (int c = 0; c < kPairWidth; ++c) out[c] = tile[r * kPairWidth + c] + bias[c];
          }
        });
  }

  // out[row] = sum over the row's slots, in slot order, of weight * y.
  void Combine(int64_t row) {
    CombineArgs args;
    const float** rows = combine_rows_ + row * batch_.top_k;
    float* weights = combine_weights_ + row * batch_.top_k;
    for (int64_t slot = row * batch_.top_k; slot < (row + 1) * batch_.top_k; ++slot) {
      if (sorted_.position[slot] < 0) continue;
      rows[args.count] = output_ + sorted_.position[slot] * plan_.output_stride;
      weights[args.count++] = desc_.weight_on_input ? 1.0f : batch_.weights[slot];
    }
    alignas(64) float sum[kCombineColumns];
    args.rows = rows;
    args.weights = weights;
    args.sum = sum;
    for (int64_t first = 0; first < desc_.hidden; first += kCombineColumns) {
      const int64_t columns = std::min(kCombineColumns, desc_.hidden - first);
      args.n = RoundUp(columns, kPairWidth);
      kernels_.combine(args);
      for (int j = 0; j < args.count; ++j) rows[j] += columns;
      char* target = static_cast<char*>(out_.row(row)) + first * static_cast<int64_t>(DTypeBytes(out_.dtype));
      if (out_.dtype == DType::kF32) {
        std::memcpy(target, sum, columns * sizeof(float));
      } else {
        kernels_.narrow(out_.dtype == DType::kBf16, sum, columns, target);
      }
    }
  }

  const MoeDesc& desc_;
  const KernelTable& kernels_;
  const PackedLayer& layer_;
  const LayerShape& shape_;
  const MoeBatch& batch_;
  const MutableTensorView out_;
  WorkerPool& pool_;
  const Plan plan_;
  SortedSlots sorted_;
  float* input_ = nullptr;
  float* hidden_act_ = nullptr;
  float* gathered_ = nullptr;
  float* output_ = nullptr;
  const float** combine_rows_ = nullptr;
  float* combine_weights_ = nullptr;
};

absl::Status PackedMoe::Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const {
  absl::Status valid = ValidateBatch(desc_, batch, out);
  if (!valid.ok()) return valid;
  if (batch.x.rows == 0) return absl::OkStatus();
  const size_t needed = WorkspaceBytes(batch.x.rows, batch.top_k);
  if (context.workspace.size() < needed) {
    return absl::InternalError(absl::StrCat("workspace has ", context.workspace.size(), " bytes, want ", needed));
  }
  Call(*this, batch, out, context).Run();
  return absl::OkStatus();
}

}  // namespace

size_t PackedWorkspaceBytes(const MoeDesc& desc, int64_t tokens, int top_k) {
  return static_cast<size_t>(Plan(desc, MakeShape(desc), tokens, top_k).bytes());
}

std::unique_ptr<PreparedMoe> MakePackedMoe(MoeDesc desc, const KernelTable& kernels, std::unique_ptr<PackedLayer> layer) {
  return std::make_unique<PackedMoe>(std::move(desc), kernels, std::move(layer));
}

}  // namespace moed::cpu
