// The table of model families: how a config.json is recognised, which keys hold its sizes, and what its tensors are called.
//
// The table has facts only; model_config.cc and model_router.cc read a config by them. Values and pure functions.
#ifndef MOED_ENGINE_MODEL_FAMILY_H_
#define MOED_ENGINE_MODEL_FAMILY_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "engine/json_text.h"
#include "engine/model_config.h"

namespace moed {

// Bounds of sizes in a config.
inline constexpr int64_t kMaxWidth = 1 << 20;  // of H and I; the widest published layers have 18432
inline constexpr int64_t kMaxExperts = 65535;  // ids travel through 16-bit tables
inline constexpr int64_t kMaxLayers = 10000;

// What the family's config class fills in for keys that files leave out; -1 where the key must be there.
struct FamilyDefaults {
  int dense_layers = -1;   // first_k_dense_replace
  int shared_pieces = -1;  // FamilyEntry::shared_key
  int groups = -1;         // n_group
  int groups_kept = -1;    // topk_group
  int normalize = -1;      // norm_topk_prob: 0 or 1
  double scaling = -1.0;   // routed_scaling_factor
};

struct FamilyEntry {
  // Which layers have experts.
  enum class Layers : uint8_t {
    kAll,
    kSparseStep,  // every decoder_sparse_step-th, counted from 1, but for mlp_only_layers
    kFrequency,   // from first_k_dense_replace on, every moe_layer_freq-th; or moe_layer_freq as a list
    kInterleave,  // every interleave_moe_layer_step-th, counted from 1
  };
  // The width of the expert that every token goes through.
  enum class Shared : uint8_t {
    kNone,
    kWidth,    // shared_expert_intermediate_size, with a sigmoid gate
    kPieces,   // shared_key times the routed width
    kRouted,   // the routed width
    kRefused,  // a width that is not 0 has tensors of unknown names
  };
  enum class Router : uint8_t {
    kSoftmaxNormalized,  // mixtral, qwen3_vl_moe, qwen3_5_moe: always normalised; norm_topk_prob may not say otherwise
    kSoftmax,            // normalised if norm_topk_prob
    kSparseMixer,
    kSoftmaxOfChosen,
    kGreedyGroups,       // deepseek_v2
    kNoAux,              // deepseek_v3: sigmoid with correction bias, groups by their two best
    kNoAuxKimi,          // the same under the keys of kimi_linear
    kMinimax,
    kLlama4,
    kDbrx,
  };

  Family family;
  const char* model_type;
  std::array<const char*, 2> other_types;    // further spellings of model_type, such as that of a text_config; may be null
  std::array<const char*, 2> architectures;  // may be null
  const char* width_key;                     // of I
  const char* experts_key;                   // of E; the aliases of the other families are understood, too
  Layers layers;
  Router router;
  Shared shared;
  const char* shared_key;                    // kPieces
  FamilyNames names;
  FamilyDefaults defaults;
};

// The part of a config.json that describes the language model, and its family.
struct FamilyMatch {
  const FamilyEntry* entry = nullptr;
  const nlohmann::json* text = nullptr;  // the root or its text_config
  bool wrapped = false;                  // it is the text_config
  std::string model_type;                // as written there
};

// INVALID_ARGUMENT names the key: a family that is not served, and why where moed knows it; model_type and architectures
// that contradict each other; a text_config that is no object.
absl::StatusOr<FamilyMatch> FindFamily(const nlohmann::json& root);

// "config.json: " or "config.json: text_config.", for messages about `match`.
std::string WhereOf(const FamilyMatch& match);

// Reads the routing rule into config->router and config->router_bias; sizes must have been read. Errors stay in the reader.
void ReadRouter(const FamilyEntry& entry, ConfigReader* reader, ModelConfig* config);

}  // namespace moed

#endif  // MOED_ENGINE_MODEL_FAMILY_H_
