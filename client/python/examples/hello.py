"""Asks a moed what it serves and runs one forward of each layer: hello.py ADDRESS [MODEL], ADDRESS as HOST:PORT or unix:PATH."""
import sys

import moed
import numpy as np


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    with moed.Client(sys.argv[1], retries=3) as client:
        hello = client.hello()
        print(hello)
        for model in [one for one in hello.models if sys.argv[2:] in ([], [one.name])]:
            hidden = client.allocate((4, model.hidden), np.float32)  # shared memory where there is a session: never copied
            hidden[...] = np.random.default_rng(0).standard_normal(hidden.shape)
            for layer in model.layers:
                result = client.forward(layer, hidden, model=model.name, return_routing=True)
                print(f"{model.name} layer {layer}: {result.backend} by {result.transport}, {result.timing.compute_us} us of "
                      f"compute, row 0 by experts {sorted(result.ids[0].tolist())}, |y| = {np.linalg.norm(result.output):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
