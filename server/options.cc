// Options as a whole: the merge of command line and file, and what they do to a device.
#include "server/options.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/option_table.h"
#include "server/option_values.h"

namespace moed {
namespace {

using Kind = OptionSpec::Kind;

constexpr char kDefaultListen[] = "127.0.0.1:50061";

// INVALID_ARGUMENT when an option about recording was given and no folder for it.
absl::Status CheckRecordOptions(const ServeOptions& options, const std::vector<GivenOption>& from_command_line,
                                const std::vector<GivenOption>& from_file) {
  if (!options.record.empty()) return absl::OkStatus();
  for (const std::vector<GivenOption>* source : {&from_command_line, &from_file}) {
    for (const GivenOption& given : *source) {
      if (given.name.rfind("record-", 0) != 0) continue;
      return absl::InvalidArgumentError(absl::StrCat("--", given.name, ": wanted --record beside it, got none"));
    }
  }
  return absl::OkStatus();
}

// What only all options together can show.
absl::Status CheckTogether(const ServeOptions& options) {
  if (options.max_batch_tokens > options.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("--max-batch-tokens: wanted at most --max-tokens, ", options.max_tokens,
                                                   ", got ", options.max_batch_tokens));
  }
  if (options.models.empty() && options.bench_hidden == 0) {
    return absl::InvalidArgumentError("--model: wanted at least one [NAME=]PATH of a checkpoint directory, got none");
  }
  if (options.expert_metrics && options.metrics_listen.empty()) {
    return absl::InvalidArgumentError("--expert-metrics: wanted --metrics-listen beside it, got none");
  }
  for (size_t i = 0; i < options.models.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      if (options.models[i].name != options.models[j].name) continue;
      return absl::InvalidArgumentError(absl::StrCat("--model: wanted one name per model (NAME=PATH), got '",
                                                     options.models[i].name, "' for ", options.models[j].path, " and ",
                                                     options.models[i].path));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ApplyOption(const OptionSpec& spec, const std::string& source, const std::vector<std::string>& values,
                         ServeOptions* options) {
  const auto fail = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(source, ": ", status.message()));
  };
  if (spec.kind != Kind::kList) {
    for (const std::string& value : values) {
      if (value == values.front()) continue;
      return fail(WantedGot("one value", absl::StrCat(values.front(), "' and '", value)));
    }
    return values.empty() ? absl::OkStatus() : fail(spec.set(values.front(), options));
  }
  for (const std::string& value : values) {
    if (absl::Status status = spec.set(value, options); !status.ok()) return fail(status);
  }
  return absl::OkStatus();
}

absl::StatusOr<ServeOptions> MergeOptions(const std::vector<GivenOption>& from_command_line,
                                          const std::vector<GivenOption>& from_file, const std::string& file_name) {
  ServeOptions options;
  for (const GivenOption& given : from_command_line) {
    absl::Status status = ApplyOption(*FindOption(given.name), absl::StrCat("--", given.name), given.values, &options);
    if (!status.ok()) return status;
  }
  for (const GivenOption& given : from_file) {
    const OptionSpec& spec = *FindOption(given.name);
    const std::string source = absl::StrCat(file_name, ": ", given.name);
    const auto same = std::find_if(from_command_line.begin(), from_command_line.end(),
                                   [&](const GivenOption& other) { return other.name == given.name; });
    const bool off = spec.kind == Kind::kSwitch && given.values.front() == "false";
    if (same == from_command_line.end()) {
      if (off) continue;  // as if it were not there
      if (absl::Status status = ApplyOption(spec, source, given.values, &options); !status.ok()) return status;
      continue;
    }
    // Compared by meaning, not by spelling: each applied to defaults.
    ServeOptions one, other;
    if (absl::Status status = ApplyOption(spec, source, given.values, &one); !status.ok()) return status;
    if (absl::Status status = ApplyOption(spec, source, same->values, &other); !status.ok()) return status;
    if (one == other && !off) continue;
    return absl::InvalidArgumentError(absl::StrCat(source, " conflicts with --", given.name, ": wanted one value, got '",
                                                   Join(given.values, " "), "' in the file and '", Join(same->values, " "),
                                                   "' on the command line"));
  }
  if (options.listen.empty()) options.listen.push_back(kDefaultListen);
  if (absl::Status status = CheckTogether(options); !status.ok()) return status;
  if (absl::Status status = CheckRecordOptions(options, from_command_line, from_file); !status.ok()) return status;
  return options;
}

void MaskFeatures(const std::vector<std::string>& names, IsaFlags* isa) {
  const auto falls_with = [](const std::string& flag, const std::string& masked) {
    const bool is_avx512 = flag.rfind("avx512", 0) == 0;
    if (flag == masked) return true;
    if (masked == "avx2") return is_avx512 || flag == "avxvnni";
    if (masked == "avx512f") return is_avx512;
    return masked == "amx_tile" && flag.rfind("amx_", 0) == 0;
  };
  for (const IsaFlagName& flag : IsaFlagNames()) {
    for (const std::string& masked : names) {
      if (falls_with(flag.name, masked)) isa->*flag.flag = false;
    }
  }
}

void MaskGpu(const std::string& choice, DeviceInfo* device) {
  if (choice != "none") return;
  device->has_gpu = false;
  device->gpu_name.clear();
  device->gpu_absence = "--gpu none";
  device->cuda_major = device->cuda_minor = device->gpu_multiprocessors = 0;
  device->gpu_free_bytes = 0;
}

std::string NearestName(const std::string& name, const std::vector<std::string>& candidates) {
  const auto distance = [](const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);
    for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
    for (size_t i = 1; i <= a.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= b.size(); ++j) {
        const size_t above = row[j];
        row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
        diagonal = above;
      }
    }
    return row[b.size()];
  };
  const std::string key = name.substr(0, 64);  // no option is longer; bounds the work on absurd input
  std::string best;
  size_t best_distance = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : candidates) {
    const size_t d = distance(key, candidate);
    if (d < best_distance) best = candidate, best_distance = d;
  }
  return best;
}

}  // namespace moed
