#!/usr/bin/env bash
# `client/install PREFIX` gives users without Bazel a tree that they can compile, link and run against with g++ and
# pkg-config, and the example in it calls a moed. Usage: install_test.sh, in the runfiles of its target.
set -euo pipefail

prefix="$(mktemp -d)/moed"
errors="$(dirname "$prefix")/errors.txt"
server=
trap 'kill $server 2>/dev/null || true; rm -rf "$(dirname "$prefix")"' EXIT

fail() {
  echo "FAILED: $*" >&2
  echo "MOED-TEST-RESULT passed=0 failed=1 skipped=0"
  exit 1
}

code=0
client/install relative/prefix >/dev/null 2>"$errors" || code=$?
[[ $code -eq 2 ]] || fail "a relative prefix: wanted exit code 2, got $code"
grep -q "absolute PREFIX, got: relative/prefix" "$errors" || fail "a relative prefix: got $(<"$errors")"

CXXFLAGS=-O0 client/install "$prefix" || fail "client/install $prefix"
for file in include/moed/moed_client.h lib/libmoed_client.a lib/pkgconfig/moed-client.pc \
  share/moed/proto/moe/v1/moe.proto; do
  [[ -s "$prefix/$file" ]] || fail "wanted $file below the prefix, got none"
done

export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
[[ "$(pkg-config --modversion moed-client)" == 0.1.0 ]] || fail "version of moed-client.pc"
cp client/examples/forward.cc "$prefix/forward.cc"
read -r -a flags <<<"$(pkg-config --cflags --libs moed-client)"
g++ -std=c++20 -Wall -Wextra -Werror "$prefix/forward.cc" "${flags[@]}" -o "$prefix/forward" ||
  fail "the example does not build"

code=0
"$prefix/forward" 127.0.0.1:1 2>"$errors" || code=$?
[[ $code -eq 2 ]] || fail "the example without a server: wanted exit code 2, got $code"
grep -q "UNAVAILABLE: server 127.0.0.1:1" "$errors" || fail "the example without a server: got $(<"$errors")"

socket="unix:$(dirname "$prefix")/s" ready="$(dirname "$prefix")/ready"
server/moed serve --bench-layer 64 --threads 1 --listen "$socket" --ready-file "$ready" >"$errors" 2>&1 &
server=$!
until [[ -s "$ready" ]]; do
  kill -0 $server 2>/dev/null || fail "moed ended: $(<"$errors")"
  sleep 0.02
done
answer="$("$prefix/forward" "$socket")" || fail "the example with a server"
[[ "$answer" =~ ^"y[0] = 0.5, by echo in "[0-9]+" us"$ ]] || fail "the example with a server: got $answer"

echo "MOED-TEST-RESULT passed=1 failed=0 skipped=0"
