#!/usr/bin/env bash
# The allowed dependency arrows of the folders, enforced: `check_arrows.sh` prints each violated rule with the path that
# violates it; `check_arrows.sh --self-test` proves that forbidden arrows are found.
#
# Three kinds of rule, all about what is reachable and not only about direct edges:
#   only     FROM reaches nothing outside FROM and the list
#   direct   between FROM and the kernels of a device stands //kernels:backends
#   include  a file includes a system library's headers only when its target reaches that library: Bazel itself refuses
#            undeclared headers of the tree, but takes those on the compiler's default path from anyone
set -euo pipefail
shopt -s inherit_errexit  # a failed query inside $(...) ends the script too
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# By folder: //... would follow links that Bazel leaves in the workspace when its output base has changed.
tree="(//bench/... + //client/... + //engine/... + //kernels/... + //proto/... + //server/... + //tests/...)"
vocabulary="//kernels:* except //kernels:backends"
std="//third_party:absl_status + //third_party:pthread"
# The toolkit, and the setting by which its objects are for more GPUs.
cuda="@cuda//:* + //third_party/cuda:release"
status=0

query() {
  local text
  text="$(bazel query --noshow_progress --noimplicit_deps --notool_deps "$1" 2>"$errors")" ||
    fail 1 "check_arrows: bazel query failed: $1" "$(head -n 5 "$errors")"
  printf '%s' "$text"
}

# only NAME FROM ALLOWED: prints and counts what FROM reaches beyond ALLOWED.
only() {
  local found
  found="$(query "let from = $2 in kind(rule, deps(\$from)) except (\$from) except ($3)")"
  report "$1" "$2" "$found"
}

# direct NAME FROM: the targets with an edge into //kernels/cpu or //kernels/cuda of their own, other than these and the list.
direct() {
  local found
  found="$(query "let all = kind(rule, deps($2)) in let device = filter('^//kernels/(cpu|cuda)[:/]', \$all) in
    rdeps(\$all, \$device, 1) except \$device except //kernels:backends")"
  report "$1" "$2" "$found"
}

# include LIBRARY HEADERS: LIBRARY is a label; HEADERS is what follows #include <, as a regular expression.
include() {
  local files found
  files="$(query "let others = kind('cc_.* rule', $tree) except rdeps($tree, $1) in
    labels(srcs, \$others) + labels(hdrs, \$others)" | sed -n 's|^//||; s|:|/|p')"
  found="$(grep -sE "^ *# *include *[<\"]($2)" $files /dev/null || true)"
  [[ -n "$found" ]] || return 0
  status=1
  echo "VIOLATED: includes of these headers need $1 among the target's dependencies:"
  sed 's/^/  /' <<<"$found"
}

# report NAME FROM LABELS: nothing to say when LABELS is empty.
report() {
  [[ -n "$3" ]] || return 0
  status=1
  echo "VIOLATED: $1; found $(wc -l <<<"$3"):"
  local label
  while read -r label; do
    echo "  $(query "somepath($2, $label)" | paste -sd' ' | sed 's/ / -> /g')"
  done < <(head -n 5 <<<"$3")
}

check_rules() {
  only "//kernels reaches std and absl status only" "$vocabulary" "$std"
  only "//kernels/cpu reaches the vocabulary of //kernels only" "filter('^//kernels/cpu[:/]', //kernels/...)" \
    "($vocabulary) + $std"
  only "//kernels/cuda reaches the vocabulary of //kernels and CUDA only" "filter('^//kernels/cuda[:/]', //kernels/...)" \
    "($vocabulary) + $std + $cuda"
  only "//engine:oracle reaches the vocabulary of //kernels only" "//engine:oracle" "($vocabulary) + $std"
  only "//engine:safetensors reaches absl's hash map and json only" "//engine:safetensors" "//third_party:absl_hash_map + //third_party:json + $std"
  only "//engine:recorded_call and replay_report reach safetensors, absl's hash map and json only" \
    "//engine:recorded_call + //engine:replay_report" \
    "//engine:safetensors + //third_party:absl_hash_map + //third_party:json + $std"
  only "//engine reaches //kernels, absl's hash map, json, spdlog and OpenSSL's hashes only" "//engine:*" \
    "//kernels/... + //third_party:absl_hash_map + //third_party:json + //third_party:spdlog + //third_party:openssl + $std + $cuda"
  direct "//engine reaches kernels through //kernels:backends only" "//engine:*"
  only "//proto reaches gRPC and protobuf only" "//proto:*" "//third_party:grpc + //third_party:protobuf + $std"
  only "//proto:ring reaches std only" "filter('^//proto:ring', //proto:*)" "//third_party:pthread"
  only "//server:options reaches the vocabulary, json and CLI11 only" "//server:options" \
    "//server:model_name + ($vocabulary) + //third_party:json + //third_party:cli11 + $std"
  only "//server:work_queue and what copies beside it reach std and absl status only" \
    "//server:copy_helpers + //server:look_out + //server:work_queue" "//server:look_out + ($vocabulary) + $std"
  only "//server reaches engine, kernels, proto and its libraries only" "//server:*" \
    "//engine:* + //kernels/... + //proto:* + $cuda + (//third_party:* except //third_party:catch2 except //third_party:benchmark)"
  direct "//server reaches kernels through //kernels:backends only" "//server:*"
  only "//bench's ceilings and cases reach the vocabulary of //kernels only" "//bench:cases + //bench:ceilings + //bench:loops" \
    "($vocabulary) + $std"
  only "//bench's peers and cells reach its cases, json and the vocabulary only" "//bench:gpu_cells + //bench:peers + //bench:report" \
    "//bench:* + ($vocabulary) + //third_party:json + $std"
  only "//client reaches proto, gRPC, CLI11, json, OpenSSL and the leaves only" "//client/..." \
    "//engine:safetensors + //engine:recorded_call + //engine:replay_report + //proto:* +
     //third_party:grpc + //third_party:protobuf + //third_party:cli11 +
     //third_party:absl_hash_map + //third_party:json + //third_party:openssl + $std"
  only "//client's library, which is installed, reaches proto and gRPC only" "//client:moed_client" \
    "//proto:* + //third_party:grpc + //third_party:protobuf + $std"
}

check_includes() {
  include //third_party:grpc 'grpc/|grpcpp/'
  include //third_party:protobuf 'google/protobuf/'
  include //third_party:json 'nlohmann/'
  include //third_party:spdlog 'spdlog/|fmt/'
  include //third_party:cli11 'CLI/'
  include //third_party:catch2 'catch2/'
  include //third_party:benchmark 'benchmark/'
  include //third_party:openssl 'openssl/'
  include //third_party:prometheus 'prometheus/'
  include @cuda//:runtime 'cuda|cublas|cooperative_groups|mma\.h'
}

# expect_violation RULE...: the rule, run apart, must report one.
expect_violation() {
  local text
  text="$("$@")"
  [[ "$text" == VIOLATED:*//* ]] || fail 1 "check_arrows: self-test: wanted a violation, got none: $*"
}

self_test() {
  expect_violation only "made up" "//server:moed" "//server:* + //third_party:*"
  expect_violation only "made up" "//engine:model_config" "//engine:* + ($vocabulary) + $std"
  expect_violation direct "made up" "//tests/kernels:*"
  # Any target includes its own headers; here those of the tree stand for a library that nobody declares.
  expect_violation include //third_party:catch2 'engine/'
}

errors="$(mktemp)"
trap 'rm -f "$errors"' EXIT
case "${1:-}" in
  "") ;;
  --self-test) self_test && echo "check_arrows: forbidden arrows are found" && exit 0 ;;
  *) fail 2 "check_arrows: unknown option \"$1\"; options: --self-test" ;;
esac
self_test
check_rules
check_includes
echo "MOED-TEST-RESULT passed=$((1 - status)) failed=$status skipped=0"
exit "$status"
