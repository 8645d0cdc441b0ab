"""Runs the tests of moed.transformers and moed.eval as tests/python/run_tests.py runs its own: run_models_tests.py [PATTERN...].
`./dev test-models` has what they need."""
import pathlib
import sys

import run_tests

if __name__ == "__main__":
    sys.exit(run_tests.main(sys.argv[1:], pathlib.Path(__file__).resolve().parent))
