#!/usr/bin/env bash
# Writes the descriptors of the wire contract's messages, from which the package makes its message classes when it is imported:
# generate.sh [FILE], by default moed/messages.binpb beside this script, for a program that runs from the checkout.
# A descriptor set and not Python code, because it fits every version of the protobuf runtime, whatever protoc wrote it.
# Needs protoc, or else the Python package grpcio-tools for the interpreter in PYTHON (default: python3).
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-$here/moed/messages.binpb}"
# In a source distribution the .proto files lie beside this script.
for proto in "$here/../../proto" "$here/proto" ""; do
  [[ ! -f "$proto/moe/v1/moe.proto" ]] || break
done
if [[ -z "$proto" ]]; then
  echo "generate.sh: wanted moe/v1/moe.proto in $here/../../proto or $here/proto, got none" >&2
  exit 2
fi

if command -v protoc >/dev/null; then
  protoc=(protoc)
elif "${PYTHON:-python3}" -c 'import grpc_tools' 2>/dev/null; then
  protoc=("${PYTHON:-python3}" -m grpc_tools.protoc "-I$("${PYTHON:-python3}" -c \
    'import os, grpc_tools; print(os.path.join(os.path.dirname(grpc_tools.__file__), "_proto"))')")
else
  echo "generate.sh: wanted protoc on PATH or the package grpcio-tools for ${PYTHON:-python3}, got neither" >&2
  exit 2
fi
mkdir -p "$(dirname "$out")"
"${protoc[@]}" "-I$proto" --include_imports "--descriptor_set_out=$out" \
  moe/v1/moe.proto google/rpc/status.proto google/rpc/error_details.proto grpc/health/v1/health.proto
