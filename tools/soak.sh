#!/usr/bin/env bash
# `./dev soak [SECONDS]`: a real server under clients that do everything at random, for that long (default 600) and a warm-up before it.
# `./dev soak --overload`: a server under more calls than it can compute; some three minutes.
# `./dev soak --kill`: what the death of a client costs the others; some five minutes.
# `./dev soak --swap`: what changes of weights cost the calls beside them; a minute and some.
# All are judged by the program of tests/soak, whose table is printed; exit code 1 when anything in it failed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: ./dev soak [SECONDS] | ./dev soak --overload | ./dev soak --kill | ./dev soak --swap"
data=(--data "$root/tests/data")
arguments=(run --seconds 600 "${data[@]}")
packages=()  # lists beside packages.txt

parse_arguments() {
  (($# <= 1)) || fail 2 "soak: wanted at most one argument, got $#" "$usage"
  (($# == 1)) || return 0
  case "$1" in
    --overload)
      arguments=(overload "${data[@]}")
      packages=(tools/packages_soak.txt)
      ;;
    --kill) arguments=(kill "${data[@]}") ;;
    --swap) arguments=(swap) ;;
    -*) fail 2 "soak: unknown option \"$1\"; options: --overload, --kill, --swap" "$usage" ;;
    *)
      [[ "$1" =~ ^[1-9][0-9]{1,6}$ ]] || fail 2 "soak: SECONDS: wanted 10 to 9999999, got \"$1\"" "$usage"
      arguments=(run --seconds "$1" "${data[@]}")
      ;;
  esac
}

parse_arguments "$@"
tools/setup.sh "${packages[@]}"
bazel build //server:moed //tests/soak:soak || fail 2 "soak: the build failed"
bin="$(bazel info bazel-bin 2>/dev/null)"
exec "$bin/tests/soak/soak" "${arguments[@]}" --moed "$bin/server/moed"
