#!/usr/bin/env bash
# `./dev test [FILTER] [--models DIR]`: every test program through Bazel, then the two structural checks. Each counts its
# test cases in a line "MOED-TEST-RESULT passed=N failed=N skipped=N"; the sum is the last line printed.
#
# A program that fails without saying so in that line (a crash, a time limit, a build error) counts as one failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: ./dev test [FILTER] [--models DIR]"
checks=(check_arrows check_objects)
filter=""
models=""
passed=0
failed=0
skipped=0

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

# add_result FILE OK: adds the counts of the last result line in FILE. OK is 0 when the program ended well; another end
# counts as a failure even where the line shows none.
add_result() {
  local line p f s
  line="$(grep -a '^MOED-TEST-RESULT passed=[0-9]* failed=[0-9]* skipped=[0-9]*$' "$1" 2>/dev/null | tail -n 1 || true)"
  if [[ -z "$line" ]]; then
    failed=$((failed + 1))
    return
  fi
  read -r p f s < <(sed 's/[^0-9 ]//g' <<<"${line#MOED-TEST-RESULT }")
  if (($2 != 0 && f == 0)); then
    f=1
  fi
  passed=$((passed + p))
  failed=$((failed + f))
  skipped=$((skipped + s))
}

# Runs the test targets given and adds their results, taken from Bazel's summary: "//tests/x:y_test  (cached) PASSED in 1s".
run_programs() {
  local options=(--keep_going --color=no --test_summary=short) log="$work/bazel.log" logs label state
  # Results depend on what is in that folder, of which Bazel knows nothing.
  [[ -z "$models" ]] || options+=(--test_env=MOED_MODELS="$models" --nocache_test_results)
  bazel test "${options[@]}" "$@" 2>&1 | tee "$log" || true
  logs="$(bazel info bazel-testlogs 2>/dev/null)"
  for label in "$@"; do
    state="$(awk -v label="$label" '$1 == label' "$log" | tail -n 1)"
    local file="$logs/${label#//}"
    file="${file/://}/test.log"
    case "$state" in
      *" PASSED in "*) add_result "$file" 0 ;;
      *" FAILED in "*) add_result "$file" 1 ;;
      *) add_result /dev/null 1 ;;  # not built, killed by its time limit, or not run: an old log may still lie there
    esac
    [[ "$state" != *" in "* ]] || sed -n "s|^SKIP |$label\t|p" "$file" >>"$work/skips"
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

# Each reason for skipping with its test cases; lines of the file are "LABEL<tab>CASE: REASON", a case may say it often.
print_skips() {
  [[ -s "$work/skips" ]] || return 0
  echo "Skipped:"
  sort -u "$work/skips" | awk -F'\t' '{
    colon = index($2, ": ")
    reason = substr($2, colon + 2)
    if (!(reason in cases)) order[++reasons] = reason
    cases[reason] = cases[reason] "\n    " $1 ": " substr($2, 1, colon - 1)
  } END { for (i = 1; i <= reasons; ++i) print "  " order[i] cases[order[i]] }'
}

parse_arguments "$@"
tools/setup.sh
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

mapfile -t programs < <(bazel query --noshow_progress 'tests(//tests/...)' 2>"$work/query.log" | sort)
((${#programs[@]} > 0)) || fail 1 "test: found no test programs; bazel query says" "$(cat "$work/query.log")"
mapfile -t chosen_programs < <(printf '%s\n' "${programs[@]}" | grep -F -e "$filter")
mapfile -t chosen_checks < <(printf '%s\n' "${checks[@]}" | grep -F -e "$filter")

((${#chosen_programs[@]} == 0)) || run_programs "${chosen_programs[@]}"
((${#chosen_checks[@]} == 0)) || run_checks "${chosen_checks[@]}"
if ((${#chosen_programs[@]} + ${#chosen_checks[@]} == 0)); then
  printf '%s\n' "dev: test: no name contains \"$filter\"; names:" >&2
  printf '  %s\n' "${programs[@]}" "${checks[@]}" >&2
fi
print_skips
echo "$passed passed, $failed failed$( ((skipped == 0)) || echo ", $skipped skipped")"
((failed == 0 && passed > 0))
