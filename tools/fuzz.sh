#!/usr/bin/env bash
# `./dev fuzz TARGET SECONDS [--jobs N] [--models DIR]`: feeds mutated inputs to a fuzz target of tests/fuzz for that long,
# in N processes that share what they learn. Kept in .cache/fuzz/TARGET: corpus/, and findings/ with each input that broke
# something, which the next run tries first. The last line sums up; exit code 1 when there is a finding.
#
# Limits of every input: 10 seconds, 64 MiB in one allocation, 512 MiB in all. Claimed sizes never drive an allocation, and
# inputs are at most some KiB, so that any of these is a finding.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

known=(safetensors index config weights wire text recording)
usage="usage: ./dev fuzz TARGET SECONDS [--jobs N] [--models DIR]; targets: ${known[*]}"
limits=(-timeout=10 -malloc_limit_mb=64 -rss_limit_mb=512)
options=(-entropic=0 -print_funcs=0 -print_final_stats=1)  # entropic: weighing inputs took a third of the time
declare -A max_len=([safetensors]=4096 [index]=4096 [config]=8192 [weights]=32768 [wire]=4096 [text]=2048
  [recording]=4096)
# Words that help to get past the first checks.
declare -A dictionaries=([safetensors]=safetensors [index]=safetensors [config]=config
  [weights]="config safetensors" [wire]=wire [text]=text [recording]="recording safetensors")
jobs=1
models=""
words=()

parse_arguments() {
  while (($# > 0)); do
    case "$1" in
      --models | --models=* | --jobs | --jobs=*)
        [[ "$1" != *=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
        (($# >= 2)) || fail 2 "fuzz: $1: wanted a value, got nothing" "$usage"
        if [[ "$1" == --jobs ]]; then jobs="$2"; else models="$2"; fi
        shift 2
        ;;
      -*) fail 2 "fuzz: unknown option \"$1\"; options: --jobs N, --models DIR" "$usage" ;;
      *)
        words+=("$1")
        shift
        ;;
    esac
  done
  ((${#words[@]} > 0)) || fail 2 "fuzz: wanted TARGET and SECONDS, got nothing; targets: ${known[*]}" "$usage"
  target="${words[0]}"
  [[ " ${known[*]} " == *" $target "* ]] || fail 2 "fuzz: unknown target \"$target\"; targets: ${known[*]}" "$usage"
  ((${#words[@]} == 2)) || fail 2 "fuzz: wanted TARGET and SECONDS, got \"${words[*]}\"; targets: ${known[*]}" "$usage"
  seconds="${words[1]}"
  [[ "$seconds" =~ ^[1-9][0-9]{0,6}$ ]] ||
    fail 2 "fuzz: SECONDS: wanted 1 to 9999999, got \"$seconds\"; targets: ${known[*]}" "$usage"
  [[ "$jobs" =~ ^[1-9][0-9]{0,2}$ ]] || fail 2 "fuzz: --jobs: wanted 1 to 999, got \"$jobs\"" "$usage"
  if [[ -n "$models" ]]; then
    local folder
    folder="$(realpath -e "$(from_caller "$models")" 2>/dev/null || true)"
    [[ -d "$folder" ]] || fail 2 "fuzz: --models: wanted a folder, got \"$models\"" "$usage"
    models="$folder"
  fi
}

# A folder of static libraries for the linker to find first, so that a target runs on machines without them. What the
# archives of gRPC need of others is in no archive: the linker is given all of it.
static_libraries() {
  local archive folder="$root/.cache/fuzz/lib" system=/usr/lib/x86_64-linux-gnu
  rm -rf "$folder"
  mkdir -p "$folder"
  for archive in "$system"/lib{absl_*,address_sorting,cares,crypto,gpr,grpc,grpc++,protobuf,re2,ssl,upb,z}.a; do
    ln -s "$archive" "$folder/"
  done
  printf '%s\n' "--linkopt=-L$folder" --linkopt=-Wl,--as-needed
  pkg-config --static --libs-only-l grpc++ protobuf | tr ' ' '\n' | sed -n 's/^-l/--linkopt=-l/p' | sort -u
}

build() {
  local linking
  mapfile -t linking < <(static_libraries)
  bazel build --config=fuzz "${linking[@]}" "//tests/fuzz:${target}_fuzz" //tests/fuzz:make_seeds ||
    fail 2 "fuzz: the build failed"
  bin="$(bazel info --config=fuzz bazel-bin 2>/dev/null)/tests/fuzz"
}

# Sets the folder of the target up: seeds, dictionary, and the program itself, so that the folder can be taken elsewhere.
prepare() {
  local checkpoints=(tests/data/*/config.json) name
  [[ -z "$models" ]] || checkpoints+=("$models"/*/config.json)
  rm -rf "$work/seeds"
  mkdir -p "$work"/{seeds,corpus,findings,logs}
  "$bin/make_seeds" "$target" "$work/seeds" tests/fuzz/config.dict "${checkpoints[@]%/config.json}" ||
    fail 2 "fuzz: make_seeds failed with exit code $?"
  : >"$work/words.dict"
  for name in ${dictionaries[$target]}; do cat "tests/fuzz/$name.dict" >>"$work/words.dict"; done
  install -m 755 "$bin/${target}_fuzz" "$work/${target}_fuzz"
}

run() {
  local job processes=() process
  rm -f "$work"/logs/*
  for ((job = 0; job < jobs; ++job)); do
    "$work/${target}_fuzz" "${limits[@]}" "${options[@]}" -max_len="${max_len[$target]}" -dict="$work/words.dict" \
      -artifact_prefix="$work/findings/" -max_total_time="$seconds" \
      "$work/corpus" "$work/findings" "$work/seeds" >"$work/logs/$job" 2>&1 &
    processes+=($!)
  done
  for process in "${processes[@]}"; do wait "$process" || ended=$((ended + 1)); done
}

report() {
  local log inputs
  for log in "$work"/logs/*; do
    # What a finding was: the first line that says so, and where.
    grep -aE '^BROKEN|ERROR: |runtime error: |^SUMMARY|Test unit written to' "$log" | sort -u | sed "s|$root/||; s/^/  /" || true
  done
  inputs="$(awk '$1 == "stat::number_of_executed_units:" { sum += $2 } END { print sum + 0 }' "$work"/logs/*)"
  echo "$target: $inputs inputs, $((inputs / seconds)) a second, $ended findings$( ((ended == 0)) || echo " (in .cache/fuzz/$target/findings)")"
}

parse_arguments "$@"
export MOED_CUDA=none  # nvcc's host code comes from g++
tools/setup.sh tools/packages_clang.txt
work="$root/.cache/fuzz/$target"
ended=0
build
prepare
run
report
((ended == 0))
