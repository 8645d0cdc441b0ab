#include "kernels/cuda/part_args.h"

namespace moed::cuda {
namespace {

constexpr int kStageAlignment = 16;  // of rows that products read as they are

StageBy StageByOf(const StageArgs& stage) {
  const bool aligned = reinterpret_cast<uintptr_t>(stage.x) % kStageAlignment == 0;
  if (!aligned || stage.weights != nullptr) return StageBy::kValues;
  const ActivationMode mode = stage.scheme.mode;
  if (mode == ActivationMode::kNone && stage.dtype == DType::kBf16 && stage.cols % 8 == 0 && stage.x_stride % 8 == 0) {
    if (stage.order == nullptr) return StageBy::kCopies;
    return !stage.scatter && stage.cols <= kMostGathered ? StageBy::kGathers : StageBy::kValues;
  }
  if (stage.order != nullptr) return StageBy::kValues;
  const bool grouped = stage.group == kStagedGroup && stage.cols % kStagedGroup == 0 && stage.x_stride % 4 == 0;
  if (grouped && mode == ActivationMode::kDynamic && stage.scheme.scale != ScaleType::kE4m3 && stage.absmax == nullptr &&
      stage.out.kind == OperandKind::kBytes && stage.out.scales != nullptr && !stage.scatter) {
    return StageBy::kGroups;
  }
  return StageBy::kValues;
}

class PartFiller {
 public:
  PartFiller(const CudaMoe& moe, const PartInput& input, const PartWorkspace& w, std::byte* base)
      : moe_(moe), plan_(moe.plan()), desc_(moe.desc()), input_(input), w_(w), base_(base) {}

  void Fill(PartArgs* args, PartLaunch* launch) {
    *args = PartArgs();
    *launch = PartLaunch();
    launch->split = !plan_.paired;
    FillSort(&args->sort, &launch->sort);
    ChooseProducts(&args->sort);
    launch->stage_gate.rows =
        StageX(plan_.gate_x, plan_.gate, moe_.offsets().gate, 0, w_.gate_x, w_.gate_scales, args, &args->stage_gate, &args->gate.x);
    if (!plan_.paired) {
      launch->stage_up.rows =
          StageX(plan_.up_x, plan_.up, moe_.offsets().up, 1, w_.up_x, w_.up_scales, args, &args->stage_up, &args->up.x);
    }
    FillGateUp(args);
    if (plan_.activates_apart) launch->activate = static_cast<int32_t>(input_.slot_capacity);
    launch->stage_down.rows = StageH(args);
    FillDown(args);
    FillAbsMax(args, launch);
    if (product_ == Product::kGeneric) {
      if (plan_.gate_x.bytes) UseBytes(&args->stage_gate, &args->gate.x);
      if (!plan_.paired && plan_.up_x.bytes) UseBytes(&args->stage_up, &args->up.x);
      if (plan_.down_h.bytes) UseBytes(&args->stage_down, &args->down.x);
    }
    FillLaunch(args->stage_gate, &launch->stage_gate);
    FillLaunch(args->stage_up, &launch->stage_up);
    FillLaunch(args->stage_down, &launch->stage_down);
    args->gate.tiles_early = launch->x_absmax > 0 || launch->stage_gate.rows > 0;
    args->up.tiles_early = args->down.tiles_early = true;
    launch->gate = LaunchOf(plan_.gate, desc_.scheme.gate.weights, args->sort, &args->gate);
    if (!plan_.paired) launch->up = LaunchOf(plan_.up, desc_.scheme.up.weights, args->sort, &args->up);
    launch->down = LaunchOf(plan_.down, desc_.scheme.down.weights, args->sort, &args->down);
    if (args->sort.rest_rows == 0) return;
    launch->gate_rests = OfRests(launch->gate, args->sort);
    launch->down_rests = OfRests(launch->down, args->sort);
  }

 private:
  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  bool batched() const { return input_.counts != nullptr; }

  // Which products run, and the rows of their tiles. Layers of cuda_wna16 have inputs that are not quantized (FitsHopper).
  void ChooseProducts(SortArgs* sort) {
    const bool terms = plan_.gate_x.terms(TermsOf(input_.dtype)) > 1 || plan_.down_h.terms(TermsOfH(input_.dtype)) > 1 ||
                       (!plan_.paired && plan_.up_x.terms(TermsOf(input_.dtype)) > 1);
    sort->tile_rows = TileRowsFor(input_.slot_capacity, desc_.num_experts, terms);
    if (!moe_.hopper() || terms) return;
    const WeightKinds kinds = KindsOf(plan_);
    // The order in which the two add up differs, and so do the last bits.
    const int32_t few = desc_.deterministic ? 0 : FewRowsTileRowsFor(input_.slot_capacity, desc_.num_experts, kinds);
    product_ = few > 0 ? Product::kFewRows : Product::kHopper;
    if (few > 0) {
      sort->tile_rows = few;
      sort->finished = At<uint32_t>(w_.finished);
      return;
    }
    const HopperTileRows rows = HopperTileRowsFor(input_.slot_capacity, desc_.num_experts, kinds, StoresWords());
    sort->tile_rows = rows.rows;
    sort->rest_rows = rows.rests;
    // The array has room for many more tiles of these sizes, since it has it for the smallest ones.
    sort->rest_first = static_cast<int32_t>(TileCapacity(input_.slot_capacity, desc_.num_experts, rows.rows));
  }
  bool hopper() const { return product_ == Product::kHopper; }
  static void FillLaunch(const StageArgs& stage, StageLaunch* launch) {
    launch->by = StageByOf(stage);
    if (launch->by == StageBy::kGathers) launch->cols = static_cast<int32_t>(stage.cols);
  }
  // Whether some product on Hopper has results of kWords.
  bool StoresWords() const { return plan_.activates_apart || !direct_h() || desc_.hidden % 8 != 0; }
  static void UseBytes(StageArgs* stage, Operand* operand) { stage->out.kind = operand->kind = OperandKind::kBytes; }
  bool direct_h() const { return plan_.direct_h() && TermsOfH(input_.dtype) == 1; }
  int64_t PanelStride() const { return input_.slot_capacity * kBlockDepth; }

  void FillSort(SortArgs* sort, SortLaunch* launch) const {
    sort->rows = static_cast<int32_t>(input_.rows);
    sort->top_k = input_.top_k;
    sort->experts = desc_.num_experts;
    sort->ids = input_.ids;
    sort->counts = input_.counts;
    sort->max_m = static_cast<int32_t>(input_.max_m);
    sort->count = At<int32_t>(w_.count);
    sort->source = At<int32_t>(w_.source);
    sort->slot = At<int32_t>(w_.slot);
    sort->expert = At<int32_t>(w_.expert);
    sort->rank = At<int32_t>(w_.rank);
    sort->position = At<int32_t>(w_.position);
    sort->tiles = At<Tile>(w_.tiles);
    sort->totals = At<int32_t>(w_.totals);
    sort->absmax = At<uint32_t>(w_.absmax);
    launch->experts = desc_.num_experts;
    launch->slots = static_cast<int32_t>(input_.slot_capacity);
    launch->blocks = SortBlocks(input_.slot_capacity, desc_.num_experts);
    launch->by = batched() ? SortBy::kCounts : input_.ids != nullptr ? SortBy::kIds : SortBy::kOne;
  }

  // Rows of bf16 to which nothing is to be done, in pieces of 16 bytes.
  bool CanCopy(const OperandPlan& plan, const PackedShape& shape) const {
    return !plan.quantized && !desc_.weight_on_input && !shape.ordered && input_.dtype == DType::kBf16 && shape.cols % 8 == 0 &&
           reinterpret_cast<uintptr_t>(input_.x) % kStageAlignment == 0;
  }

  // Rows that are what the product wants already, whole blocks of them.
  bool IsOperand(const OperandPlan& plan, const PackedShape& shape) const {
    return CanCopy(plan, shape) && shape.cols == shape.depth();
  }

  // The operand of gate or up; returns the rows to stage, 0 for none.
  int32_t StageX(const OperandPlan& plan, const PackedShape& shape, const MatrixOffsets& offsets, int projection, size_t data,
                 size_t scales, const PartArgs* args, StageArgs* stage, Operand* operand) const {
    if (!hopper() && IsOperand(plan, shape)) {
      operand->data = const_cast<void*>(input_.x);
      operand->row_stride = shape.cols;
      return 0;
    }
    // Rows of batched experts are scattered among padding, which must not be read.
    const bool sorted = plan.by_sorted_row || batched();
    stage->x = input_.x;
    stage->dtype = input_.dtype;
    stage->x_stride = shape.cols;
    stage->from_source = sorted;
    stage->scatter = hopper() && !sorted;
    stage->top_k = input_.ids != nullptr ? input_.top_k : 1;
    if (desc_.weight_on_input && !batched()) stage->weights = input_.weights;
    stage->rows = static_cast<int32_t>(input_.rows);
    const ActivationScheme& scheme = projection == 0 ? desc_.scheme.gate.input : desc_.scheme.up.input;
    FillStage(plan, shape, offsets, scheme, projection, data, scales, sorted, args->sort.absmax, stage);
    *operand = stage->out;
    return static_cast<int32_t>(sorted ? input_.slot_capacity : input_.row_capacity);
  }

  // What staging x and h have in common.
  void FillStage(const OperandPlan& plan, const PackedShape& shape, const MatrixOffsets& offsets, const ActivationScheme& scheme,
                 int projection, size_t data, size_t scales, bool sorted, const uint32_t* absmax, StageArgs* stage) const {
    const int value_terms = projection == 2 ? TermsOfH(input_.dtype) : TermsOf(input_.dtype);
    const int64_t count = sorted || hopper() ? input_.slot_capacity : input_.row_capacity;
    const bool in_order = projection == 2 && plan_.ordered_features;
    stage->cols = in_order ? plan_.h_stride() : shape.cols;
    stage->depth = shape.depth();
    stage->scheme = scheme;
    stage->group = plan.group;
    stage->scaled_values = plan.scaled_values;
    stage->scratch = At<float>(scales);
    if (plan.stored) stage->stored = moe_.stored(projection);
    if (plan.spans_rows) stage->absmax = absmax;
    if (!in_order) stage->order = moe_.order(shape, offsets, &stage->order_stride);
    Operand& out = stage->out;
    out.data = At<std::byte>(data);
    out.row_stride = shape.depth();
    out.term_stride = count * shape.depth();
    out.terms = plan.terms(value_terms);
    out.by_sorted_row = sorted || hopper();
    if (hopper()) out.panel_stride = PanelStride();
    if (!plan.has_scales()) return;
    out.scales = At<float>(scales);
    out.scale_stride = static_cast<int32_t>(plan.groups);
    out.scale_steps = plan.scale_steps;
  }

  void FillGateUp(PartArgs* args) const {
    args->gate.weights = moe_.gate();
    args->gate.activation = desc_.activation;
    if (!plan_.activates_apart) {
      args->gate.epilogue = Epilogue::kGateUp;
      FillH(&args->gate);
      return;
    }
    args->gate.out = At<float>(w_.gate_out);
    args->gate.out_stride = plan_.gate_stride();
    ActivateArgs& activate = args->activate;
    activate.gate = args->gate.out;
    activate.stride = args->gate.out_stride;
    activate.cols = plan_.h_stride();
    activate.activation = desc_.activation;
    FillH(&activate);
    if (plan_.paired) return;
    args->up.weights = moe_.up();
    args->up.out = At<float>(w_.up_out);
    args->up.out_stride = plan_.gate_stride();
    activate.up = args->up.out;
  }

  // Where h goes: to the next product's operand, or to float32 that is staged.
  template <typename Args>
  void FillH(Args* args) const {
    if (direct_h()) {
      args->out_bf16 = At<uint16_t>(w_.h_operand);
      args->out_stride = plan_.down.depth();
      if (hopper()) args->out_panel_stride = PanelStride();
    } else {
      args->out = At<float>(w_.h);
      args->out_stride = plan_.h_stride();
    }
  }

  // The operand of down; returns the rows to stage, 0 when the first product wrote it.
  int32_t StageH(PartArgs* args) const {
    Operand& operand = args->down.x;
    if (direct_h()) {
      operand.data = At<std::byte>(w_.h_operand);
      operand.row_stride = plan_.down.depth();
      operand.by_sorted_row = true;
      if (hopper()) operand.panel_stride = PanelStride();
      return 0;
    }
    StageArgs* stage = &args->stage_down;
    stage->x = At<float>(w_.h);
    stage->dtype = DType::kF32;
    stage->x_stride = plan_.h_stride();
    FillStage(plan_.down_h, plan_.down, moe_.offsets().down, desc_.scheme.down.input, 2, w_.h_operand, w_.h_scales, true,
              args->sort.absmax + 1, stage);
    operand = stage->out;
    return static_cast<int32_t>(input_.slot_capacity);
  }

  void FillDown(PartArgs* args) const {
    args->down.weights = moe_.down();
    args->down.epilogue = Epilogue::kStore;
    args->down.out_stride = desc_.hidden;
    // What combine reads is most of the bytes of a large call of small experts. As bf16 it loses what products with operands of
    // bf16 lose anyhow.
    if (hopper() && desc_.hidden % 8 == 0) {
      args->down.out_bf16 = At<uint16_t>(w_.y);
    } else {
      args->down.out = At<float>(w_.y);
    }
  }

  void FillAbsMax(PartArgs* args, PartLaunch* launch) const {
    if (plan_.gate_x.spans_rows || (!plan_.paired && plan_.up_x.spans_rows)) {
      const bool sorted = batched() || desc_.weight_on_input;
      const float* weights = desc_.weight_on_input && !batched() ? input_.weights : nullptr;
      args->x_absmax = {input_.x,         input_.dtype, desc_.hidden, desc_.hidden,
                        sorted,           sorted,       weights,      static_cast<int32_t>(input_.rows),
                        args->sort.absmax};
      launch->x_absmax = static_cast<int32_t>(sorted ? input_.slot_capacity : input_.row_capacity);
    }
    if (plan_.down_h.spans_rows) {
      args->h_absmax = {At<float>(w_.h), DType::kF32, plan_.h_stride(), plan_.h_stride(), true, false, nullptr, 0,
                        args->sort.absmax + 1};
      launch->h_absmax = static_cast<int32_t>(input_.slot_capacity);
    }
  }

  GemmLaunch LaunchOf(const PackedShape& shape, const WeightScheme& scheme, const SortArgs& sort, GemmArgs* args) const {
    GemmLaunch launch;
    launch.codes = shape.codes;
    launch.product = product_;
    launch.tokens = sort.tile_rows;
    launch.terms = args->x.terms;
    if (args->x.kind == OperandKind::kBytes) {
      launch.bytes = true;
      launch.slot_steps = ByteSlotSteps(shape, args->x.scale_steps);
    } else if (product_ == Product::kGeneric && args->x.terms == 1 && !(args->x.scales != nullptr && args->x.scale_steps > 0)) {
      launch.powers = ScalesArePowers(shape, scheme);
    }
    launch.tiles = static_cast<int32_t>(TileCapacity(input_.slot_capacity, desc_.num_experts, sort.tile_rows));
    launch.row_tiles = static_cast<int32_t>(shape.row_tiles);
    if (product_ == Product::kGeneric) return launch;
    launch.results = ResultsOf(*args);
    launch.zeros = shape.zero_points;
    if (product_ == Product::kHopper) {
      launch.many = HasManyGroups(shape);
      return launch;
    }
    launch.slot_steps = FewRowsSlotSteps(shape);
    launch.powers = ScalesArePowers(shape, scheme);
    const int64_t expected = ExpectedTilesOf(input_.slot_capacity, desc_.num_experts, launch.tokens);
    launch.ranges = FewRowsRanges(launch.tiles, expected, launch.tokens, shape);
    args->partials = At<float>(w_.partials);
    args->finished = sort.finished;
    return launch;
  }

  // At most one tile an expert.
  GemmLaunch OfRests(GemmLaunch launch, const SortArgs& sort) const {
    launch.rests = true;
    launch.tokens = sort.rest_rows;
    launch.tiles = static_cast<int32_t>(std::min<int64_t>(input_.slot_capacity, desc_.num_experts));
    return launch;
  }

  const CudaMoe& moe_;
  const LayerPlan& plan_;
  const MoeDesc& desc_;
  const PartInput& input_;
  const PartWorkspace& w_;
  std::byte* const base_;
  Product product_ = Product::kGeneric;
};

}  // namespace

void FillPart(const CudaMoe& moe, const PartInput& input, const PartWorkspace& w, std::byte* base, PartArgs* args,
              PartLaunch* launch) {
  PartFiller(moe, input, w, base).Fill(args, launch);
}

SumRows SumsOf(const GemmArgs& product) {
  if (product.out == nullptr) return {product.out_bf16, product.out_stride, true};
  return {product.out, product.out_stride, false};
}

void FillCombine(const CudaMoe& moe, const PartInput& input, const PartArgs& part, void* out, DType dtype, CombineArgs* args) {
  args->rows = static_cast<int32_t>(input.rows);
  args->top_k = input.top_k;
  args->cols = moe.desc().hidden;
  args->y = SumsOf(part.down);
  args->position = part.sort.position;
  if (!moe.desc().weight_on_input) args->weights = input.weights;
  args->out = out;
  args->dtype = dtype;
  if (input.counts == nullptr) return;
  args->source = part.sort.source;
  args->totals = part.sort.totals;
}

}  // namespace moed::cuda
