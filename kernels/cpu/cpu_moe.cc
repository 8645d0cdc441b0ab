#include "kernels/cpu/cpu_moe.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/call_plan.h"
#include "kernels/cpu/call_route.h"
#include "kernels/cpu/call_rows.h"
#include "kernels/cpu/task_split.h"

namespace moed::cpu {
namespace {

// Columns combined at once: 2 KiB of sums on the stack.
constexpr int64_t kCombineColumns = 512;
// What of rows and of weights is used again and again should stay in the second-level cache, which two threads may share.
constexpr int64_t kRowBytes = int64_t{256} << 10;
constexpr int64_t kGroupBytes = int64_t{512} << 10;

class CpuMoe : public PreparedMoe {
 public:
  CpuMoe(MoeDesc desc, const CpuKernels& kernels, std::unique_ptr<LayerStore> store)
      : desc_(std::move(desc)), kernels_(kernels), store_(std::move(store)) {}

  absl::Status Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const override;
  absl::Status RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const override;

  size_t WorkspaceBytes(int64_t tokens, int top_k) const override { return WorkspaceBytes({tokens, top_k}); }
  size_t BatchedWorkspaceBytes(int64_t rows) const override { return WorkspaceBytes({rows, 1, true}); }
  size_t ResidentBytes() const override { return store_->bytes(); }
  std::vector<std::span<const std::byte>> ResidentRanges() const override { return {store_->memory()}; }
  const QuantScheme& ExecutedScheme() const override { return desc_.scheme; }

 private:
  friend class Call;
  size_t WorkspaceBytes(const CallSize& size) const {
    return CallPlan(desc_, store_->shape(), kernels_, DType::kBf16, size).bytes();
  }
  absl::Status RunRoute(const CallRoute& route, const CallSize& size, MutableTensorView out, ExecContext& context) const;

  const MoeDesc desc_;
  const CpuKernels kernels_;
  const std::unique_ptr<LayerStore> store_;
};

// The state of one call: the stages share it, tasks of a stage write disjoint parts of it.
class Call {
 public:
  Call(const CpuMoe& moe, const CallRoute& route, const CallSize& size, MutableTensorView out, ExecContext& context)
      : desc_(moe.desc_), kernels_(*moe.kernels_.base), store_(*moe.store_), shape_(moe.store_->shape()), route_(route),
        sorted_(route.sorted()), out_(out), pool_(*context.pool),
        plan_(moe.desc_, shape_, moe.kernels_, route.x().dtype, size), buffers_(plan_, context.workspace),
        rows_(desc_, kernels_, store_, route, plan_, buffers_) {}

  // The layer in stages.
  void Run() {
    MakeInput();
    RunTasks(shape_.gate_up_pairs, shape_.gate_up.format.panel_bytes, [&](const TaskPart& part) { GateUp(part); });
    MakeHidden();
    RunTasks(shape_.down_pairs, shape_.down.format.panel_bytes, [&](const TaskPart& part) { Down(part); });
    if (plan_.combines) pool_.ParallelFor(out_.rows, [&](int64_t row, int) { Combine(row); });
  }

 private:
  void MakeInput() {
    if (rows_.InputSpansRows()) {
      pool_.ParallelFor(rows_.input_rows(), [&](int64_t row, int) { rows_.WidenInput(row); });
      rows_.MeasureInput();
      pool_.ParallelFor(rows_.input_rows(), [&](int64_t row, int) { rows_.FinishInput(row); });
    } else {
      pool_.ParallelFor(rows_.input_rows(), [&](int64_t row, int) {
        rows_.WidenInput(row);
        rows_.FinishInput(row);
      });
    }
    bool copies = false;
    for (int e = 0; plan_.sorted_copy && e < desc_.num_experts && !copies; ++e) copies = rows_.WantsSorted(e);
    if (copies) pool_.ParallelFor(route_.positions(), [&](int64_t position, int) { rows_.CopyToSorted(position); });
  }

  void MakeHidden() {
    if (!rows_.HiddenNeedsWork()) return;
    if (rows_.HiddenSpansRows()) rows_.MeasureHidden();
    pool_.ParallelFor(route_.positions(), [&](int64_t position, int) { rows_.FinishHidden(position); });
  }

  template <typename Body>
  void RunTasks(int64_t pairs, int64_t panel_bytes, const Body& body) {
    const TaskList tasks = SplitTasks(sorted_, desc_.num_experts, pairs, 2 * panel_bytes, pool_.threads());
    pool_.ParallelFor(tasks.size(), [&](int64_t task, int) {
      for (const TaskPart& part : tasks.parts(task)) body(part);
    });
  }

  // What a stage multiplies: where its weights and its rows are. `second` (may be null) gives the rows of the second panel of each
  // pair where they differ from the first panel's. Rows are records with dots, else float32.
  struct Stage {
    const DotTable* dots;
    const RowFormat* row;
    const PanelFormat* format;
    const uint8_t* (LayerStore::*weights)(int expert, int64_t pair, std::vector<uint8_t>* scratch) const;
    const void* first;
    const void* second;
    int64_t stride;    // bytes
    bool by_position;  // rows are addressed by sorted position, else by InputRow
  };

  // Stack memory of a task.
  struct Scratch {
    alignas(64) float tile[kRowBlock * kPairWidth];
    alignas(64) float second[kRowBlock * kPairWidth];
    alignas(64) uint8_t kernel[std::max<int64_t>(kDotScratchBytes, kMaxDecodedDepth * kPairWidth * sizeof(float))];
    const uint8_t* rows[kRowBlock];
    std::vector<uint8_t> pair;
  };

  // Rows that go through the kernel at once: few enough that they and a group of pairs stay in the second-level cache.
  static int64_t RowsAtOnce(const Stage& stage) {
    if (stage.dots == nullptr) return kRowBlock;
    return std::clamp<int64_t>(kRowBytes / stage.stride / 32 * 32, 64, kRowBlock);
  }

  // Multiplies pairs [part.first, part.last) with all rows of the part's expert; take(pair, first position, count, tile)
  // receives each result tile [count][32].
  template <typename Take>
  void Multiply(const TaskPart& part, const Stage& stage, const Take& take) {
    Scratch scratch;
    const int64_t begin = sorted_.begin[part.expert], end = sorted_.begin[part.expert + 1], step = RowsAtOnce(stage);
    if (end - begin <= step) {
      // Several pairs go into one call where there are few rows.
      const int64_t at_once = store_.resident() && stage.second == nullptr ? kRowBlock / (end - begin) : 1;
      MultiplyRows(part, stage, begin, end - begin, at_once, &scratch, take);
      return;
    }
    // Each block of rows meets a group of pairs while that is in the cache.
    const int64_t group = store_.resident() ? std::max<int64_t>(1, kGroupBytes / (2 * stage.format->panel_bytes)) : 1;
    for (TaskPart some = part; some.first < part.last; some.first = some.last) {
      some.last = std::min(some.first + group, part.last);
      for (int64_t row = begin; row < end; row += step) MultiplyRows(some, stage, row, std::min(step, end - row), 1, &scratch, take);
    }
  }

  // The same for rows [begin, begin + count) of sorted positions, `at_once` pairs in a call.
  template <typename Take>
  void MultiplyRows(const TaskPart& part, const Stage& stage, int64_t begin, int64_t count, int64_t at_once, Scratch* scratch,
                    const Take& take) {
    for (int64_t pair = part.first, pairs; pair < part.last; pair += pairs) {
      pairs = std::min(at_once, part.last - pair);
      const uint8_t* weights = (store_.*stage.weights)(part.expert, pair, &scratch->pair);
      Product(stage, stage.first, begin, count, weights, pairs, scratch->tile, scratch);
      if (stage.second != nullptr) {
        Product(stage, stage.second, begin, count, weights, 1, scratch->second, scratch);
        TakeSecondPanel(count, scratch->second, scratch->tile);
      }
      for (int64_t p = 0; p < pairs; ++p) take(pair + p, begin, count, scratch->tile + p * count * kPairWidth);
    }
  }

  // tile = rows [begin, begin + count) of `base` times `pairs` pairs.
  void Product(const Stage& stage, const void* base, int64_t begin, int64_t count, const uint8_t* weights, int64_t pairs, float* tile,
               Scratch* scratch) const {
    for (int64_t r = 0; r < count; ++r) {
      const int64_t row = stage.by_position ? begin + r : rows_.InputRow(begin + r);
      scratch->rows[r] = static_cast<const uint8_t*>(base) + row * stage.stride;
    }
    if (stage.dots != nullptr) {
      stage.dots->multiply({stage.format, weights, pairs, stage.row, scratch->rows, count, tile, scratch->kernel});
    } else {
      kernels_.multiply({stage.format, weights, pairs, scratch->rows, count, tile, reinterpret_cast<float*>(scratch->kernel)});
    }
  }

  static void TakeSecondPanel(int64_t count, const float* second, float* tile) {
    for (int64_t r = 0; r < count; ++r) {
      std::copy_n(second + r * kPairWidth + kPanelWidth, kPanelWidth, tile + r * kPairWidth + kPanelWidth);
    }
  }

  int64_t RowsOf(int expert) const { return sorted_.begin[expert + 1] - sorted_.begin[expert]; }

  Stage GateUpStage(int expert) const {
    const bool same = rows_.SameInput(expert);
    Stage stage = {plan_.gate_up.For(RowsOf(expert)), &plan_.gate_up.row, &shape_.gate_up.format, &LayerStore::GateUp, buffers_.input,
                   same ? nullptr : buffers_.up_input, plan_.input_stride * static_cast<int64_t>(sizeof(float)), false};
    if (stage.dots == nullptr) return stage;
    const bool sorted = rows_.WantsSorted(expert);
    stage.first = sorted ? buffers_.sorted_records : buffers_.input_records;
    stage.second = same ? nullptr : sorted ? buffers_.sorted_up_records : buffers_.up_records;
    stage.stride = plan_.gate_up.row.bytes;
    stage.by_position = sorted;
    return stage;
  }

  void GateUp(const TaskPart& part) {
    ActivateArgs act;
    act.kind = static_cast<int>(desc_.activation.kind);
    act.alpha = desc_.activation.alpha;
    act.clamped = desc_.activation.clamped;
    act.limit = desc_.activation.limit;
    float* rows[kRowBlock];
    Multiply(part, GateUpStage(part.expert), [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
      for (int64_t r = 0; r < count; ++r) {
        rows[r] = buffers_.hidden_act + (begin + r) * plan_.hidden_act_stride + pair * kPanelWidth;
      }
      act.tile = tile;
      act.count = count;
      act.rows = rows;
      act.gate_bias = store_.gate_bias(part.expert) + pair * kPanelWidth;
      act.up_bias = store_.up_bias(part.expert) + pair * kPanelWidth;
      kernels_.activate(act);
    });
  }

  Stage DownStage(int expert) const {
    const bool gathered = plan_.gathered_stride > 0;
    Stage stage = {plan_.down.For(RowsOf(expert)), &plan_.down.row, &shape_.down.format, &LayerStore::Down,
                   gathered ? buffers_.gathered : buffers_.hidden_act, nullptr,
                   (gathered ? plan_.gathered_stride : plan_.hidden_act_stride) * static_cast<int64_t>(sizeof(float)), true};
    if (stage.dots == nullptr) return stage;
    stage.first = buffers_.hidden_records;
    stage.stride = plan_.down.row.bytes;
    return stage;
  }

  void Down(const TaskPart& part) {
    Multiply(part, DownStage(part.expert), [&](int64_t pair, int64_t begin, int64_t count, const float* tile) {
      const float* bias = store_.down_bias(part.expert) + pair * kPairWidth;
      const int64_t first = pair * kPairWidth;
      alignas(64) float straight[kPairWidth];
      for (int64_t r = 0; r < count; ++r) {
        float* y = plan_.combines ? buffers_.output + (begin + r) * plan_.output_stride + first : straight;
        for (int c = 0; c < kPairWidth; ++c) y[c] = tile[r * kPairWidth + c] + bias[c];
        if (!plan_.combines) Store(y, route_.row(begin + r), first, std::min<int64_t>(kPairWidth, desc_.hidden - first));
      }
    });
  }

  // Columns [first, first + columns) of a row of the output, rounded to its type.
  void Store(const float* values, int64_t row, int64_t first, int64_t columns) const {
    char* target = static_cast<char*>(out_.row(row)) + first * static_cast<int64_t>(DTypeBytes(out_.dtype));
    if (out_.dtype == DType::kF32) {
      std::memcpy(target, values, columns * sizeof(float));
    } else {
      kernels_.narrow(out_.dtype == DType::kBf16, values, columns, target);
    }
  }

  // out[row] = sum over the row's slots, in slot order, of weight * y.
  void Combine(int64_t row) {
    CombineArgs args;
    const int64_t first_slot = row * route_.top_k();
    const float** rows = buffers_.combine_rows + first_slot;
    float* weights = buffers_.combine_weights + first_slot;
    for (int64_t slot = first_slot; slot < first_slot + route_.top_k(); ++slot) {
      if (sorted_.position[slot] < 0) continue;
      rows[args.count] = buffers_.output + sorted_.position[slot] * plan_.output_stride;
      weights[args.count++] = route_.output_weight(slot);
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
      Store(sum, row, first, columns);
    }
  }

  const MoeDesc& desc_;
  const KernelTable& kernels_;
  const LayerStore& store_;
  const LayerShape& shape_;
  const CallRoute& route_;
  const SortedSlots& sorted_;
  const MutableTensorView out_;
  WorkerPool& pool_;
  const CallPlan plan_;
  const CallBuffers buffers_;
  CallRows rows_;
};

absl::Status CpuMoe::Run(const MoeBatch& batch, MutableTensorView out, ExecContext& context) const {
  absl::Status valid = ValidateBatch(desc_, batch, out);
  if (!valid.ok()) return valid;
  return RunRoute(CallRoute(desc_, batch), {batch.x.rows, batch.top_k}, out, context);
}

absl::Status CpuMoe::RunBatched(const BatchedExperts& batch, MutableTensorView out, ExecContext& context) const {
  absl::Status valid = ValidateBatchedExperts(desc_, batch, out);
  if (!valid.ok()) return valid;
  const CallRoute route(batch);
  return RunRoute(route, {route.positions(), 1, true}, out, context);
}

absl::Status CpuMoe::RunRoute(const CallRoute& route, const CallSize& size, MutableTensorView out, ExecContext& context) const {
  if (size.tokens == 0) return absl::OkStatus();
  const size_t needed = WorkspaceBytes(size);
  if (context.workspace.size() < needed) {
    return absl::InternalError(absl::StrCat("workspace has ", context.workspace.size(), " bytes, want ", needed));
  }
  Call(*this, route, size, out, context).Run();
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<PreparedMoe> MakeCpuMoe(MoeDesc desc, const CpuKernels& kernels, std::unique_ptr<LayerStore> store) {
  return std::make_unique<CpuMoe>(std::move(desc), kernels, std::move(store));
}

}  // namespace moed::cpu
