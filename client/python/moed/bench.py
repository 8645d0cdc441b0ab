"""A decode loop over the layers of a served model, and where its time goes: python -m moed.bench ADDRESS.

Each step is one forward of each layer, one after the other, as a model that generates text makes them. The hidden states are
random, in the session's memory where there is one, and routed by the checkpoint's own gate. Times of a call: compute and queue by
the server's clock; transport is what the client waited beyond the server's queue and compute; client is what Python did.

Exit code: 0 ok, 1 a bar was missed, 2 usage or set-up, or a call failed.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from moed import _bench_floor, _bench_picture, errors
from moed._tensors import invalid
from moed.client import Client

_EXAMPLES = """Examples:
  python -m moed.bench unix:/run/moed.sock
  python -m moed.bench unix:/run/moed.sock --rows 16 --steps 100 --layers 3-10 --transport rpc --png layers.png
  moed serve --bench-layer 7168 --listen unix:/tmp/moed.sock
  python -m moed.bench unix:/tmp/moed.sock --floor --moectl bin/moectl
"""
_PARTS = ("client_us", "transport_us", "queue_us", "compute_us")


def parse_layers(text: str, have: Sequence[int]) -> List[int]:
    """Those of "3,5-7" in that order. InvalidArgument for what is none, or not among `have`."""
    layers: List[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise invalid("--layers", "numbers and ranges, as in 3,5-7", repr(text))
        for layer in range(int(first), int(last if dash else first) + 1):
            if layer not in have:
                raise invalid("--layers", f"some of {', '.join(map(str, have))}", layer)
            layers.append(layer)
    if not layers:
        raise invalid("--layers", "a range that is not empty", repr(text))
    return layers


def find_model(client: Client, name: str) -> Any:
    """The ModelHello of this name; of the only one where `name` is empty."""
    models = client.hello().models
    found = [model for model in models if name in ("", model.name)]
    if len(found) == 1:
        return found[0]
    raise invalid("--model", f"one of {', '.join(model.name for model in models) or 'none that the server has'}", name or "none")


def decode(client: Client, model: Any, layers: Sequence[int], rows: int, steps: int, dtype: str) -> Dict[str, Any]:
    """Runs the loop: medians and means of each layer, and the tokens a second of all."""
    raw = np.uint16 if dtype == "bf16" else dtype  # whatever else this Python has for bf16
    hidden, out = client.allocate((rows, model.hidden), raw), client.allocate((rows, model.hidden), raw)
    values = np.random.default_rng(0).standard_normal(hidden.shape, np.float32)
    hidden[...] = values.view(np.uint32) >> 16 if dtype == "bf16" else values
    times: Dict[int, List[Dict[str, float]]] = {layer: [] for layer in layers}
    backends, transports = {}, {}
    for layer in layers:  # once without a clock: sessions open, threads and caches wake up
        client.forward(layer, hidden, model=model.name, dtype=dtype, out=out)
    begin = time.perf_counter()
    for _ in range(steps):
        for layer in layers:
            result = client.forward(layer, hidden, model=model.name, dtype=dtype, out=out)
            timing = result.timing
            times[layer].append({"client_us": result.client_us, "queue_us": timing.queue_us, "compute_us": timing.compute_us,
                                 "transport_us": result.transport_us + timing.receive_us + timing.send_us})
            backends[layer], transports[layer] = result.backend, result.transport
    seconds = time.perf_counter() - begin
    table = [{"layer": layer, "backend": backends[layer], "transport": transports[layer],
              "p50_us": statistics.median(sum(one.values()) for one in times[layer]),
              **{part: statistics.fmean(one[part] for one in times[layer]) for part in _PARTS}} for layer in times]
    return {"model": model.name, "hidden": model.hidden, "tokens": rows, "dtype": dtype, "steps": steps, "seconds": seconds,
            "step_us": seconds / steps * 1e6, "tokens_per_s": rows * steps / seconds, "rows": table}


def show(report: Dict[str, Any]) -> str:
    """The report as a table for people."""
    lines = [f"{report['model']}, H = {report['hidden']}, {report['tokens']} rows of {report['dtype']}, {report['steps']} steps: "
             f"{report['tokens_per_s']:.1f} tokens/s, {report['step_us'] / 1e3:.2f} ms a step over {len(report['rows'])} layers",
             f"{'layer':>5}  {'backend':16}  {'transport':13}  {'p50 us':>9}  {'client':>9}  {'transport':>9}  {'queue':>9}  "
             f"{'compute':>9}"]
    for row in report["rows"]:
        lines.append(f"{row['layer']:>5}  {row['backend']:16}  {row['transport']:13}  {row['p50_us']:9.1f}  "
                     f"{row['client_us']:9.1f}  {row['transport_us']:9.1f}  {row['queue_us']:9.1f}  {row['compute_us']:9.1f}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m moed.bench", description=(__doc__ or "").split("\n\n")[0], epilog=_EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT or unix:PATH")
    parser.add_argument("--model", default="", help="its name, where the server has several")
    parser.add_argument("--rows", type=int, default=1, metavar="M", help="rows of each call (default 1)")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="steps of the loop (default 32)")
    parser.add_argument("--layers", default="", metavar="L,...", help="numbers and ranges, as in 3,5-7 (default: all)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f16", "f32"], help="of hidden states (default bf16)")
    parser.add_argument("--transport", default="auto", choices=["auto", "rpc", "shared-memory", "ring"])
    parser.add_argument("--token-file", metavar="FILE", help="its first line that is no comment is sent as the caller's token")
    parser.add_argument("--tls-ca", metavar="FILE", help="who signed the server's certificate")
    parser.add_argument("--png", metavar="FILE", help="a picture of the layers' times; needs matplotlib (moed[bench])")
    parser.add_argument("--json", metavar="FILE", help="the figures as JSON; - is the standard output, with nothing else there")
    parser.add_argument("--floor", action="store_true", help="what this client adds to a bare grpcio echo and to the C++ client")
    parser.add_argument("--moectl", metavar="BIN", help="the program moectl, whose bench is the C++ client's side of --floor")
    return parser


def _read_token(path: Optional[str]) -> Optional[str]:
    if path is None:
        return None
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    return next((line for line in lines if line and not line.startswith("#")), None)


def _check(options: argparse.Namespace) -> None:
    """InvalidArgument for what makes no sense, before anything is sent."""
    for name in ("rows", "steps"):
        if getattr(options, name) < 1:
            raise invalid(f"--{name}", "1 or more", getattr(options, name))
    if options.png is not None and not _bench_picture.available():
        raise invalid("--png", "the package matplotlib (pip install moed[bench])", "none")
    if options.moectl is not None and not options.floor:
        raise invalid("--moectl", "--floor with it", "none")
    if options.floor and not options.address.startswith("unix:"):
        raise invalid("--floor", "a server at unix:PATH", options.address)


def _run(options: argparse.Namespace) -> int:
    _check(options)
    options.token = _read_token(options.token_file)
    with Client(options.address, transport=options.transport, token=options.token, tls_ca=options.tls_ca) as client:
        model = find_model(client, options.model)
        layers = parse_layers(options.layers, model.layers) if options.layers else list(model.layers)
        report = decode(client, model, layers, options.rows, options.steps, options.dtype)
    out = sys.stderr if options.json == "-" else sys.stdout
    print(show(report), file=out, flush=True)
    missed = False
    if options.floor:
        report["floor"] = _bench_floor.measure(options, model, layers[0])
        missed = any(not row["passed"] for row in report["floor"])
        print(_bench_floor.show(report["floor"]), file=out)
    if options.png is not None:
        _bench_picture.draw(options.png, show(report).split("\n")[0], report["rows"])
    if options.json == "-":
        print(json.dumps(report, indent=1))
    elif options.json is not None:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 1 if missed else 0


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except (errors.Error, OSError) as error:
        print(f"moed.bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
