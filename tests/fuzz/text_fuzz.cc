// Fuzz target: the small texts that come from outside. The first byte chooses the reader:
//   p  a pattern, NUL, a module name      g  a glob, NUL, a module name      n  an entry of a list, NUL, a module name
//   o  a policy                           d  a device's JSON                 c  a server's configuration file
//   m  a mask of processor features
#include <algorithm>
#include <string>
#include <vector>

#include "engine/device_json.h"
#include "engine/glob.h"
#include "engine/module_names.h"
#include "engine/oracle.h"
#include "engine/pattern.h"
#include "server/option_table.h"
#include "server/options.h"
#include "tests/fuzz/pieces.h"
#include "tests/fuzz/require.h"

namespace moed::fuzz {
namespace {

constexpr size_t kMaxName = 512;  // as QuantConfig::For allows

void TryPattern(const std::string& text, const std::string& name) {
  const auto pattern = Pattern::Compile(text);
  Require(pattern.ok() || absl::IsInvalidArgument(pattern.status()), "a bad pattern is an invalid argument");
  if (!pattern.ok()) return;
  const bool matches = pattern->MatchesStart(name);
  const auto either = Pattern::Compile("(?:" + text + ")|(?:" + text + ")");
  if (either.ok()) Require(either->MatchesStart(name) == matches, "a pattern or itself is the pattern");
}

void TryGlob(const std::string& text, const std::string& name) {
  const auto glob = Glob::Compile(text);
  Require(glob.ok() || absl::IsInvalidArgument(glob.status()), "a bad glob is an invalid argument");
  if (!glob.ok()) return;
  const bool matches = glob->Matches(name);
  if (!HasWildcard(text)) Require(matches == (text == name), "a glob without wildcards is a name");
  if (const auto open = Glob::Compile(text + "*"); matches && open.ok()) {
    Require(open->Matches(name + "x") || text.find('[') != std::string::npos, "a star takes what follows");
  }
}

void TryName(const std::string& entry, const std::string& name) {
  for (const bool mixtral : {false, true}) {
    const ModuleQuery query(name, mixtral);
    Require(CanonicalModule(query.canonical()) == query.canonical(), "a canonical name is its own canonical name");
    for (auto add : {&NameList::Add, &NameList::AddGlob, &NameList::AddPart}) {
      NameList list;
      PatternBudget patterns;
      if (const absl::Status status = (list.*add)(entry, &patterns); !status.ok()) {
        Require(absl::IsInvalidArgument(status), "a bad entry is an invalid argument");
        continue;
      }
      Require(list.Has(query) == (list.Find(query) != NameList::Match::kNone), "a list has what it finds");
    }
  }
  for (const std::string& container : WithContainers(name)) Require(name.rfind(container, 0) == 0, "containers are prefixes");
  (void)NeverQuantized(InsideBlock(name));
}

void TryPolicy(const std::string& text) {
  const auto policy = Policy::Parse(text);
  if (!policy.ok()) return;
  for (const int layer : {0, 3, 999999}) {
    const LayerPolicy own = policy->For(layer, ElementType::kInt4);
    const auto names = policy->BackendNames();
    const bool named = std::find(names.begin(), names.end(), own.backend) != names.end();
    Require(own.kind == LayerPolicy::Kind::kAuto || named, "a policy knows the backends that it asks for");
  }
}

void TryDevice(const std::string& text) {
  const auto device = DeviceFromJson(text);
  Require(device.ok() || absl::IsInvalidArgument(device.status()), "a bad device is an invalid argument");
  if (device.ok()) Require(device->cores >= 1, "a device has a core");
}

void TryConfig(const std::string& text) {
  const auto given = ParseConfig(text, "file");
  if (!given.ok()) return;
  for (const GivenOption& option : *given) Require(FindOption(option.name) != nullptr, "only known options are given");
  const auto merged = MergeOptions({}, *given, "file");
  Require(merged.ok() || !merged.status().message().empty(), "a refusal says why");
}

void TryMask(const std::string& text) {
  std::vector<std::string> names;
  if (!ParseFeatureMask(text, &names).ok()) return;
  IsaFlags isa;
  MaskFeatures(names, &isa);
}

void Run(Bytes input) {
  if (input.empty()) return;
  Bytes rest;
  const std::string text = TextOf(TakePiece(input.subspan(1), &rest));
  const std::string name = TextOf(rest.first(std::min(rest.size(), kMaxName)));
  switch (input.front()) {
    case 'p': return TryPattern(text, name);
    case 'g': return TryGlob(text, name);
    case 'n': return TryName(text, name);
    case 'o': return TryPolicy(text);
    case 'd': return TryDevice(text);
    case 'c': return TryConfig(text);
    case 'm': return TryMask(text);
    default: return;
  }
}

}  // namespace
}  // namespace moed::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moed::fuzz::Run({data, size});
  return 0;
}
