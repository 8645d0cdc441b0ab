// The oracle: which backend runs a layer on a device, and for every other backend each reason why not.
//
// A pure function of plain values. It sees no weights, no device and no layer number, and it never substitutes: a policy
// that cannot be honoured is an error (require) or is reported beside the choice (prefer).
#ifndef MOED_ENGINE_ORACLE_H_
#define MOED_ENGINE_ORACLE_H_

#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/moe_kernel.h"

namespace moed {

// What to do for one layer.
struct LayerPolicy {
  enum class Kind : uint8_t {
    kAuto,     // the first fitting backend in priority order
    kRequire,  // this backend or an error
    kPrefer,   // this backend, or the automatic choice with the reason in Choice::note
  };
  Kind kind = Kind::kAuto;
  std::string backend;  // kRequire and kPrefer
};

struct BackendVerdict {
  std::string name;
  Verdict verdict;
};

struct Choice {
  const Backend* backend = nullptr;      // never null in a value returned by Choose
  std::vector<BackendVerdict> verdicts;  // of every backend, in priority order, the chosen one included
  std::string note;                      // why a preferred backend was not taken; else empty
};

// Asks every backend and picks by `policy`. FAILED_PRECONDITION when nothing fits or a required backend says no: the
// message has one line per backend with all of its reasons. NOT_FOUND for a backend name that is not in `backends`: the
// message lists the valid names.
absl::StatusOr<Choice> Choose(const MoeDesc& desc, const DeviceInfo& device, std::span<const Backend* const> backends,
                              const LayerPolicy& policy);

// The verdicts alone, for explanations of layers that fit nowhere.
std::vector<BackendVerdict> AskAll(const MoeDesc& desc, const DeviceInfo& device, std::span<const Backend* const> backends);

// A policy for a whole model: a default and exceptions by layer range or by weight element type. The text form is
//   P[,layers:A-B=P][,layers:N=P][,scheme:ELEMENT=P]      P is auto, require:NAME or prefer:NAME
// Later exceptions win over earlier ones.
class Policy {
 public:
  Policy() = default;
  // INVALID_ARGUMENT names the part that is wrong and what is allowed.
  static absl::StatusOr<Policy> Parse(const std::string& text);

  // The policy of layer `layer` whose gate weights are `element`.
  LayerPolicy For(int layer, ElementType element) const;

  // Every backend name that the policy mentions, for checking before anything is loaded.
  std::vector<std::string> BackendNames() const;

 private:
  struct Exception {
    bool by_layer = false;
    int first_layer = 0;
    int last_layer = 0;
    ElementType element = ElementType::kBf16;
    LayerPolicy policy;
  };
  LayerPolicy default_;
  std::vector<Exception> exceptions_;
};

// NOT_FOUND listing the valid names unless every name of `policy` is among `backends`.
absl::Status CheckNames(const Policy& policy, std::span<const Backend* const> backends);

// Built-in devices: "this", "h200", "a100", "cpu-avx2", "cpu-avx512-vnni", "cpu-avx512-bf16", "cpu-amx".
std::vector<std::string> BuiltInDeviceNames();
// The device of that built-in name; NOT_FOUND lists the names. "this" has no GPU here, since the oracle sees no kernels: callers
// that want it take LinkedDevice (kernels/backends.h).
absl::StatusOr<DeviceInfo> BuiltInDevice(const std::string& name);

}  // namespace moed

#endif  // MOED_ENGINE_ORACLE_H_
