"""The examples that docs/clients.md names run as they are."""
import subprocess
import sys

from support import GUARD, ServerCase, python_environment


class Examples(ServerCase):
    def run_example(self, name, *arguments):
        return subprocess.run([sys.executable, f"client/python/examples/{name}", *arguments], env=python_environment(),
                              capture_output=True, text=True, timeout=GUARD)

    def run_hello(self, *arguments):
        return self.run_example("hello.py", *arguments)

    def test_hello_runs_every_layer_of_a_server(self):
        done = self.run_hello(self.server.unix)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("ct-w4a16-g32-sym layer 1: cpu_", done.stdout)
        self.assertIn("layer 2", done.stdout)
        self.assertIn("by ring", done.stdout)

    def test_hello_without_an_address_says_what_it_wants(self):
        done = self.run_hello()
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("hello.py ADDRESS", done.stderr)

    def test_two_micro_batches_in_flight_have_the_results_of_one_at_a_time(self):
        done = self.run_example("afd.py", self.server.unix, "--rows", "4", "--steps", "3")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"one at a time: .* ms, attention .* ms, with the experts .* ms\ntwo in flight: ")
        self.assertRegex(done.stdout, r"overlapped: -?[\d.]+ ms, [\d.]+ times as fast; results differ by 0\n")  # --deterministic
        for arguments, code in (((), 2), (("unix:/tmp/no-such-moed",), 1), ((self.server.unix, "--model", "frob"), 2)):
            self.assertEqual(self.run_example("afd.py", *arguments).returncode, code)
