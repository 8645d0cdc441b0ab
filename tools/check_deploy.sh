#!/usr/bin/env bash
# `./dev check-deploy`: what deploy/ has for Kubernetes and systemd, held against the tools that users have. Needs neither of the
# two to run: kubernetes-validate has the schemas of Kubernetes and comes from PyPI into .cache/check_deploy, in the versions and
# with the hashes of kubernetes_validate.txt; systemd-analyze reads the unit as the service manager would.
# The configurations inside are read by //tests/deploy:configs_test.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pins=tools/kubernetes_validate.txt
venv=.cache/check_deploy
log=.cache/check_deploy.log
# The first version whose probes by gRPC are stable, and the newest one that the pinned schemas have.
versions=(1.27 1.37)
# From 0 to 100, as `systemd-analyze security` weighs what a service may do; units without any hardening have 96.
exposure=20

set_up() {
  tools/setup.sh tools/packages_deploy.txt
  cmp -s "$pins" "$venv/pins.txt" && return
  echo "check-deploy: getting kubernetes-validate from PyPI (log: $log)"
  rm -rf "$venv"
  { python3 -m venv "$venv" && "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps --only-binary :all: \
    --require-hashes --requirement "$pins"; } >"$log" 2>&1 ||
    fail 2 "check-deploy: kubernetes-validate could not be had; the output is in $log and ends with" "$(tail -n 5 "$log")"
  cp "$pins" "$venv/pins.txt"
}

check_manifests() {
  local version
  for version in "${versions[@]}"; do
    "$venv/bin/kubernetes-validate" --strict --quiet --kubernetes-version "$version" deploy/kubernetes/*.yaml ||
      fail 1 "check-deploy: wanted manifests of Kubernetes $version, got the faults above"
    echo "deploy/kubernetes: objects of Kubernetes $version"
  done
}

# Both Deployments are whole files, so that kubectl needs nothing else; they may differ only where their first lines say.
check_same() {
  "$venv/bin/python" - deploy/kubernetes/cpu.yaml deploy/kubernetes/gpu.yaml <<'PYTHON' ||
import sys, yaml

def rest(path):
    deployment = list(yaml.safe_load_all(open(path)))[1]
    pod = deployment["spec"]["template"]["spec"]
    pod.pop("tolerations", None)
    del pod["containers"][0]["resources"]
    return deployment

sys.exit(rest(sys.argv[1]) != rest(sys.argv[2]))
PYTHON
    fail 1 "check-deploy: cpu.yaml and gpu.yaml: wanted Deployments that differ in tolerations and resources, got other differences"
  echo "deploy/kubernetes: cpu.yaml and gpu.yaml differ in configuration, tolerations and resources only"
}

# systemd-analyze wants the programs to be there, and takes unknown keys for warnings.
check_unit() {
  local unit="$work/moed.service" faults
  sed 's|/usr/local/bin/moed|/bin/true|' deploy/systemd/moed.service >"$unit"
  faults="$(systemd-analyze --man=no verify "$unit" 2>&1)" && [[ -z "$faults" ]] ||
    fail 1 "check-deploy: deploy/systemd/moed.service: wanted a unit without faults, got" "$faults"
  faults="$(systemd-analyze --no-pager security --offline=true --threshold="$exposure" "$unit" 2>&1)" ||
    fail 1 "check-deploy: deploy/systemd/moed.service: wanted an exposure of at most $exposure, got" "$faults"
  echo "deploy/systemd/moed.service: ${faults##*$'\n'}"
}

set_up
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
check_manifests
check_same
check_unit
echo "check-deploy: passed"
