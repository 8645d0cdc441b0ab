"""What the tests of the Python client share: a moed of their own, and the checkpoints of tests/data with their golden tensors.

The programs and files are found below the working directory, as Bazel lays them out. Every limit on time is a guard against
hanging.
"""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import numpy as np

MOED = "server/moed"
DATA = pathlib.Path("tests/data")
GUARD = 120.0  # seconds; loading takes well under one
DEEPSEEK = "ct-w4a16-g32-sym"
_DTYPES = {"BF16": np.uint16, "F32": np.float32, "I32": np.int32}


def wait_for(condition, what):
    end = time.monotonic() + GUARD
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.002)


def temporary_folder(case):
    """A folder that goes with the test."""
    folder = tempfile.mkdtemp(prefix="moed-", dir="/tmp")
    case.addCleanup(shutil.rmtree, folder, ignore_errors=True)
    return folder


def widen(bits):
    """bfloat16 as float32."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def narrow(values):
    """float32 as bfloat16, cut."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def round_to_bf16(values):
    """float32 as the nearest bfloat16, ties to even; finite ones and infinities."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def max_relative(got, want):
    """The largest relative error of a row; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    return float(np.nan_to_num(error, nan=np.inf).max())


def read_safetensors(path):
    data = pathlib.Path(path).read_bytes()
    size = int.from_bytes(data[:8], "little")
    tensors = {}
    for name, one in json.loads(data[8:8 + size]).items():
        if name != "__metadata__":
            begin, end = one["data_offsets"]
            tensors[name] = np.frombuffer(data[8 + size + begin:8 + size + end], _DTYPES[one["dtype"]]).reshape(one["shape"])
    return tensors


class Golden:
    """Hidden states, routing and outputs of one layer of a checkpoint."""

    def __init__(self, name=DEEPSEEK, layer=1):
        tensors = read_safetensors(DATA / name / "golden.safetensors")
        self.name, self.layer = name, layer
        self.bits, self.ids = tensors[f"{layer}.x"], tensors[f"{layer}.topk_ids"]
        self.x, self.weights = widen(self.bits), tensors[f"{layer}.topk_weights"]
        self.logits, self.y, self.y_block = tensors[f"{layer}.router_logits"], tensors[f"{layer}.y"], tensors[f"{layer}.y_block"]


class Server:
    """A moed that listens on a unix socket and on a port of this host."""

    def __init__(self, *options, models=(DEEPSEEK,)):
        self.folder = tempfile.mkdtemp(prefix="moed-", dir="/tmp")  # short: a socket's path has to fit into 107 bytes
        self.unix = f"unix:{self.folder}/s"
        self._arguments = [MOED, "serve", "--listen", "127.0.0.1:0", "--listen", self.unix, "--ready-file",
                           f"{self.folder}/ready", "--threads", "1", *options]
        for model in models:
            self._arguments += ["--model", str(DATA / model)]
        self.start()

    def start(self):
        """Starts it, also again at the same unix socket."""
        ready = pathlib.Path(self.folder, "ready")
        ready.unlink(missing_ok=True)
        with open(f"{self.folder}/log", "wb") as log:
            self._process = subprocess.Popen(self._arguments, stdout=log, stderr=log)

        def is_ready():
            if self._process.poll() is not None:
                log = pathlib.Path(self.folder, "log").read_text()
                raise AssertionError(f"moed ended with {self._process.returncode}: {log}")
            return ready.exists() and ready.read_text().endswith("}\n")
        wait_for(is_ready, "moed")
        addresses = json.loads(ready.read_text())["addresses"]
        self.tcp = next(one for one in addresses if not one.startswith("unix:"))

    def kill(self):
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self):
        """Ends it by SIGTERM; its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(GUARD)

    def close(self):
        if self._process.poll() is None:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


class ServerCase(unittest.TestCase):
    """Cases that share a server with these options."""
    options = ("--deterministic",)
    models = (DEEPSEEK,)

    @classmethod
    def setUpClass(cls):
        cls.server = Server(*cls.options, models=cls.models)
        cls.addClassCleanup(cls.server.close)


class Background:
    """A call in a thread of its own."""

    def __init__(self, call):
        self.result = self.error = None
        self._call = call
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self.result = self._call()
        except BaseException as error:  # whatever it is, the test looks at it
            self.error = error

    def end(self):
        self._thread.join(GUARD)
        if self._thread.is_alive():
            raise AssertionError("the call does not end")
        return self


def python_environment():
    """For a program of the client in another process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(["client/python", "tests/python"])}
