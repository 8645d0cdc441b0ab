#include "engine/oracle.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace moed {
namespace {

constexpr char kOnlyByName[] = "only_by_name";

std::string DescribeLayer(const MoeDesc& desc) {
  return absl::StrCat("E=", desc.num_experts, " k=", desc.top_k, " H=", desc.hidden, " I=", desc.intermediate, ", ",
                      Describe(desc.scheme));
}

std::string JoinReasons(const Verdict& verdict) {
  if (verdict.ok()) return "ok";
  std::string text;
  for (const Reason& reason : verdict.reasons) absl::StrAppend(&text, text.empty() ? "" : "; ", reason.text);
  return text;
}

// One indented line per backend, for the details below the first line of an error.
std::string VerdictLines(const std::vector<BackendVerdict>& verdicts) {
  std::string lines;
  for (const BackendVerdict& entry : verdicts) absl::StrAppend(&lines, "\n  ", entry.name, ": ", JoinReasons(entry.verdict));
  return lines;
}

std::string ValidNames(std::span<const Backend* const> backends) {
  std::string names;
  for (const Backend* backend : backends) absl::StrAppend(&names, names.empty() ? "" : ", ", backend->Name());
  return names.empty() ? "none" : names;
}

absl::Status UnknownBackend(const std::string& name, std::span<const Backend* const> backends) {
  return absl::NotFoundError(absl::StrCat("backend \"", name, "\" is unknown; valid names: ", ValidNames(backends)));
}

// The verdicts when the backend called `by_name` (empty: none) was asked for.
std::vector<BackendVerdict> Ask(const MoeDesc& desc, const DeviceInfo& device, std::span<const Backend* const> backends,
                                const std::string& by_name) {
  std::vector<BackendVerdict> verdicts;
  for (const Backend* backend : backends) {
    BackendVerdict entry{backend->Name(), backend->Check(desc, device)};
    if (!backend->Automatic() && entry.name != by_name) {
      entry.verdict.reasons.push_back(
          {kOnlyByName, absl::StrCat("runs only when asked for by name (require:", entry.name, ")")});
    }
    verdicts.push_back(std::move(entry));
  }
  return verdicts;
}

// The first backend that fits and may be chosen automatically; null when there is none.
const Backend* FirstFit(std::span<const Backend* const> backends, const std::vector<BackendVerdict>& verdicts) {
  for (size_t i = 0; i < backends.size(); ++i) {
    if (verdicts[i].verdict.ok() && backends[i]->Automatic()) return backends[i];
  }
  return nullptr;
}

}  // namespace

std::vector<BackendVerdict> AskAll(const MoeDesc& desc, const DeviceInfo& device, std::span<const Backend* const> backends) {
  return Ask(desc, device, backends, "");
}

absl::StatusOr<Choice> Choose(const MoeDesc& desc, const DeviceInfo& device, std::span<const Backend* const> backends,
                              const LayerPolicy& policy) {
  const bool named = policy.kind != LayerPolicy::Kind::kAuto;
  Choice choice;
  choice.verdicts = Ask(desc, device, backends, named ? policy.backend : "");
  if (named) {
    const auto at = std::find_if(choice.verdicts.begin(), choice.verdicts.end(),
                                 [&](const BackendVerdict& entry) { return entry.name == policy.backend; });
    if (at == choice.verdicts.end()) return UnknownBackend(policy.backend, backends);
    if (at->verdict.ok()) {
      choice.backend = backends[at - choice.verdicts.begin()];
      return choice;
    }
    if (policy.kind == LayerPolicy::Kind::kRequire) {
      return absl::FailedPreconditionError(absl::StrCat("the required backend ", policy.backend, " cannot run this layer (",
                                                        DescribeLayer(desc), ") on ", device.name, ":",
                                                        VerdictLines(choice.verdicts)));
    }
    choice.note = absl::StrCat("preferred backend ", policy.backend, " not taken: ", JoinReasons(at->verdict));
  }
  choice.backend = FirstFit(backends, choice.verdicts);
  if (choice.backend == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("no backend can run this layer (", DescribeLayer(desc), ") on ",
                                                      device.name, ":", VerdictLines(choice.verdicts)));
  }
  return choice;
}

absl::Status CheckNames(const Policy& policy, std::span<const Backend* const> backends) {
  for (const std::string& name : policy.BackendNames()) {
    const bool known = std::any_of(backends.begin(), backends.end(), [&](const Backend* b) { return b->Name() == name; });
    if (!known) return UnknownBackend(name, backends);
  }
  return absl::OkStatus();
}

}  // namespace moed
