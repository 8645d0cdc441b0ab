#!/usr/bin/env bash
# tools/check_wgmma.py on SASS that is planted: what it has to find, and what it must leave alone. A `cuobjdump` of this test's own
# prints the file that it is given.
# Usage: check_wgmma_test.sh, in the runfiles of its target.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/bin"
printf '#!/bin/sh\ncat "$2"\n' >"$folder/bin/cuobjdump"
chmod +x "$folder/bin/cuobjdump"
passed=0
failed=0

# planted NAME INSTRUCTION...: a function that is a loop over the instructions.
planted() {
  local file="$folder/$1" at=256 instruction
  shift
  printf '\t\tFunction : planted\n' >"$file"
  for instruction in "$@" "BRA 0x100"; do
    printf '        /*%04x*/                   %s ;\n' "$at" "$instruction" >>"$file"
    at=$((at + 16))
  done
}

# checks CODE LAST_LINE NAME...: exit code and last line of the check of planted objects.
checks() {
  local want_code="$1" want="$2" code=0 got
  shift 2
  got="$(cd "$folder" && PATH="$folder/bin:$PATH" python3 "$script" "$@" 2>&1 | tail -n 1; exit "${PIPESTATUS[0]}")" || code=$?
  if [[ $code -eq $want_code && "$got" == "$want" ]]; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    printf 'FAILED: %s\n  wanted exit code %s and: %s\n  got exit code %s and: %s\n' "$*" "$want_code" "$want" "$code" "$got"
  fi
}

script="$PWD/tools/check_wgmma.py"
product() { printf 'HGMMA.64x32x16.F32.BF16 R24, R%s, gdesc[UR4], R24, gsb0' "$1"; }
wait="WARPGROUP.DEPBAR.LE gsb0, 0x"

# Two operands in turn: each is written when no more than the other's product is under way.
planted clean "LDS.128 R64, [R4]" "$(product 64)" "${wait}1" "LDS.128 R68, [R4]" "$(product 68)" "${wait}1" \
  "LDS.128 R64, [R4]" "$(product 64)" "${wait}1" "LDS.128 R68, [R4]" "$(product 68)" "${wait}1"
# The next load goes into the operand that was issued last.
planted early "$(product 64)" "LDS.128 R64, [R4]" "${wait}0" "$(product 68)" "${wait}0" "$(product 64)" "${wait}0" \
  "$(product 68)" "${wait}0"
# One of an operand's registers alone, as the second of a pair; across the end of the loop.
planted around "IMAD.WIDE R66, R1, R2, R4" "$(product 64)" "${wait}1" "$(product 68)" "${wait}1" "$(product 72)" "${wait}1" \
  "$(product 67)" "${wait}1"
# Reads, stores and other registers are no harm.
planted harmless "$(product 64)" "STS.128 [R4], R64" "LOP3.LUT R80, R64, R65, RZ, 0xc0, !PT" "${wait}0" "$(product 64)" \
  "${wait}0" "$(product 64)" "${wait}0" "$(product 64)" "${wait}0"
planted short "$(product 64)" "${wait}0"

checks 0 "1 loops, 0 hazards" clean
checks 0 "1 loops, 0 hazards" harmless
checks 1 "1 loops, 3 hazards" early
checks 1 "1 loops, 2 hazards" around
checks 1 "3 loops, 3 hazards" clean early harmless
checks 1 "0 loops, 0 hazards" short  # nothing to look at is no pass

printf 'MOED-TEST-RESULT passed=%d failed=%d skipped=0\n' "$passed" "$failed"
((failed == 0))
