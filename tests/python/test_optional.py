"""The client alone needs neither torch nor transformers; what does says so."""
import importlib.util
import subprocess
import sys
import unittest

from support import GUARD, python_environment

HAS_BOTH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


class Optional(unittest.TestCase):
    def run_python(self, *arguments):
        return subprocess.run([sys.executable, *arguments], env=python_environment(), capture_output=True, text=True, timeout=GUARD)

    def test_client_imports_neither_torch_nor_transformers(self):
        done = self.run_python("-c", "import sys, moed, moed.aio; print({'torch', 'transformers'} & set(sys.modules))")
        self.assertEqual((done.returncode, done.stdout), (0, "set()\n"), done.stderr)

    def test_help_of_the_evaluation_needs_neither(self):
        done = self.run_python("-m", "moed.eval", "--help")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("usage: python -m moed.eval", done.stdout)

    @unittest.skipIf(HAS_BOTH, "torch and transformers are installed")
    def test_what_needs_them_says_how_to_get_them(self):
        done = self.run_python("-c", "import moed.transformers")
        self.assertIn("ImportError: moed.transformers: wanted torch and transformers", done.stderr)
        self.assertIn("moed[transformers]", done.stderr)
        done = self.run_python("-m", "moed.eval", "/", "--text", "/dev/null")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("moed.eval: ", done.stderr)
