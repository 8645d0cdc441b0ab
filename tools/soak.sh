#!/usr/bin/env bash
# `./dev soak [SECONDS]`: a real server under clients that do everything at random, for that long (default 600) and a warm-up before it.
# `./dev soak --overload`: a server under more calls than it can compute; some three minutes. Both are judged by the program of
# tests/soak, whose table is printed; exit code 1 when anything in it failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: ./dev soak [SECONDS] | ./dev soak --overload"
arguments=(run --seconds 600)

parse_arguments() {
  (($# <= 1)) || fail 2 "soak: wanted at most one argument, got $#" "$usage"
  (($# == 1)) || return 0
  case "$1" in
    --overload) arguments=(overload) ;;
    -*) fail 2 "soak: unknown option \"$1\"; options: --overload" "$usage" ;;
    *)
      [[ "$1" =~ ^[1-9][0-9]{1,6}$ ]] || fail 2 "soak: SECONDS: wanted 10 to 9999999, got \"$1\"" "$usage"
      arguments=(run --seconds "$1")
      ;;
  esac
}

parse_arguments "$@"
tools/setup.sh
bazel build //server:moed //tests/soak:soak || fail 2 "soak: the build failed"
bin="$(bazel info bazel-bin 2>/dev/null)"
exec "$bin/tests/soak/soak" "${arguments[@]}" --moed "$bin/server/moed" --data "$root/tests/data"
