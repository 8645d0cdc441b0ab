#!/usr/bin/env bash
# `./dev test [FILTER] [--models DIR]`: every test program through Bazel, then the two structural checks. The sum of their
# test cases is the last line printed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/test_programs.sh"

usage="usage: ./dev test [FILTER] [--models DIR]"
checks=(check_arrows check_objects)
filter=""
models=""

parse_arguments() {
  while (($# > 0)); do
    case "$1" in
      --models | --models=*)
        [[ "$1" == --models=* ]] && set -- --models "${1#--models=}" "${@:2}"
        (($# >= 2)) || fail 2 "test: --models: wanted a folder, got nothing" "$usage"
        models="$(realpath -e "$(from_caller "$2")" 2>/dev/null || true)"
        [[ -d "$models" ]] || fail 2 "test: --models: wanted a folder, got \"$2\"" "$usage"
        shift 2
        ;;
      -*) fail 2 "test: unknown option \"$1\"; options: --models DIR" "$usage" ;;
      *)
        [[ -z "$filter" ]] || fail 2 "test: wanted one FILTER, got \"$filter\" and \"$1\"" "$usage"
        filter="$1"
        shift
        ;;
    esac
  done
}

# The structural checks are no Bazel tests: a `bazel query` inside `bazel test` would wait for its own lock.
run_checks() {
  local check code
  for check in "$@"; do
    code=0
    "tools/$check.sh" >"$work/$check.log" 2>&1 || code=$?
    add_result "$work/$check.log" "$code"
    echo "//tools:$check $( ((code == 0)) && echo passed || echo FAILED)"
    ((code == 0)) || cat "$work/$check.log"
  done
}

parse_arguments "$@"
tools/setup.sh
# Results depend on what is in that folder, of which Bazel knows nothing.
[[ -z "$models" ]] || bazel_options=(--test_env=MOED_MODELS="$models" --nocache_test_results)

programs="$(list_programs)"
mapfile -t chosen_programs < <(grep -F -e "$filter" <<<"$programs")
mapfile -t chosen_checks < <(printf '%s\n' "${checks[@]}" | grep -F -e "$filter")

((${#chosen_programs[@]} == 0)) || run_programs "${chosen_programs[@]}"
((${#chosen_checks[@]} == 0)) || run_checks "${chosen_checks[@]}"
if ((${#chosen_programs[@]} + ${#chosen_checks[@]} == 0)); then
  printf '%s\n' "dev: test: no name contains \"$filter\"; names:" >&2
  printf '  %s\n' $programs "${checks[@]}" >&2
fi
print_sum
