#!/usr/bin/env bash
# Gets a CUDA toolkit for a machine without one: the wheels of cuda_wheels.txt, unpacked into .cuda in the layout of a toolkit
# (bin, include, lib, nvvm), some 270 MB. Says nothing and changes nothing when a toolkit is there; where it is looked for, and what
# MOED_CUDA says otherwise, is written in third_party/cuda/repository.bzl.
#
# Without the wheels (no network, another processor) the build goes on for CPUs only: one line says so, and the exit code is 0.
# Output of pip goes to .cache/cuda_wheels.log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pins=tools/cuda_wheels.txt
log=.cache/cuda_wheels.log
folder=.cuda

# usable NVCC: a compiler from CUDA 12.8 on, the oldest that repository.bzl takes.
usable() {
  local version
  version="$("$1" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
  [[ -n "$version" && "$(printf '%s\n' 12.8 "$version" | sort -V | head -n 1)" == 12.8 ]]
}

# Whether the wheels of today's pins are unpacked.
unpacked() {
  cmp -s "$pins" "$folder/pins.txt"
}

needed() {
  case "${MOED_CUDA:-}" in
    "") ! usable nvcc && ! usable /usr/local/cuda/bin/nvcc && ! unpacked ;;
    wheels) ! unpacked ;;
    *) return 1 ;;  # none, or a toolkit's folder
  esac
}

# pip is wanted by nothing else, so only here is it installed.
have_pip() {
  python3 -m pip --version >/dev/null 2>&1 || MOED_CUDA=none tools/setup.sh tools/packages_pip.txt
}

download() {
  python3 -m pip download --quiet --disable-pip-version-check --retries 1 --timeout 60 --no-cache-dir --no-deps \
    --only-binary :all: --require-hashes --requirement "$pins" --dest "$work/wheels"
}

unpack() {
  local wheel toolkit="$work/nvidia/cu13"
  for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work" || return 1; done
  chmod -R u+rwX,go+rX "$toolkit" && chmod 755 "$toolkit"/bin/* "$toolkit"/nvvm/bin/* && ln -s lib "$toolkit/lib64" &&
    usable "$toolkit/bin/nvcc" && cp "$pins" "$toolkit/pins.txt" && rm -rf "$folder" && mv -T "$toolkit" "$folder"
}

# A running Bazel has looked for a toolkit already.
refetch() {
  bazel sync --noshow_progress --only=cuda
}

needed || exit 0
mkdir -p "$(dirname "$log")"
work="$(mktemp -d .cache/cuda_wheels.XXXXXX)"
trap 'rm -rf "$work"' EXIT
echo "set-up: getting the CUDA toolkit from PyPI (log: $log)"
if { have_pip && download && unpack; } >"$log" 2>&1; then
  refetch >>"$log" 2>&1 || fail 2 "set-up: bazel sync failed; its output is in $log and ends with" "$(tail -n 5 "$log")"
else
  echo "set-up: no CUDA toolkit, and its wheels could not be had: building for CPUs only (MOED_CUDA=none does not try)"
fi
