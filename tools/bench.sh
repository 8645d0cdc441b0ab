#!/usr/bin/env bash
# `./dev bench [KIND,...] [FILTER] [--json FILE] [-- OPTIONS]`: runs the benchmark program //bench:KIND_bench of each kind.
# Without KIND those that need no GPU. FILE gets the rows of all of them in one list. OPTIONS are for the program of one KIND as they
# are; its --help lists them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

known=(cpu load rpc gpu)
usual=(cpu load)
usage="usage: ./dev bench [KIND,...] [FILTER] [--json FILE] [-- OPTIONS of the one KIND]; kinds: ${known[*]}"
words=()
options=()
json=""
while (($# > 0)); do
  case "$1" in
    --json | --json=*)
      [[ "$1" == --json=* ]] && set -- --json "${1#--json=}" "${@:2}"
      [[ -n "${2:-}" ]] || fail 2 "bench: --json: wanted a file, got nothing" "$usage"
      json="$(from_caller "$2")"
      shift 2
      ;;
    --)
      options=("${@:2}")
      break
      ;;
    -*) fail 2 "bench: unknown option \"$1\"; options: --json FILE, -- OPTIONS" "$usage" ;;
    *)
      words+=("$1")
      shift
      ;;
  esac
done
((${#words[@]} <= 2)) || fail 2 "bench: wanted at most KIND and FILTER, got \"${words[*]}\"" "$usage"
IFS=, read -r -a kinds <<<"${words[0]:-$(IFS=,; echo "${usual[*]}")}"
for kind in "${kinds[@]}"; do
  [[ " ${known[*]} " == *" $kind "* ]] || fail 2 "bench: unknown kind \"$kind\"; kinds: ${known[*]}" "$usage"
done
[[ -z "$json" || -d "$(dirname "$json")" ]] || fail 2 "bench: --json: wanted a file in a folder that exists, got \"$json\"" "$usage"

((${#options[@]} == 0 || ${#kinds[@]} == 1)) ||
  fail 2 "bench: --: wanted one KIND, whose options these are, got \"$(IFS=,; echo "${kinds[*]}")\"" "$usage"

tools/setup.sh
if [[ " ${kinds[*]} " == *" gpu "* ]]; then
  found="$(bazel query --noshow_progress "filter(':gpu_bench\$', //bench:all)" 2>/dev/null)" || fail 2 "bench: gpu: bazel query failed"
  [[ -n "$found" ]] || fail 2 "bench: gpu: no CUDA toolkit was found, and a build without one has no gpu_bench" \
    "third_party/cuda/repository.bzl says where it is looked for"
fi
targets=("${kinds[@]/#///bench:}")
bazel build "${targets[@]/%/_bench}" || fail 2 "bench: the build failed"
bin="$(bazel info bazel-bin 2>/dev/null)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
for kind in "${kinds[@]}"; do
  (cd "$DEV_CALLER" && exec "$bin/bench/${kind}_bench" --json "$work/$kind.json" "${options[@]}" ${words[1]:+"${words[1]}"}) ||
    fail 1 "bench: ${kind}_bench failed with exit code $?"
done
if [[ -n "$json" ]]; then
  python3 -c 'import json, sys; print(json.dumps([row for name in sys.argv[1:] for row in json.load(open(name))], indent=1))' \
    "$work"/*.json >"$json"
fi
