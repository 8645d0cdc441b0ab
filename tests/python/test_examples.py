"""The examples that docs/clients.md names run as they are."""
import subprocess
import sys

from support import GUARD, ServerCase, python_environment


class Examples(ServerCase):
    def run_hello(self, *arguments):
        return subprocess.run([sys.executable, "client/python/examples/hello.py", *arguments], env=python_environment(),
                              capture_output=True, text=True, timeout=GUARD)

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
