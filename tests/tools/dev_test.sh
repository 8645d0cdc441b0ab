#!/usr/bin/env bash
# `./dev` refuses what it does not know with exit code 2 and a first line on stderr that names it, before any set-up.
# Usage: dev_test.sh, in the runfiles of its target.
set -euo pipefail

passed=0
failed=0
errors="$(mktemp)"
trap 'rm -f "$errors"' EXIT

# refused FIRST_LINE ARGUMENTS...
refused() {
  local want="dev: $1" code=0 got
  shift
  ./dev "$@" >/dev/null 2>"$errors" || code=$?
  got="$(head -n 1 "$errors")"
  if [[ $code -eq 2 && "$got" == "$want" ]]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf 'FAILED: ./dev %s\n  wanted exit code 2 and: %s\n  got exit code %s and: %s\n' "$*" "$want" "$code" "$got"
  fi
}

commands="build, demo, test, test-models, sanitize, fuzz, soak, bench, install, image, check-deploy, help"
refused "wanted a command, got none; commands: $commands"
refused "unknown command \"frob\"; commands: $commands" frob
refused "unknown command \"--frob\"; commands: $commands" --frob
refused 'build: unknown argument "x"; options: --release' build x
refused 'build: wanted at most --release, got 2 arguments' build --release x
refused 'demo: wanted no arguments, got "--fast"' demo --fast
refused 'help: wanted no arguments, got "x"' help x
refused 'test: unknown option "--frob"; options: --models DIR' test --frob
refused 'test: wanted one FILTER, got "a" and "b"' test a b
refused 'test: --models: wanted a folder, got nothing' test a --models
refused 'test: --models: wanted a folder, got "no/such"' test --models no/such
refused 'test: --models: wanted a folder, got "no/such"' test --models=no/such
refused 'test-models: unknown option "--frob"; options: --models DIR' test-models --frob
refused 'test-models: wanted one FILTER, got "a" and "b"' test-models a b
refused 'test-models: --models: wanted a folder, got nothing' test-models --models
refused 'test-models: --models: wanted a folder of checkpoints with eval.txt, got "no/such"' test-models a --models=no/such
refused 'sanitize: unknown option "--models"' sanitize --models x
refused 'sanitize: wanted one FILTER, got "a" and "b"' sanitize a b
targets="safetensors index config weights wire text recording"
refused "fuzz: wanted TARGET and SECONDS, got nothing; targets: $targets" fuzz
refused "fuzz: unknown target \"frob\"; targets: $targets" fuzz frob 10
refused "fuzz: wanted TARGET and SECONDS, got \"wire\"; targets: $targets" fuzz wire
refused "fuzz: wanted TARGET and SECONDS, got \"wire 1 2\"; targets: $targets" fuzz wire 1 2
for seconds in 0 -1 1.5 ten 08 99999999; do
  case "$seconds" in
    -*) refused "fuzz: unknown option \"$seconds\"; options: --jobs N, --models DIR" fuzz wire "$seconds" ;;
    *) refused "fuzz: SECONDS: wanted 1 to 9999999, got \"$seconds\"; targets: $targets" fuzz wire "$seconds" ;;
  esac
done
refused 'fuzz: --jobs: wanted 1 to 999, got "0"' fuzz wire 10 --jobs 0
refused 'fuzz: --jobs: wanted a value, got nothing' fuzz wire 10 --jobs
refused 'fuzz: --models: wanted a folder, got "no/such"' fuzz wire 10 --models=no/such
refused 'soak: SECONDS: wanted 10 to 9999999, got "5"' soak 5
refused 'soak: unknown option "--frob"; options: --overload, --kill, --swap' soak --frob
refused 'soak: wanted at most one argument, got 2' soak 10 --overload
refused 'bench: unknown kind "frob"; kinds: cpu load rpc gpu' bench cpu,frob
refused 'bench: unknown option "--frob"; options: --json FILE, -- OPTIONS' bench --frob
refused 'bench: --: wanted one KIND, whose options these are, got "cpu,load"' bench -- --tokens 1
refused 'bench: --: wanted one KIND, whose options these are, got "load,gpu"' bench load,gpu -- --tokens 1
refused 'bench: --json: wanted a file, got nothing' bench cpu --json
refused 'bench: wanted at most KIND and FILTER, got "cpu a b"' bench cpu a b
refused 'install: wanted one PREFIX, got 0 arguments' install
refused 'install: wanted an absolute PREFIX, got "relative"' install relative
refused 'image: unknown argument "x"; options: --from-source, --output FILE' image x
refused 'image: --output: wanted a file, got nothing' image --output
refused 'image: --output: wanted a new file in a folder that exists, got "no/such/file"' image --output no/such/file
refused 'image: --output: wanted a new file in a folder that exists, got "/"' image --output=/
refused 'check-deploy: wanted no arguments, got "x"' check-deploy x

if ./dev help | grep -q '^Usage: ./dev COMMAND'; then
  passed=$((passed + 1))
else
  failed=$((failed + 1))
  echo "FAILED: ./dev help shows no usage"
fi
echo "MOED-TEST-RESULT passed=$passed failed=$failed skipped=0"
((failed == 0))
