"""What the tests of models share: checkpoints, texts, and a moed that can be killed.

MOED_PROGRAM is moed's path, MOED_MODELS a folder of checkpoints in the form of tests/data with an eval.txt beside them. Every
limit on time is a guard against hanging.
"""
import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import unittest

import torch
import transformers

import moed
from moed.transformers import attach, from_pretrained_without_experts
from support import wait_for

PROGRAM = os.environ["MOED_PROGRAM"]
MODELS = pathlib.Path(os.environ["MOED_MODELS"])
TEXT = MODELS / "eval.txt"
START, WINDOW = 8192, 256  # before it lies the text that calibrated the quantizers
GUARD = 300.0  # seconds
UNQUANTIZED = ("tiny-mixtral-bf16", "tiny-qwen3moe-bf16", "tiny-deepseekv3-bf16", "tiny-gptoss-bf16")
DEEPSEEK = "tiny-deepseekv3-bf16"
SHARED_QUANTIZED = "ct-fp8-channel-dynamic"

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def checkpoints():
    """Names of all of them."""
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def tokens(count=64, start=START):
    """Bytes of the text, [1, count]."""
    return torch.tensor([list(TEXT.read_bytes()[start:start + count])])


def load(name, dtype=torch.float32):
    """As transformers loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=dtype).eval()


def generate(model, count, prompt=None, **options):
    """`count` greedy tokens, whatever the model holds for the end."""
    prompt = tokens(32) if prompt is None else prompt
    model.generation_config.eos_token_id = None
    done = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=count, **options)
    return bytes(done[0, prompt.shape[1]:].tolist())


class Server:
    """A moed with these checkpoints at a unix socket, where it can be started again."""

    def __init__(self, *paths, options=()):
        self.folder = tempfile.mkdtemp(prefix="moed-", dir="/tmp")  # short: a socket's path has 107 bytes
        self.address, self._ready = f"unix:{self.folder}/s", pathlib.Path(self.folder, "ready")
        self.admin_address = f"unix:{self.folder}/a"
        self._command = [PROGRAM, "serve", "--listen", self.address, "--ready-file", str(self._ready), "--admin-listen",
                         self.admin_address, *options]
        for path in paths:
            self._command += ["--model", str(path)]
        self.start()

    def start(self):
        self._ready.unlink(missing_ok=True)
        with open(f"{self.folder}/log", "wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

        def is_ready():
            if self._process.poll() is not None:
                raise AssertionError(pathlib.Path(self.folder, "log").read_text())
            return self._ready.exists()
        wait_for(is_ready, "moed")

    def start_with(self, path):
        """Starts with another checkpoint in place of the last."""
        self._command[-1] = str(path)
        self.start()

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self):
        if self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ModelCase(unittest.TestCase):
    """Cases that share a server with all checkpoints, each under the name of its folder."""

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*(f"{name}={MODELS / name}" for name in checkpoints()))
        cls.addClassCleanup(cls.server.close)
        cls.client = cls.enterClassContext(moed.Client(cls.server.address))

    def remote(self, name, **options):
        """The checkpoint without its experts, float32 around them and on the wire."""
        return from_pretrained_without_experts(MODELS / name, self.client, model_name=name, dtype=torch.float32, **options)

    def attached(self, name, **options):
        model = load(name)
        attach(model, self.client, model_name=name, **options)
        return model

    def assert_refused(self, kind, words, call):
        with self.assertRaises(kind) as caught:
            call()
        for word in words:
            self.assertIn(word, str(caught.exception))


@contextlib.contextmanager
def folder_of(name, *, leave_out=()):
    """A copy of a checkpoint's folder, without these files."""
    with tempfile.TemporaryDirectory(prefix="moed-", dir="/tmp") as folder:
        for file in (MODELS / name).iterdir():
            if file.name not in leave_out:
                shutil.copy(file, folder)
        yield pathlib.Path(folder)
