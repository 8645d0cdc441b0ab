#include "kernels/cpu/cpu_moe.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/activation_quant.h"
#include "kernels/cpu/call_plan.h"
#include "kernels/cpu/token_sort.h"

namespace moed::cpu {
namespace {

// Tasks per worker and stage: enough for balance, few enough that each one reads a long run of weights.
constexpr int64_t kTasksPerWorker = 8;
// Columns combined at once: 2 KiB of sums on the stack.
constexpr int64_t kCombineColumns = 512;

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

class CpuMoe : public PreparedMoe {
 public:
  CpuMoe(MoeDesc desc, const KernelTable& kernels, std::unique_ptr<LayerStore> store)
      : desc_(std::move(desc)), kernels_(kernels), store_(std::move(store)) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override;

  size_t WorkspaceBytes(int64_t tokens, int top_k) const override {
    return CallPlan(desc_, store_->shape(), tokens, top_k).bytes();
  }
  size_t ResidentBytes() const override { return store_->bytes(); }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  friend class Call;
  const MoeDesc desc_;
  const KernelTable& kernels_;
  const std::unique_ptr<LayerStore> store_;
};

// The state of one Run: the stages share it, tasks of a stage write disjoint parts of it.
class Call {
 public:
  Call(const CpuMoe& moe, const MoeBatch& batch, MutableTensorView out, ExecContext& context)
      : desc_(moe.desc_), kernels_(moe.kernels_), store_(*moe.store_), shape_(moe.store_->shape()), batch_(batch), out_(out),
        pool_(*context.pool), plan_(moe.desc_, moe.store_->shape(), batch.x.rows, batch.top_k), buffers_(plan_, context.workspace) {
    SortSlots(batch.ids, desc_.num_experts, &sorted_);
  }

  // The layer in stages. Activation quantization and the reordering of h are no-ops for most schemes.
  void Run() {
    pool_.ParallelFor(plan_.input_rows, [&](int64_t row, int) { PackInput(row); });
    QuantizeInput();
    RunTasks(shape_.gate_up_pairs, [&](const Task& task) { GateUp(task); });
    QuantizeHidden();
    if (plan_.gathered_stride > 0) {
      pool_.ParallelFor(routed(), [&](int64_t position, int) { GatherHidden(position); });
    }
    RunTasks(shape_.down_pairs, [&](const Task& task) { Down(task); });
    pool_.ParallelFor(batch_.x.rows, [&](int64_t row, int) { Combine(row); });
  }

 private:
  int64_t routed() const { return static_cast<int64_t>(sorted_.slots.size()); }

  template <typename Body>
  void RunTasks(int64_t pairs, const Body& body) {
    const std::vector<Task> tasks = SplitTasks(sorted_, desc_.num_experts, pairs, pool_.threads());
    pool_.ParallelFor(static_cast<int64_t>(tasks.size()), [&](int64_t at, int) { body(tasks[at]); });
  }

  // Row of x as float32 in packed order, zero-padded; scaled by the slot's weight when the weight goes to the input.
  void PackInput(int64_t row) {
    if (plan_.input_per_slot && sorted_.position[row] < 0) return;
    float* out = buffers_.input + row * plan_.input_stride;
    const int64_t token = plan_.input_per_slot ? row / batch_.top_k : row;
    const std::vector<int32_t>& order = shape_.gate_up.source;
    if (order.empty()) {
      Widen(batch_.x.row(token), out);
      std::fill(out + desc_.hidden, out + plan_.input_stride, 0.0f);
    } else {
      std::vector<float> plain(desc_.hidden);
      Widen(batch_.x.row(token), plain.data());
      for (size_t k = 0; k < order.size(); ++k) out[k] = order[k] < 0 ? 0.0f : plain[order[k]];
      std::fill(out + order.size(), out + plan_.input_stride, 0.0f);
    }
    if (desc_.weight_on_input) {
      for (int64_t k = 0; k < plan_.input_stride; ++k) out[k] *= batch_.weights[row];
    }
  }

  void Widen(const void* source, float* out) {
    if (batch_.x.dtype == DType::kF32) {
      std::memcpy(out, source, batch_.x.row_bytes());
    } else {
      kernels_.widen(batch_.x.dtype == DType::kBf16, source, desc_.hidden, out);
    }
  }

  // Row of the input that sorted position `position` multiplies.
  int64_t InputRow(int64_t position) const {
    const int64_t slot = sorted_.slots[position];
    return plan_.input_per_slot ? slot : slot / batch_.top_k;
  }

  // The largest magnitude over `rows` rows row_of(0), ...; only for scales that span a request.
  template <typename RowOf>
  static float AbsMaxOfAll(const ActivationScheme& scheme, int64_t rows, int64_t n, const RowOf& row_of) {
    float largest = 0.0f;
    for (int64_t row = 0; SpansRows(scheme) && row < rows; ++row) largest = MergeAbsMax(largest, AbsMax(row_of(row), n));
    return largest;
  }

  // x through the gate's and the up projection's rules; rows without an expert are left alone.
  void QuantizeInput() {
    const ActivationScheme& gate = desc_.scheme.gate.input;
    const ActivationScheme& up = desc_.scheme.up.input;
    if (gate.mode == ActivationMode::kNone && up.mode == ActivationMode::kNone) return;
    // All rows of the request count, whether this layer holds their experts or not; weighted copies exist per routed slot.
    const int64_t rows = plan_.input_per_slot ? routed() : plan_.input_rows;
    const auto row_of = [&](int64_t row) {
      return buffers_.input + (plan_.input_per_slot ? InputRow(row) : row) * plan_.input_stride;
    };
    const float gate_max = AbsMaxOfAll(gate, rows, desc_.hidden, row_of), up_max = AbsMaxOfAll(up, rows, desc_.hidden, row_of);
    pool_.ParallelFor(plan_.input_rows, [&](int64_t row, int) {
      if (plan_.input_per_slot && sorted_.position[row] < 0) return;
      const InputScales scales = plan_.input_per_slot ? store_.input_scales(batch_.ids[row]) : InputScales();
      float* x = buffers_.input + row * plan_.input_stride;
      if (plan_.two_inputs) {
        float* up_x = buffers_.up_input + row * plan_.input_stride;
        std::copy(x, x + plan_.input_stride, up_x);
        QuantizeRow(up, scales.up, up_max, up_x, desc_.hidden);
      }
      QuantizeRow(gate, scales.gate, gate_max, x, desc_.hidden);
    });
  }

  void QuantizeHidden() {
    const ActivationScheme& down = desc_.scheme.down.input;
    if (down.mode == ActivationMode::kNone) return;
    const auto row_of = [&](int64_t position) { return buffers_.hidden_act + position * plan_.hidden_act_stride; };
    const float absmax = AbsMaxOfAll(down, routed(), desc_.intermediate, row_of);
    pool_.ParallelFor(routed(), [&](int64_t position, int) {
      const InputScales scales = store_.input_scales(batch_.ids[sorted_.slots[position]]);
      QuantizeRow(down, scales.down, absmax, row_of(position), desc_.intermediate);
    });
  }

  // What a stage multiplies: where its weights are and where its rows are. `second_row` (may be null) gives the rows of the
  // second panel of each pair where they differ from the first panel's.
  struct Stage {
    const PanelFormat* format;
    const uint8_t* (LayerStore::*weights)(int expert, int64_t pair, std::vector<uint8_t>* scratch) const;
    const float* first_rows;
    const float* second_rows;
    int64_t stride;
    bool by_position;  // rows are addressed by sorted position, else by InputRow
  };

  // Multiplies pairs [task.first, task.last) with all rows of the task's expert; take(pair, first position, count, tile)
  // receives each result tile [count][32].
  template <typename Take>
  void Multiply(const Task& task, const Stage& stage, const Take& take) {
    alignas(64) float tile[kRowBlock * kPairWidth];
    alignas(64) float decoded[kMaxDecodedDepth * kPairWidth];
    const float* rows[kRowBlock];
    std::vector<uint8_t> scratch;
    const int32_t end = sorted_.begin[task.expert + 1];
    for (int32_t begin = sorted_.begin[task.expert]; begin < end; begin += kRowBlock) {
      MultiplyArgs args;
      args.format = stage.format;
      args.count = std::min<int64_t>(kRowBlock, end - begin);
      args.rows = rows;
      args.tile = tile;
      args.decoded = decoded;
      FillRows(stage, stage.first_rows, begin, args.count, rows);
      const int64_t at_once = store_.resident() && stage.second_rows == nullptr ? kRowBlock / args.count : 1;
      for (int64_t pair = task.first; pair < task.last; pair += args.pairs) {
        args.pairs = std::min(at_once, task.last - pair);
        args.weights = (store_.*stage.weights)(task.expert, pair, &scratch);
        kernels_.multiply(args);
        if (stage.second_rows != nullptr) MultiplySecond(stage, begin, args);
        for (int64_t p = 0; p < args.pairs; ++p) take(pair + p, begin, args.count, tile + p * args.count * kPairWidth);
      }
    }
  }

  void FillRows(const Stage& stage, const float* base, int64_t begin, int64_t count, const float** rows) const {
    for (int64_t r = 0; r < count; ++r) rows[r] = base + (stage.by_position ? begin + r : InputRow(begin + r)) * stage.stride;
  }

  // The second panel again with its own rows; the first half of the tile stays.
  void MultiplySecond(const Stage& stage, int64_t begin, MultiplyArgs args) {
    alignas(64) float second[kRowBlock * kPairWidth];
    const float* rows[kRowBlock];
    FillRows(stage, stage.second_rows, begin, args.count, rows);
    float* tile = std::exchange(args.tile, second);
    args.rows = rows;
    kernels_.multiply(args);
    for (int64_t r = 0; r < args.count; ++r) {
      std::copy_n(second + r * kPairWidth + kPanelWidth, kPanelWidth, tile + r * kPairWidth + kPanelWidth);
    }
  }

  // Whether gate and up of this expert see the same input, so that one multiplication does for both.
  bool SameInput(int expert) const {
    const InputScales scales = store_.input_scales(expert);
    return !plan_.two_inputs || (desc_.scheme.gate.input == desc_.scheme.up.input && scales.gate == scales.up);
  }

  void GateUp(const Task& task) {
    ActivateArgs act;
    act.kind = static_cast<int>(desc_.activation.kind);
    act.alpha = desc_.activation.alpha;
    act.clamped = desc_.activation.clamped;
    act.limit = desc_.activation.limit;
    float* rows[kRowBlock];
    const Stage stage = {&shape_.gate_up.format, &LayerStore::GateUp, buffers_.input,
                         SameInput(task.expert) ? nullptr : buffers_.up_input, plan_.input_stride, false};
    Multiply(task, stage, [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
      for (int64_t r = 0; r < count; ++r) {
        rows[r] = buffers_.hidden_act + (begin + r) * plan_.hidden_act_stride + pair * kPanelWidth;
      }
      act.tile = tile;
      act.count = count;
      act.rows = rows;
      act.gate_bias = store_.gate_bias(task.expert) + pair * kPanelWidth;
      act.up_bias = store_.up_bias(task.expert) + pair * kPanelWidth;
      kernels_.activate(act);
    });
  }

  void GatherHidden(int64_t position) {
    const float* from = buffers_.hidden_act + position * plan_.hidden_act_stride;
    float* to = buffers_.gathered + position * plan_.gathered_stride;
    const std::vector<int32_t>& order = shape_.down.source;
    for (size_t k = 0; k < order.size(); ++k) to[k] = order[k] < 0 ? 0.0f : from[order[k]];
  }

  void Down(const Task& task) {
    const bool gathered = plan_.gathered_stride > 0;
    const Stage stage = {&shape_.down.format, &LayerStore::Down, gathered ? buffers_.gathered : buffers_.hidden_act, nullptr,
                         gathered ? plan_.gathered_stride : plan_.hidden_act_stride, true};
    Multiply(task, stage, [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
      const float* bias = store_.down_bias(task.expert) + pair * kPairWidth;
      for (int64_t r = 0; r < count; ++r) {
        float* out = buffers_.output + (begin + r) * plan_.output_stride + pair * kPairWidth;
        for (int c = 0; c < kPairWidth; ++c) out[c] = tile[r * kPairWidth + c] + bias[c];
      }
    });
  }

  // out[row] = sum over the row's slots, in slot order, of weight * y.
  void Combine(int64_t row) {
    CombineArgs args;
    const float** rows = buffers_.combine_rows + row * batch_.top_k;
    float* weights = buffers_.combine_weights + row * batch_.top_k;
    for (int64_t slot = row * batch_.top_k; slot < (row + 1) * batch_.top_k; ++slot) {
      if (sorted_.position[slot] < 0) continue;
      rows[args.count] = buffers_.output + sorted_.position[slot] * plan_.output_stride;
      weights[args.count++] = desc_.weight_on_input ? 1.0f : batch_.weights[slot];
    }
    alignas(64) float sum[kCombineColumns];
    args.rows = rows;
    args.weights = weights;
    args.sum = sum;
    for (int64_t first = 0; first < desc_.hidden; first += kCombineColumns) {
      const int64_t columns = std::min(kCombineColumns, desc_.hidden - first);
      args.n = (columns + kPairWidth - 1) / kPairWidth * kPairWidth;
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
  const LayerStore& store_;
  const LayerShape& shape_;
  const MoeBatch& batch_;
  const MutableTensorView out_;
  WorkerPool& pool_;
  const CallPlan plan_;
  const CallBuffers buffers_;
  SortedSlots sorted_;
};

absl::Status CpuMoe::Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const {
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

std::unique_ptr<PreparedMoe> MakeCpuMoe(MoeDesc desc, const KernelTable& kernels, std::unique_ptr<LayerStore> store) {
  return std::make_unique<CpuMoe>(std::move(desc), kernels, std::move(store));
}

}  // namespace moed::cpu
