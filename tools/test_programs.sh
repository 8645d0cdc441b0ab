#!/usr/bin/env bash
# Shared by test.sh and sanitize.sh; to be sourced after common.sh. Runs test programs through Bazel and adds up the test
# cases that each reports in a line "MOED-TEST-RESULT passed=N failed=N skipped=N".
#
# A program that fails without saying so in that line (a crash, a time limit, a build error) counts as one failed.
passed=0
failed=0
skipped=0
bazel_options=()  # of run_programs
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

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

# run_programs TARGET...: runs these tests with `bazel_options` and adds their results, taken from Bazel's summary:
# "//tests/x:y_test  (cached) PASSED in 1s".
run_programs() {
  local log="$work/bazel.log" code=0 logs label state
  bazel test --keep_going --color=no --test_summary=short "${bazel_options[@]}" "$@" 2>&1 | tee "$log" || code="${PIPESTATUS[0]}"
  ((code != 8)) || fail 1 "interrupted"  # Bazel's code for that
  logs="$(bazel info "${bazel_options[@]}" bazel-testlogs 2>/dev/null)"
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

# All test programs, sorted.
list_programs() {
  local programs
  programs="$(bazel query --noshow_progress 'tests(//tests/...)' 2>"$work/query.log" | sort)"
  [[ -n "$programs" ]] || fail 1 "found no test programs; bazel query says" "$(cat "$work/query.log")"
  echo "$programs"
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

# The last line of a run, and its exit code.
print_sum() {
  print_skips
  echo "$passed passed, $failed failed$( ((skipped == 0)) || echo ", $skipped skipped")"
  ((failed == 0 && passed > 0))
}
