#!/usr/bin/env python3
"""Every checkpoint of a folder through moed and moectl, against its golden outputs: `check_models.py BIN MODELS [OPTIONS OF SERVE]`.

BIN holds moed and moectl; each folder of MODELS that has a golden.safetensors is served over a unix socket, and every MoE layer gets
its golden hidden states twice: with the golden ids and weights (routed experts alone, against L.y_q where the scheme quantizes
activations, else L.y), and with the server's own router (the whole block, against L.y_block, where activations are not quantized).
Prints a line a layer; the last line is `N passed, N failed`. Exit code 1 when a layer failed. Needs nothing but Python's own library.
"""
import json
import os
import struct
import subprocess
import sys
import tempfile
import time

# Largest relative error of a row against a golden that quantizes in the same way; products may be of bf16.
BOUNDS = (("fp4", 0.10), ("fp8", 0.06), ("int8", 0.02))
BF16_BOUND = 0.01
OTHER_BOUND = 0.10  # quantized activations without a golden of their own


def tensor_names(path):
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return set(json.loads(file.read(length)))


def target_of(scheme, layer, names):
    if "16-bit activations" in scheme:
        return "y", BF16_BOUND
    if f"{layer}.y_q" not in names:
        return "y", OTHER_BOUND
    quantized = scheme.split("activations")[0]
    for element, bound in BOUNDS:
        if f"{element} dynamic" in scheme or f"{element} static" in scheme:
            return "y_q", bound
    return "y_q", BOUNDS[0][1] if "fp4" in quantized else BF16_BOUND


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


class Server:
    """A moed on one model, from ready to stopped."""

    def __init__(self, binaries, model, options):
        self.folder = tempfile.TemporaryDirectory()
        ready = os.path.join(self.folder.name, "ready.json")
        self.address = "unix:" + os.path.join(self.folder.name, "moed.sock")
        self.log = open(os.path.join(self.folder.name, "log"), "w+")
        command = [os.path.join(binaries, "moed"), "serve", "--model", model, "--listen", self.address, "--ready-file", ready]
        self.process = subprocess.Popen(command + options, stdout=self.log, stderr=subprocess.STDOUT)
        while not os.path.exists(ready):
            if self.process.poll() is not None:
                self.log.seek(0)
                raise RuntimeError(f"moed ended with {self.process.returncode}: {self.log.read()}")
            time.sleep(0.02)

    def stop(self):
        self.process.terminate()
        return self.process.wait(timeout=60)


def check_layer(moectl, server, layer, golden, names):
    """Lines about one layer, each with whether it passed."""
    number = layer["layer"]
    name, bound = target_of(layer["executed_scheme"], number, names)
    base = [moectl, "--server", server.address, "forward", "--layer", str(number), "--input", golden, "--hidden", f"{number}.x",
            "--dtype", "f32", "--json"]
    calls = [(name, bound, ["--ids", f"{number}.topk_ids", "--weights", f"{number}.topk_weights", "--routed-only"])]
    if "16-bit activations" in layer["executed_scheme"]:
        calls.append(("y_block", bound, []))
    for expected, limit, more in calls:
        code, out, error = run(*base, *more, "--expect", f"{number}.{expected}", "--max-rel", str(limit))
        try:
            answer = json.loads(out)
        except ValueError:
            yield False, f"layer {number} against {expected}: {error.strip() or out.strip()}"
            continue
        yield code == 0, f"layer {number} on {answer['backend']} against {expected}: {answer['max_rel']:.2e}, bound {limit}"


def check_model(binaries, model, options):
    moectl = os.path.join(binaries, "moectl")
    golden = os.path.join(model, "golden.safetensors")
    server = Server(binaries, model, options)
    try:
        _, out, _ = run(moectl, "--server", server.address, "status", "--json")
        for layer in json.loads(out)["models"][0]["layers"]:
            yield from check_layer(moectl, server, layer, golden, tensor_names(golden))
    finally:
        code = server.stop()
    yield code == 0, f"exit code {code} after SIGTERM"


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    binaries, models, options = sys.argv[1], sys.argv[2], sys.argv[3:]
    passed = failed = 0
    for name in sorted(os.listdir(models)):
        model = os.path.join(models, name)
        if not os.path.exists(os.path.join(model, "golden.safetensors")):
            continue
        try:
            for ok, line in check_model(binaries, model, options):
                passed, failed = passed + ok, failed + (not ok)
                print("ok  " if ok else "FAIL", name, line, flush=True)
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            failed += 1
            print("FAIL", name, error, flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
