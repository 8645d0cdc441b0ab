#!/usr/bin/env bash
# `./dev test-models [FILTER] [--models DIR]`: models of Hugging Face's transformers through the service, by tests/models_python.
# The sum of its test cases is the last line printed.
#
# torch and transformers come from PyPI, in the versions and with the hashes of packages_models.txt, into an environment outside
# the tree, so that other checkouts and fresh clones use it too: some 2.8 GB to download and 4.6 GB on disk. Its name has the pins'
# hash; nothing else is written there. Output of pip goes to .cache/test_models.log.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$(dirname "${BASH_SOURCE[0]}")/test_programs.sh"

usage="usage: ./dev test-models [FILTER] [--models DIR]"
pins=tools/packages_models.txt
log=.cache/test_models.log
client=.cache/test_models_client
filter=""

parse_arguments() {
  local given=../shared/models folder="$root/../shared/models"
  while (($# > 0)); do
    case "$1" in
      --models | --models=*)
        [[ "$1" == --models=* ]] && set -- --models "${1#--models=}" "${@:2}"
        (($# >= 2)) || fail 2 "test-models: --models: wanted a folder, got nothing" "$usage"
        given="$2"
        folder="$(from_caller "$2")"
        shift 2
        ;;
      -*) fail 2 "test-models: unknown option \"$1\"; options: --models DIR" "$usage" ;;
      *)
        [[ -z "$filter" ]] || fail 2 "test-models: wanted one FILTER, got \"$filter\" and \"$1\"" "$usage"
        filter="$1"
        shift
        ;;
    esac
  done
  [[ -f "$folder/eval.txt" ]] ||
    fail 2 "test-models: --models: wanted a folder of checkpoints with eval.txt, got \"$given\"" "$usage"
  models="$(realpath -e "$folder")"
}

# The folder of the environment: below the home directory, or in the tree where that cannot be.
choose_environment() {
  local home="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}" name
  name="moed-models-$(sha256sum "$pins" | cut -c 1-12)"
  if [[ -w "$home" ]]; then echo "$home/.cache/$name"; else echo "$root/.cache/$name"; fi
}

# Makes the environment of the pins where it is not there yet; another run that does the same is waited for.
set_up_environment() {
  tools/setup.sh tools/packages_venv.txt
  mkdir -p "$(dirname "$environment")" "$(dirname "$log")"
  (
    flock 9
    cmp -s "$pins" "$environment/pins.txt" || install_pins
  ) 9>"$environment.lock"
}

install_pins() {
  echo "test-models: getting torch and transformers from PyPI, some 2.8 GB, into $environment (log: $log)"
  rm -rf "$environment"
  { python3 -m venv "$environment" && "$environment/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir \
    --retries 10 --timeout 60 --no-deps --only-binary :all: --require-hashes --requirement "$pins"; } >"$log" 2>&1 ||
    fail 2 "test-models: torch and transformers could not be had; the output is in $log and ends with" "$(tail -n 5 "$log")"
  cp "$pins" "$environment/pins.txt"
}

# The client of this tree, beside the environment and not in it.
install_client() {
  rm -rf "$client" client/python/build
  "$environment/bin/pip" install --quiet --disable-pip-version-check --no-deps --no-build-isolation --target "$client" \
    ./client/python >"$log" 2>&1 ||
    fail 2 "test-models: the client could not be installed; the output is in $log and ends with" "$(tail -n 5 "$log")"
}

# One thread for torch: small models do not gain by more, and on a busy machine its threads would wait for each other.
run_tests() {
  local code=0
  env OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$root/$client:$root/tests/python" \
    MOED_PROGRAM="$root/bin/moed" MOED_MODELS="$models" \
    "$environment/bin/python" tests/models_python/run_models_tests.py ${filter:+"$filter"} 2>&1 | tee "$work/models.log" ||
    code="${PIPESTATUS[0]}"
  add_result "$work/models.log" "$code"
  sed -n "s|^SKIP |//tests/models_python\t|p" "$work/models.log" >>"$work/skips"
}

parse_arguments "$@"
./dev build
environment="$(choose_environment)"
set_up_environment
install_client
run_tests
print_sum
