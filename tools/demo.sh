#!/usr/bin/env bash
# `./dev demo`: a tour of the programs in bin/ with a checkpoint that ships here. Each step shows its command; every step
# has to succeed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

model=tests/data/gptq-int4-g32-sym
work="$(mktemp -d)"
server=""
# Also on a failure or Ctrl-C nothing stays behind.
trap '[[ -z "$server" ]] || kill -KILL "$server" 2>/dev/null || true; rm -rf "$work"' EXIT

step() {
  printf '\n$ %s\n' "$*"
  "$@" || fail 1 "demo: the step above failed with exit code $?"
}

start_server() {
  local arguments=(serve --model "$model" --listen 127.0.0.1:0 --ready-file "$work/ready.json")
  printf '\n$ bin/moed %s &\n' "${arguments[*]}"
  bin/moed "${arguments[@]}" >"$work/stdout" 2>"$work/stderr" &
  server=$!
  for ((tenths = 0; tenths < 1200; ++tenths)); do
    [[ ! -s "$work/ready.json" ]] || break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  [[ -s "$work/ready.json" ]] || fail 1 "demo: moed did not become ready; its stderr and the end of its log:" \
    "$(cat "$work/stderr")" "$(tail -n 5 "$work/stdout")"
  address="$(grep -o '127\.0\.0\.1:[0-9]*' "$work/ready.json" | head -n 1)"
  echo "ready on $address"
}

stop_server() {
  local code=0
  printf '\n$ kill -TERM moed\n'
  kill -TERM "$server"
  wait "$server" || code=$?
  server=""
  ((code == 0)) || fail 1 "demo: moed: wanted exit code 0 after SIGTERM, got $code" "$(cat "$work/stderr")"
  echo "stopped with exit code 0"
}

echo "moed serves the MoE layers of $model (int4, from gptqmodel; 8 experts, 2 a token)."
step bin/moed explain "$model"
start_server
step bin/moectl --server "$address" status
step bin/moectl --server "$address" smoke
echo
echo "One call with the routing of the original model, compared with its golden output:"
step bin/moectl --server "$address" forward --layer 0 --input "$model/golden.safetensors" --hidden 0.x \
  --ids 0.topk_ids --weights 0.topk_weights --routed-only --dtype f32 --expect 0.y --max-rel 0.01
stop_server
