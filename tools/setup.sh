#!/usr/bin/env bash
# `setup.sh [LIST...]` installs what the build needs and this machine lacks: the packages of packages.txt and of each LIST,
# from Debian 12 by apt. Says nothing and changes nothing when all are there. Output of apt goes to .cache/setup.log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

lists=(tools/packages.txt "$@")
log="$root/.cache/setup.log"
mapfile -t packages < <(sed 's/#.*//' "${lists[@]}" | awk 'NF { print $1 }')

# One line "NAME VERSION" for each package of the lists that is installed; the version without epoch.
installed() {
  dpkg-query -W -f '${Package} ${db:Status-Status} ${Version}\n' "${packages[@]}" 2>/dev/null |
    awk '$2 == "installed" { sub(/^[0-9]+:/, "", $3); print $1, $3 }' || true
}

missing() {
  comm -23 <(printf '%s\n' "${packages[@]}" | sort -u) <(installed | cut -d' ' -f1 | sort -u)
}

require_debian_12() {
  local id="" version="" name="an unknown system"
  if [[ -r /etc/os-release ]]; then
    read -r id version name < <(source /etc/os-release && echo "${ID:--} ${VERSION_ID:--} ${PRETTY_NAME:-${ID:-}}") || true
  fi
  [[ "$id" == debian && "$version" == 12 ]] ||
    fail 2 "set-up: wanted Debian 12 (bookworm), got $name" \
      "run it in a debian:12 container, or install the counterparts of these packages (with versions: ${lists[*]})" "${packages[*]}"
}

as_root() {
  if ((EUID == 0)); then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    fail 2 "set-up: wanted root or sudo to install packages, got neither; as root run" \
      "apt-get update && apt-get install --no-install-recommends ${wanted[*]}"
  fi
}

apt_get() {
  as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=600 "$@" >>"$log" 2>&1 </dev/null ||
    fail 2 "set-up: apt-get $1 failed; its output is in $log and ends with" "$(tail -n 5 "$log")"
}

check_versions() {
  local found
  found="$(installed)"
  while read -r package want; do
    [[ "$want" == - ]] && continue
    local got
    got="$(awk -v package="$package" '$1 == package { print $2 }' <<<"$found")"
    [[ "$got" == "$want"* ]] || fail 2 "set-up: $package: wanted version $want*, got ${got:-none}" "versions: ${lists[*]}"
  done < <(sed 's/#.*//' "${lists[@]}" | awk 'NF')
}

require_debian_12
mapfile -t wanted < <(missing)
if ((${#wanted[@]} > 0)); then
  mkdir -p "$(dirname "$log")"
  : >"$log"
  echo "set-up: installing (log: .cache/setup.log): ${wanted[*]}"
  as_root mkdir -p /usr/share/man/man1  # slim images lack it, and Java's set-up fails without
  apt_get update
  apt_get install -y --no-install-recommends "${wanted[@]}"
fi
check_versions

# The one part of the build that is not from Debian.
tools/cuda_wheels.sh
