"""Runs the tests of the Python client: run_tests.py [PATTERN...], each a part of a test's name. Prints each failure, `SKIP name:
reason` for what this machine cannot run, and the sum in the line that tools/test_programs.sh adds up."""
import pathlib
import sys
import unittest

sys.dont_write_bytecode = True
HERE = pathlib.Path(__file__).resolve().parent


def main(patterns, folder=HERE):
    loader = unittest.TestLoader()
    loader.testNamePatterns = [f"*{pattern}*" for pattern in patterns] or None
    suite = loader.discover(str(folder), "test_*.py", str(folder))
    result = unittest.TextTestRunner(sys.stdout, verbosity=2).run(suite)
    for test, reason in result.skipped:
        print(f"SKIP {test.id()}: {reason}")
    failed = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    skipped = len(result.skipped)
    passed = result.testsRun - failed - skipped
    print(f"MOED-TEST-RESULT passed={max(passed, 0)} failed={failed} skipped={skipped}")
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
