"""How far a model through the service is from the same model in process: `python -m moed.eval --help`.

The model is transformers', on the CPU; its reference has weights that `moed dequantize` wrote, exact, and where the scheme
quantizes activations, a second implementation of its rule (`_activations`). What differs is the server's arithmetic and the dtype
on the wire, and `evaluate` says by how much, token for token.

    from moed.eval.evaluate import evaluate
    with moed.Client("unix:/run/moed.sock") as client:
        print(evaluate("/models/mixtral-gptq", client, text, program="bin/moed").difference_percent)

This file imports nothing, so that the help of the program needs neither torch nor transformers.
"""
