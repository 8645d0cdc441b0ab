"""Attention and experts in two processes, with two micro-batches in flight: afd.py ADDRESS [--model NAME] [--rows M] [--steps N].

This process is the attention side: it has the sequences and their caches of keys and values. A moed at ADDRESS (HOST:PORT or
unix:PATH) is the side of the experts. While one micro-batch is with the experts the other one has the attention side, layer by
layer, so that neither side waits for the other more than it must. The same work is done with one micro-batch at a time, and both
times are printed. Weights of attention are random: what is shown is the way of the calls, not a text.
"""
import argparse
import sys
import threading
import time

import moed
import numpy as np

HEADS, CONTEXT = 4, 128  # heads of attention; tokens of each sequence that are in the cache at the start


class Attention:
    """One layer's worth of attention, which all layers share. One call at a time, as on one device."""

    def __init__(self, hidden):
        self.weights = np.random.default_rng(1).standard_normal((4, hidden, hidden), np.float32) / np.float32(hidden ** 0.5)
        self.device = threading.Lock()
        self.busy = 0.0

    def __call__(self, x, keys, values):
        """x [M, H] of M sequences with their caches [M, T, H]: one decode step, with what it adds to the caches."""
        with self.device:
            begin = time.perf_counter()
            query, key, value = (x @ self.weights[part] for part in range(3))
            keys, values = np.concatenate([keys, key[:, None]], axis=1), np.concatenate([values, value[:, None]], axis=1)
            rows, tokens, hidden = keys.shape
            heads = (rows, tokens, HEADS, hidden // HEADS)
            scores = np.einsum("mhd,mthd->mht", query.reshape(rows, HEADS, -1), keys.reshape(heads)) / (hidden // HEADS) ** 0.5
            scores = np.exp(scores - scores.max(axis=2, keepdims=True))
            scores /= scores.sum(axis=2, keepdims=True)
            y = np.einsum("mht,mthd->mhd", scores, values.reshape(heads)).reshape(rows, hidden) @ self.weights[3]
            self.busy += time.perf_counter() - begin
            return x + y, keys, values


def norm(x):
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-6)


def begin_batch(model, seed, rows):
    """Hidden states of a micro-batch's last tokens, and its caches by layer."""
    random = np.random.default_rng(seed)
    caches = {layer: [random.standard_normal((rows, CONTEXT, model.hidden), np.float32) for _ in range(2)]
              for layer in model.layers}
    return random.standard_normal((rows, model.hidden), np.float32), caches


def decode(client, model, attention, x, caches, steps):
    """Steps of one micro-batch over all layers: its last hidden states, and the seconds that it was with the experts."""
    hidden, out, away = client.allocate(x.shape), client.allocate(x.shape), 0.0
    for _ in range(steps):
        for layer in model.layers:
            x, *caches[layer] = attention(x, *caches[layer])
            hidden[...] = norm(x)
            begin = time.perf_counter()
            client.forward(layer, hidden, model=model.name, out=out)  # waits without the interpreter's lock
            away += time.perf_counter() - begin
            x = x + out
        x = norm(x)  # stands for the next token's embedding
    return x, away


def run(client, model, options, together):
    """Both micro-batches, one after the other or in flight together: results, and seconds in all, of attention, of experts."""
    attention, results = Attention(model.hidden), [None, None]
    batches = [begin_batch(model, seed, options.rows) for seed in range(2)]

    def work(at):
        results[at] = decode(client, model, attention, *batches[at], options.steps)
    begin = time.perf_counter()
    threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
    for thread in threads:
        thread.start()
        if not together:
            thread.join()
    for thread in threads:
        thread.join()
    if None in results:
        raise SystemExit(1)  # the thread has said why
    return [x for x, _ in results], time.perf_counter() - begin, attention.busy, sum(away for _, away in results)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("address", metavar="ADDRESS")
    parser.add_argument("--model", default="")
    parser.add_argument("--rows", type=int, default=16, help="sequences of each of the two micro-batches")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    with moed.Client(options.address, retries=3) as client:
        models = [model for model in client.hello().models if options.model in ("", model.name)]
        if not models:
            print(f"afd.py: {options.address} has no model {options.model}", file=sys.stderr)
            return 2
        run(client, models[0], argparse.Namespace(rows=options.rows, steps=1), True)  # wakes up both sides
        results = {}
        for name, together in (("one at a time", False), ("two in flight", True)):
            results[name] = run(client, models[0], options, together)
            _, seconds, attention, experts = results[name]
            print(f"{name}: {seconds * 1e3:8.1f} ms, attention {attention * 1e3:8.1f} ms, with the experts {experts * 1e3:8.1f} ms")
        (alone, before, *_), (ahead, after, *_) = results.values()
        error = max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(alone, ahead))
        print(f"overlapped: {(before - after) * 1e3:.1f} ms, {before / after:.2f} times as fast; results differ by {error:.1g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
