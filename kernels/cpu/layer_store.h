// A layer's weights as the CPU forward sees them: pairs of panels of an expert, biases, and static activation scales.
//
// Two stores exist: PackedLayer keeps panels resident (schemes with a packed layout), CanonicalLayer keeps the canonical form and
// decodes a pair to float32 panels on demand (every other scheme). Immutable once made; any number of threads may read.
#ifndef MOED_KERNELS_CPU_LAYER_STORE_H_
#define MOED_KERNELS_CPU_LAYER_STORE_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cpu/packed_layout.h"
#include "kernels/expert_weights.h"

namespace moed::cpu {

// Sizes of a layer in panels, from its description alone.
struct LayerShape {
  PackedLayout gate_up;       // of gate and of up: K = hidden
  PackedLayout down;          // K = intermediate
  int64_t gate_up_pairs = 0;  // pair p: gate panel p, up panel p
  int64_t down_pairs = 0;     // pair p: down panels 2p and 2p + 1
  bool packed = true;         // panels hold the weights as they are stored, in the order of their groups

  int64_t hidden_stride() const { return down_pairs * kPairWidth; }            // floats of a padded output row
  int64_t intermediate_stride() const { return gate_up_pairs * kPanelWidth; }  // floats of a padded h row
};

// Static activation scales of one expert (LinearWeights::input_scale); 1 where the scheme has none.
struct InputScales {
  float gate = 1.0f;
  float up = 1.0f;
  float down = 1.0f;
};

class LayerStore {
 public:
  virtual ~LayerStore() = default;

  const LayerShape& shape() const { return shape_; }
  virtual size_t bytes() const = 0;
  // The memory of the panels, where it is one piece; empty otherwise.
  virtual std::span<const std::byte> memory() const { return {}; }

  // Pairs that one call of GateUp or Down yields: all of an expert's when they are resident, else one.
  virtual bool resident() const = 0;
  // Pair `pair` of `expert` in shape()'s layout; resident pairs follow each other. `scratch` holds a decoded pair until the next
  // call with the same scratch.
  virtual const uint8_t* GateUp(int expert, int64_t pair, std::vector<uint8_t>* scratch) const = 0;
  virtual const uint8_t* Down(int expert, int64_t pair, std::vector<uint8_t>* scratch) const = 0;

  // Biases in float32, padded with zeros to the strides; zeros where the layer has none.
  virtual const float* gate_bias(int expert) const = 0;
  virtual const float* up_bias(int expert) const = 0;
  virtual const float* down_bias(int expert) const = 0;

  virtual InputScales input_scales(int /*expert*/) const { return {}; }

  // Input feature at each packed position [depth], -1 for padding; null when position k holds feature k. An expert's own with
  // act-order, else the layout's.
  virtual const int32_t* gate_order(int /*expert*/) const { return OrderOf(shape_.gate_up); }
  virtual const int32_t* up_order(int /*expert*/) const { return OrderOf(shape_.gate_up); }
  virtual const int32_t* down_order(int /*expert*/) const { return OrderOf(shape_.down); }

 protected:
  explicit LayerStore(LayerShape shape) : shape_(std::move(shape)) {}
  static const int32_t* OrderOf(const PackedLayout& layout) { return layout.source.empty() ? nullptr : layout.source.data(); }
  const LayerShape shape_;
};

}  // namespace moed::cpu

#endif  // MOED_KERNELS_CPU_LAYER_STORE_H_
