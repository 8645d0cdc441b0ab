#!/usr/bin/env bash
# The Python client against a real moed, with the distribution's Python, grpcio and protobuf.
# Usage: clients_test.sh [PATTERN...], in the runfiles of its target.
set -euo pipefail

export PYTHONPATH=client/python:tests/python PYTHONDONTWRITEBYTECODE=1
exec python3 tests/python/run_tests.py "$@"
