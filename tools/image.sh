#!/usr/bin/env bash
# `./dev image [--from-source] [--output FILE]`: the container image of deploy/Dockerfile, built by buildah, then run once
# (image_smoke.sh). Needs root and Debian's apt mirror, but no daemon and no registry: the base image is Debian 12 by debootstrap,
# from the mirror that apt uses on this machine, which stays out of the image.
#
# What buildah keeps lies in .cache/image: the base, which is made again only when apt's sources change, and the image as
# localhost/moed. Output of debootstrap and buildah goes to .cache/image/build.log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage="usage: ./dev image [--from-source] [--output FILE]"
cache=.cache/image
log="$cache/build.log"
base=localhost/moed-base
image=localhost/moed
from_source=0
output=""

parse_arguments() {
  while (($# > 0)); do
    case "$1" in
      --from-source)
        from_source=1
        shift
        ;;
      --output | --output=*)
        [[ "$1" == --output=* ]] && set -- --output "${1#--output=}" "${@:2}"
        (($# >= 2)) && [[ -n "$2" ]] || fail 2 "image: --output: wanted a file, got nothing" "$usage"
        output="$(from_caller "$2")"
        [[ -d "$(dirname "$output")" && ! -e "$output" ]] ||
          fail 2 "image: --output: wanted a new file in a folder that exists, got \"$2\"" "$usage"
        shift 2
        ;;
      *) fail 2 "image: unknown argument \"$1\"; options: --from-source, --output FILE" "$usage" ;;
    esac
  done
}

require_rights() {
  ((EUID == 0)) || fail 2 "image: wanted root, got user id $EUID" "debootstrap and buildah's chroot need it: sudo ./dev image"
  unshare --mount --net --pid --fork true 2>/dev/null ||
    fail 2 "image: wanted to make namespaces of mounts, network and processes, got a refusal of the system" \
      "in a container that takes the capability SYS_ADMIN"
}

# logged COMMAND...: its output goes to the log; a failure shows the end of that.
logged() {
  nice -n 10 "$@" >>"$log" 2>&1 </dev/null ||
    fail 2 "image: $1 failed with exit code $?; its output is in $log and ends with" "$(tail -n 5 "$log")"
}

# A store of our own: what the user's buildah or podman has is neither seen nor changed.
store=(buildah --root "$root/$cache/storage" --runroot "$root/$cache/run" --storage-driver vfs)

# Debian's repositories that apt uses here, as lines of sources.list.
apt_sources() {
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' | sort -u
}

# What Debian's own slim images leave out too; licences stay. Nor does dpkg wait for the disk: an image that was cut short by a
# loss of power is built again.
slim_down() {
  local folder="$1"
  printf '%s\n' path-exclude={/usr/share/{man,info,locale},/usr/share/doc}/'*' path-include='/usr/share/doc/*/copyright' \
    force-unsafe-io >"$folder/etc/dpkg/dpkg.cfg.d/slim"
  rm -rf "$folder"/usr/share/{man,info,locale}/* "$folder"/var/lib/apt/lists/* "$folder"/var/cache/apt/* "$folder"/var/log/*
  find "$folder/usr/share/doc" ! -type d ! -name copyright -delete
  # Those of this machine.
  rm -f "$folder/etc/hostname" "$folder/etc/resolv.conf"
  : >"$folder/etc/apt/sources.list"
}

make_base() {
  local mirror container
  apt_sources >"$work/sources.list"
  # Also a proxy, and what a mirror of old snapshots wants.
  apt-config dump Acquire >"$work/apt.conf"
  if cmp -s "$work/sources.list" "$cache/sources.list" && "${store[@]}" inspect --type image "$base" >/dev/null 2>&1; then
    return
  fi
  mirror="$(awk '$3 == "bookworm" && $4 == "main" { print $2; exit }' "$work/sources.list")"
  [[ -n "$mirror" ]] || fail 2 "image: wanted the main part of bookworm among apt's sources, got none" \
    "apt-get update reads them again" "$(cat "$work/sources.list")"
  echo "image: Debian 12 by debootstrap (log: $log)"
  DPKG_FORCE=unsafe-io logged debootstrap --variant=minbase --components=main bookworm "$work/base" "$mirror"
  slim_down "$work/base"
  container="$("${store[@]}" from scratch)"
  logged "${store[@]}" add --quiet "$container" "$work/base" /
  logged "${store[@]}" commit --quiet --format docker --rm "$container" "$base"
  cp "$work/sources.list" "$cache/sources.list"
}

build_image() {
  # A toolkit's folder of this machine is not in there.
  local cuda="${MOED_CUDA:-}"
  [[ "$cuda" != /* ]] || cuda=wheels
  if ((from_source)); then
    echo "image: deploy/Dockerfile from source (log: $log)"
  else
    echo "image: deploy/Dockerfile with bin/moed and bin/moectl (log: $log); --from-source builds them in the image's own stage"
  fi
  logged "${store[@]}" bud --isolation chroot --format docker --pull=never --ignorefile deploy/Dockerfile.dockerignore \
    --volume "$work/sources.list:/etc/apt/sources.list:ro" --volume "$work/apt.conf:/etc/apt/apt.conf:ro" \
    --build-arg BASE="$base" --build-arg FROM_SOURCE="$from_source" --build-arg MOED_CUDA="$cuda" \
    --tag "$image" --file deploy/Dockerfile .
}

report() {
  local size base_size
  size="$("${store[@]}" images --format '{{.Size}}' "$image")"
  base_size="$("${store[@]}" images --format '{{.Size}}' "$base")"
  if [[ -n "$output" ]]; then
    logged "${store[@]}" push "$image" "docker-archive:$output:moed:latest"
    echo "image: written to $output: docker load --input $output"
  fi
  echo "image: $image, $size, of which Debian $base_size; run once, passed"
}

parse_arguments "$@"
require_rights
((from_source)) || ./dev build
tools/setup.sh tools/packages_image.txt
mkdir -p "$cache"
: >"$log"
work="$(mktemp -d "$root/$cache/work.XXXXXX")"
trap 'rm -rf --one-file-system "$work"' EXIT
make_base
build_image
# In namespaces of its own: the image's ports, whatever else listens here; mounts and processes that end with it.
unshare --mount --propagation private --net --pid --fork --kill-child --mount-proc \
  tools/image_smoke.sh "$image" "$work" "${store[@]}"
logged "${store[@]}" rmi --prune
report
