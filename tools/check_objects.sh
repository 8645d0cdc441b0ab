#!/usr/bin/env bash
# What the object files of kernels/ and engine/ may contain, so that one binary runs on every machine:
#   - an instruction-set file (a row of `tables`) defines no global or weak symbol but the functions that return its tables:
#     an inline function of a header, compiled there with wider instructions, could be picked by the linker for all callers
#   - no other file contains an AVX instruction, seen by its registers ymm and zmm
# Looks at exactly the objects that the build of today makes, and at the host's part of those that nvcc makes; both checks prove
# first that they can fail.
set -euo pipefail
shopt -s inherit_errexit
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Target, and the symbols it may define.
declare -A tables=(
  [//kernels/cpu:kernels_amx]="moed::cpu::AmxInt8Dots() moed::cpu::AmxBf16Dots()"
  [//kernels/cpu:kernels_avx2]="moed::cpu::Avx2Kernels() moed::cpu::Avx2Dots()"
  [//kernels/cpu:kernels_avx512]="moed::cpu::Avx512Kernels() moed::cpu::Avx512Dots()"
  [//kernels/cpu:kernels_avx512bf16]="moed::cpu::Avx512Bf16Dots()"
  [//kernels/cpu:kernels_avxvnni]="moed::cpu::AvxVnniDots()"
  [//kernels/cpu:kernels_vnni]="moed::cpu::VnniDots()"
)
status=0

# Lines "TARGET OBJECT" of everything that is compiled below kernels/ and engine/ and exists: a target's actions for
# position-independent and for other code are both listed, and a build runs those that it needs.
list_objects() {
  bazel aquery --noshow_progress --output=text 'mnemonic("CppCompile|CudaCompile", //kernels/... + //engine/...)' 2>"$work/errors" |
    awk '$1 == "Target:" { target = $2 }
         $1 == "Outputs:" { gsub(/[][,]/, " "); for (i = 2; i <= NF; ++i) if ($i ~ /\.o$/) print target, $i }' |
    while read -r target object; do
      [[ ! -s "$execution_root/$object" ]] || echo "$target $execution_root/$object"
    done
}

# Defined symbols of OBJECT that other objects can see, but for those ALLOWED.
visible_symbols() {
  nm --demangle --extern-only --defined-only "$1" | sed -n 's/^[0-9a-f]* *[A-Za-z] //p' | awk -v allowed=" $2 " 'index(allowed, " " $0 " ") == 0'
}

# The first few AVX instructions of OBJECT.
avx_instructions() {
  objdump --disassemble --demangle --no-show-raw-insn "$1" | grep -E -m 5 '%[yz]mm[0-9]' || true
}

check_object() {
  local target="$1" object="$2" found
  if [[ -n "${tables[$target]:-}" ]]; then
    found="$(visible_symbols "$object" "${tables[$target]}")"
    [[ -z "$found" ]] || violated "$target defines more than ${tables[$target]}" "$object" "$found"
  else
    found="$(avx_instructions "$object")"
    [[ -z "$found" ]] || violated "$target contains AVX instructions, but is no instruction-set file" "$object" "$found"
  fi
}

violated() {
  status=1
  printf 'VIOLATED: %s\n  %s\n' "$1" "${2#"$execution_root/"}"
  head -n 5 <<<"$3" | sed 's/^/    /'
}

# Each instruction-set file breaks the rule for others, and breaks its own as soon as its symbol is not allowed.
self_test() {
  local target object
  for target in "${!tables[@]}"; do
    object="$(awk -v target="$target" '$1 == target { print $2 }' "$work/objects" | head -n 1)"
    [[ -n "$object" ]] || fail 1 "check_objects: wanted an object file of $target, got none"
    [[ -n "$(visible_symbols "$object" "none")" ]] ||
      fail 1 "check_objects: self-test: wanted a visible symbol in $object, got none"
    [[ -n "$(avx_instructions "$object")" ]] || fail 1 "check_objects: self-test: wanted AVX code in $object, got none"
  done
}

(($# == 0)) || fail 2 "check_objects: wanted no arguments, got \"$1\""
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
bazel build //kernels/... //engine/... >"$work/build" 2>&1 || fail 1 "check_objects: the build failed" "$(cat "$work/build")"
execution_root="$(bazel info execution_root 2>/dev/null)"
list_objects >"$work/objects" || fail 1 "check_objects: bazel aquery failed" "$(cat "$work/errors")"
self_test
while read -r target object; do
  check_object "$target" "$object"
done <"$work/objects"
echo "$(wc -l <"$work/objects") object files"
echo "MOED-TEST-RESULT passed=$((1 - status)) failed=$status skipped=0"
exit "$status"
