#!/usr/bin/env bash
# `./dev sanitize [FILTER]`: every test program under AddressSanitizer with leak checking and UndefinedBehaviorSanitizer, then
# the concurrent ones under ThreadSanitizer. Any report ends its program and fails it. The last line sums up as in
# `./dev test`; the structural checks are left to that.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/test_programs.sh"

usage="usage: ./dev sanitize [FILTER]"
# What has threads and no RPC: the distribution's gRPC is not instrumented, so that its locks would not be seen.
concurrent=(//tests/engine:accelerator_test //tests/engine:concurrency_test //tests/engine:engine_changes_test
  //tests/engine:engine_test //tests/engine:merged_calls_test //tests/kernels:worker_pool_test //tests/server:copy_helpers_test
  //tests/server:forward_runner_test
  //tests/proto:ring_test //tests/server:recorder_test //tests/server:sessions_test //tests/server:work_here_test
  //tests/server:run_watch_test //tests/server:work_queue_test)
# Need no sanitizer: shell scripts, of which one builds the library for users with their own compiler.
scripts=(//tests/client:install_test //tests/tools:dev_test)
filter=""

parse_arguments() {
  local word
  for word in "$@"; do
    [[ "$word" != -* ]] || fail 2 "sanitize: unknown option \"$word\"" "$usage"
    [[ -z "$filter" ]] || fail 2 "sanitize: wanted one FILTER, got \"$filter\" and \"$word\"" "$usage"
    filter="$word"
  done
}

# run_under CONFIG NAME PROGRAM...: those that the filter leaves.
run_under() {
  local config="$1" name="$2" chosen
  shift 2
  mapfile -t chosen < <(printf '%s\n' "$@" | grep -F -e "$filter")
  ((${#chosen[@]} > 0)) || return 0
  echo "$name:"
  bazel_options=("--config=$config")
  # Suppression files, at a path that the program finds wherever it runs.
  case "$config" in
    asan) bazel_options+=("--test_env=LSAN_OPTIONS=print_suppressions=0:suppressions=$root/tools/lsan_suppressions.txt") ;;
    tsan) bazel_options+=("--test_env=TSAN_OPTIONS=halt_on_error=1:suppressions=$root/tools/tsan_suppressions.txt") ;;
  esac
  run_programs "${chosen[@]}"
}

parse_arguments "$@"
export MOED_CUDA=none  # nvcc's host code comes from g++
tools/setup.sh tools/packages_clang.txt
programs="$(list_programs)"
mapfile -t compiled < <(grep -vxF -e "$(printf '%s\n' "${scripts[@]}")" <<<"$programs")
run_under asan "AddressSanitizer and UndefinedBehaviorSanitizer" "${compiled[@]}"
run_under tsan "ThreadSanitizer" "${concurrent[@]}"
((passed + failed + skipped > 0)) ||
  printf '%s\n' "dev: sanitize: no name contains \"$filter\"; names:" "${compiled[@]/#/  }" >&2
print_sum
