#!/usr/bin/env bash
# Shared by `dev` and the scripts beside this file; to be sourced. Sets `root` (the workspace) and changes into it; paths on
# the command line are meant relative to where the user was: `from_caller`.
# Exit codes of all of them: 0 ok, 1 a check failed, 2 usage or set-up.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export DEV_CALLER="${DEV_CALLER:-$PWD}"
cd "$root" || exit 2

# fail CODE FIRST_LINE [DETAIL...]: the error on stderr, details indented below it.
fail() {
  local code="$1"
  printf '%s\n' "dev: $2" >&2
  shift 2
  (($# == 0)) || printf '%s\n' "$@" | sed 's/^/  /' >&2
  exit "$code"
}

# from_caller PATH: PATH, absolute.
from_caller() {
  if [[ "$1" == /* ]]; then echo "$1"; else echo "$DEV_CALLER/$1"; fi
}

# Bazel keeps its output below the home directory and asks for a user name. Services and containers may have neither.
bazel() {
  local where=() home="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}"
  [[ -w "$home" ]] || where=(--output_user_root="/tmp/moed-bazel-$(id -u)")
  USER="${USER:-$(id -un 2>/dev/null || id -u)}" command bazel "${where[@]}" "$@"
}
