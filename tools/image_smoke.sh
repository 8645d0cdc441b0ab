#!/usr/bin/env bash
# Runs an image of moed as an operator would: `image_smoke.sh IMAGE WORK BUILDAH...`, from image.sh, as root in namespaces of its
# own for mounts, network and processes. WORK is a folder for what has to be written, BUILDAH the command with its store.
#
# Users, command and health check are those that the image names. Its root is read-only; a checkpoint of tests/data is at
# /model, and /run/moed can be written. Each step shows its command; every step has to succeed.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

image="$1"
work="$2"
store=("${@:3}")
model=tests/data/gptq-int4-g32-sym
state="$work/state"  # /run/moed
container=""
trap '[[ -z "$container" ]] || "${store[@]}" rm "$container" >/dev/null 2>&1 || true' EXIT

# in_image COMMAND...: beside what runs there already, as the image's user.
in_image() {
  "${store[@]}" run --isolation chroot --volume "$root/$model:/model:ro" --volume "$state:/run/moed" "$container" -- "$@"
}

step() {
  printf '\n$ %s\n' "$*"
  in_image "$@" || fail 1 "image: the step above failed with exit code $?"
}

# image_words NAME...: the words of these lists of the image's configuration, one a line.
image_words() {
  "${store[@]}" inspect --type image "$image" | python3 -c '
import json, sys
config = json.load(sys.stdin)["Docker"]["config"]
words = {"Healthcheck": config.get("Healthcheck", {}).get("Test", [])[1:]}
for name in sys.argv[1:]:
    print(*words.get(name, config.get(name)), sep="\n")' "$@"
}

check_libraries() {
  local lacking
  lacking="$(in_image ldd /usr/bin/moed /usr/bin/moectl | awk '/not found/ { print $1 }' | sort -u)"
  [[ -z "$lacking" ]] || fail 1 "image: wanted every shared library of moed and moectl, got none of: $(tr '\n' ' ' <<<"$lacking")" \
    "deploy/Dockerfile lists the packages that have them"
}

# From here on the root is read-only, as by `docker run --read-only`; buildah has no option for it. buildah itself wants to
# write below /run, and the mount points of what it mounts.
mount_root() {
  local folder
  folder="$("${store[@]}" mount "$container")"
  touch "$folder/etc/hosts" "$folder/etc/hostname" "$folder/etc/resolv.conf"
  mkdir -p "$folder/model"
  mount --bind "$folder" "$folder"
  mount -o remount,bind,ro "$folder"
  mount -t tmpfs -o mode=755 moed-run "$folder/run"
}

check_user() {
  local user
  user="$(in_image id -u)"
  [[ "$user" != 0 ]] || fail 1 "image: wanted a user other than root, got user id 0"
  echo "user id $user"
  for folder in / /etc /usr/bin /tmp /run; do
    ! in_image touch "$folder/written" 2>/dev/null || fail 1 "image: wanted a read-only root, got a file written in $folder"
  done
  echo "nothing can be written outside of /run/moed"
}

start_server() {
  local words
  mapfile -t words < <(image_words Entrypoint Cmd)
  printf '\n$ %s &\n' "${words[*]}"
  in_image "${words[@]}" >"$work/stdout" 2>"$work/stderr" &
  server=$!
  for ((tenths = 0; tenths < 1200; ++tenths)); do
    [[ ! -s "$state/ready.json" ]] || break
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  [[ -s "$state/ready.json" ]] || fail 1 "image: moed did not become ready; its stderr and the end of its log:" \
    "$(cat "$work/stderr")" "$(tail -n 5 "$work/stdout")"
  cat "$state/ready.json"
}

stop_server() {
  local code=0
  printf '\n$ kill -TERM moed\n'
  kill -TERM "$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["pid"])' "$state/ready.json")"
  wait "$server" || code=$?
  ((code == 0)) || fail 1 "image: moed: wanted exit code 0 after SIGTERM, got $code" "$(cat "$work/stderr")"
  [[ ! -e "$state/ready.json" ]] || fail 1 "image: wanted no ready file after the end, got $(cat "$state/ready.json")"
  echo "stopped with exit code 0"
}

ip link set lo up
container="$("${store[@]}" from --pull-never "$image")"
install -d -o 10001 -g 10001 "$state"
mount_root
check_user
check_libraries
start_server
mapfile -t health < <(image_words Healthcheck)
step "${health[@]}"
step moectl status
step moectl --server unix:/run/moed/moed.sock smoke
stop_server
! in_image "${health[@]}" >/dev/null 2>&1 || fail 1 "image: wanted the health check to fail without a server, got exit code 0"
