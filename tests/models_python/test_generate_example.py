"""client/python/examples/generate.py: the text is that of the whole model, here in one process."""
import os
import pathlib
import subprocess
import sys
import unittest

import torch

from models_support import GUARD, MODELS, Server, load

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "client/python/examples/generate.py"
NAME, PROMPT, COUNT = "tiny-qwen3moe-bf16", "Call me ", 24


class GenerateExample(unittest.TestCase):
    def setUp(self):
        self.server = Server(MODELS / NAME)
        self.addCleanup(self.server.close)

    def run_example(self, *arguments):
        return subprocess.run([sys.executable, str(EXAMPLE), *map(str, arguments)], capture_output=True, timeout=GUARD,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})

    def test_writes_the_text_that_the_whole_model_writes(self):
        prompt = torch.tensor([list(PROMPT.encode())])
        want = load(NAME).generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=COUNT)
        done = self.run_example(MODELS / NAME, self.server.address, "--prompt", PROMPT, "--count", COUNT, "--dtype",
                                "float32")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.decode(), bytes(want[0].tolist()).decode("utf-8", "replace") + "\n")
        self.assertIn(b"layers 0", done.stderr)

    def test_another_model_than_the_server_has_is_refused(self):
        done = self.run_example(MODELS / "tiny-mixtral-bf16", self.server.address)
        self.assertEqual((done.returncode, done.stdout), (1, b""))
        self.assertIn(b"FAILED_PRECONDITION", done.stderr)
