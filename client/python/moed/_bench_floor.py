"""What the Python client adds to the bare things that it is made of: moed.bench --floor.

Each pair is measured in turns, so that a machine that is slower for a while is so for both: twenty calls each of this client and
of grpcio's echo, and a burst of a quarter of a second each of this client and of the C++ client's. A figure is the median of all
calls, of bursts the lower quartile of their medians: what else runs on a machine only ever adds, and a burst that shares its
processor with others takes milliseconds where it sleeps.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Tuple

import grpc
import numpy as np

from moed import _connection
from moed._call import make_call
from moed._encoding import encode_request
from moed.client import Client

_SECONDS, _CALLS = 4.0, 20       # for both sides of a pair together; calls of each turn
_BURSTS, _BURST_SECONDS = 12, 0.25  # of each side
_LARGE = 3_670_016          # bytes each way of the large call

Row = Dict[str, Any]


def _burst(call: Callable[[], Any]) -> float:
    """Median microseconds of a call, over a burst of them that follows three which are not counted."""
    for _ in range(3):
        call()
    times: List[float] = []
    end = time.perf_counter() + _BURST_SECONDS
    while len(times) < 5 or time.perf_counter() < end:
        times.append(_time(call))
    return statistics.median(times)


def _time(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def _bursts(ours: Callable[[], float], bare: Callable[[], float]) -> Tuple[float, float]:
    pairs = [(ours(), bare()) for _ in range(_BURSTS)]
    return sorted(pair[0] for pair in pairs)[_BURSTS // 4], sorted(pair[1] for pair in pairs)[_BURSTS // 4]


def _turns(ours: Callable[[], Any], bare: Callable[[], Any]) -> Tuple[float, float]:
    times: Tuple[List[float], List[float]] = ([], [])
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        for call, into in ((ours, times[0]), (bare, times[1])):
            call()  # not counted: the other side's turn had the processors
            into += [_time(call) for _ in range(_CALLS)]
    return statistics.median(times[0]), statistics.median(times[1])


def _row(case: str, transport: str, size: int, bare_thing: str, times: Tuple[float, float], ratio: float, added: float) -> Row:
    """`passed`: ours is at most `ratio` times the bare thing's and `added` microseconds more."""
    ours, bare = times
    return {"case": case, "transport": transport, "bytes": size, "p50_us": ours, "bare": bare_thing, "bare_us": bare,
            "ratio": ours / bare, "added_us": ours - bare, "most_us": ratio * bare + added, "passed": ours <= ratio * bare + added}


def _against_echo(client: Client, model: Any, layer: int) -> Row:
    hidden = np.full((1, model.hidden), 0x3F80, np.uint16)
    request = encode_request(make_call(layer, hidden, None, None, logits=None, model=model.name, dtype="bf16", output_dtype=None,
                                       out=None, routed_only=False, return_routing=False, request_id=""))
    with tempfile.TemporaryDirectory(prefix="moed-") as folder:
        address = f"unix:{folder}/echo"
        with subprocess.Popen([sys.executable, "-m", "moed._bench_echo", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as server:
            try:
                if server.stdout is None or server.stdout.readline() != b"ready\n":
                    raise OSError("the grpcio echo did not start")
                with grpc.insecure_channel(address, _connection.CHANNEL_OPTIONS) as channel:
                    echo = channel.unary_unary(_connection.FORWARD)
                    times = _turns(lambda: client.forward(layer, hidden, model=model.name, dtype="bf16"),
                                   lambda: echo(request, timeout=60))
            finally:
                server.kill()
    return _row("one row", "rpc", hidden.nbytes, "grpcio echo", times, 1.3, 0)


def _python_burst(options: argparse.Namespace, model: Any, layer: int, rows: int) -> float:
    """The median of a burst of this client's calls by the ring, in place. In a session of its own, as moectl's: where the kernel
    finds memory for a session decides about a tenth of the time of a large call."""
    size = 2 * rows * model.hidden
    with Client(options.address, transport="ring", token=options.token, session_bytes=2 * size + (1 << 20)) as client:
        hidden, out = client.allocate((rows, model.hidden), np.uint16), client.allocate((rows, model.hidden), np.uint16)
        hidden[...] = 0x3F80  # 1.0
        return _burst(lambda: client.forward(layer, hidden, model=model.name, dtype="bf16", out=out))


def _cpp_burst(options: argparse.Namespace, model: Any, layer: int, rows: int) -> float:
    """The median of a burst of the C++ client's calls by its ring."""
    command = [options.moectl, "--server", options.address, "--model", model.name, "--json"]
    command += ["--token-file", options.token_file] if options.token_file is not None else []
    command += ["bench", "--layer", str(layer), "--tokens", str(rows), "--seconds", str(_BURST_SECONDS), "--transport", "ring"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{options.moectl}: exit code {done.returncode}: {done.stderr.strip()}")
    return json.loads(done.stdout)["rows"][0]["p50_us"]


def measure(options: argparse.Namespace, model: Any, layer: int) -> List[Row]:
    """The rows; without --moectl only that against grpcio's echo. OSError when a program does not run."""
    with Client(options.address, transport="rpc", token=options.token) as client:
        rows = [_against_echo(client, model, layer)]
    if options.moectl is None:
        return rows
    for case, count, ratio, added in (("one row", 1, 1.0, 40.0), ("3.67 MB", max(1, _LARGE // (2 * model.hidden)), 1.1, 40.0)):
        times = _bursts(lambda: _python_burst(options, model, layer, count), lambda: _cpp_burst(options, model, layer, count))
        rows.append(_row(case, "ring", 2 * count * model.hidden, "C++ client", times, ratio, added))
    return rows


def show(rows: List[Row]) -> str:
    lines = [f"{'case':9}  {'transport':9}  {'p50 us':>9}  {'bare thing':12}  {'bare us':>9}  {'ratio':>6}  {'added us':>9}  "
             f"{'at most':>9}"]
    for row in rows:
        lines.append(f"{row['case']:9}  {row['transport']:9}  {row['p50_us']:9.1f}  {row['bare']:12}  {row['bare_us']:9.1f}  "
                     f"{row['ratio']:6.2f}  {row['added_us']:9.1f}  {row['most_us']:9.1f}  {'ok' if row['passed'] else 'MISSED'}")
    return "\n".join(lines)
