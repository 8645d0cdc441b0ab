"""python -m moed.eval: its table, its numbers, its exit codes."""
import json
import pathlib
import subprocess
import sys
import tempfile

from models_support import GUARD, MODELS, PROGRAM, TEXT, ModelCase

MIXTRAL = "tiny-mixtral-bf16"


class Program(ModelCase):
    def run_eval(self, *arguments):
        return subprocess.run([sys.executable, "-m", "moed.eval", *map(str, arguments)], capture_output=True, text=True,
                              timeout=GUARD)

    def run_mixtral(self, *arguments):
        return self.run_eval(MODELS / MIXTRAL, "--text", TEXT, "--start", 14000, "--moed", PROGRAM, *arguments)

    def test_starts_a_server_of_its_own_and_prints_a_table(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, "numbers.json")
            done = self.run_mixtral("--json", file, "--wire", "bf16")
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            head, _, row = done.stdout.splitlines()
            self.assertTrue(head.startswith("| checkpoint        | in process | service"), head)
            self.assertTrue(row.startswith(f"| {MIXTRAL} | ") and row.endswith("| ok |"), row)
            numbers = json.loads(file.read_text())
        self.assertEqual((numbers["passed"], numbers["window"], len(numbers["rows"])), (True, 256, 1))
        self.assertEqual((numbers["rows"][0]["tokens"], numbers["rows"][0]["wire"]), (13 * 255, "bf16"))

    def test_asks_a_server_that_runs(self):
        done = self.run_mixtral("--address", self.server.address, "--model", MIXTRAL, "--json", "-", "--router", "server")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(json.loads(done.stdout)["passed"])

    def test_beyond_the_bound_ends_with_1(self):
        done = self.run_mixtral("--wire", "bf16", "--bound", "0")
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertIn("FAILED", done.stdout)

    def test_what_cannot_be_done_ends_with_2_and_names_it(self):
        for words, arguments in (
                (["--text: wanted a file", "no such thing"], ["--text", "/no such thing"]),
                (["--json: wanted a file", "/no folder/x"], ["--json", "/no folder/x"]),
                (["--wire", "f64"], ["--wire", "f64"]),
                (["unrecognized", "--windows"], ["--windows", "3"]),
                (["one PATH", "got 2"], [MODELS / MIXTRAL, "--address", "unix:/tmp/s"]),
                (["/no/moed"], ["--moed", "/no/moed"]),
                (["model_name", "other"], ["--address", self.server.address, "--model", "other"]),
                (["window"], ["--window", "1"]),
                (["text", "got 69"], ["--start", TEXT.stat().st_size - 69])):
            with self.subTest(arguments):
                done = self.run_mixtral(*arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
                for word in words:
                    self.assertIn(word, done.stderr)
                self.assertNotIn("Traceback", done.stderr)

    def test_checkpoint_that_moed_refuses_ends_with_2_and_says_why(self):
        with tempfile.TemporaryDirectory() as folder:
            done = self.run_eval(folder, "--text", TEXT, "--moed", PROGRAM)
        self.assertEqual(done.returncode, 2)
        self.assertIn("config.json", done.stderr)
