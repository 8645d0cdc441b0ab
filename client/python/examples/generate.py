"""Text by a model whose experts are on a moed: generate.py CHECKPOINT ADDRESS [--model NAME] [--prompt TEXT] [--count N].

CHECKPOINT is the folder that the moed at ADDRESS (HOST:PORT or unix:PATH) serves as NAME. Attention, embeddings and head are read
from it and run here; of the experts nothing is read. A checkpoint without a tokenizer is taken for one whose tokens are bytes.
Needs torch and transformers: pip install "moed[transformers]".
"""
import argparse
import pathlib
import sys
import time

import moed
import torch
import transformers
from moed.transformers import from_pretrained_without_experts


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=pathlib.Path)
    parser.add_argument("address", metavar="ADDRESS")
    parser.add_argument("--model", default="", help="the server's name of it, where it has several")
    parser.add_argument("--prompt", default="It was a dark and stormy night; ")
    parser.add_argument("--count", type=int, default=64, help="tokens to generate")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the checkpoint's")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    has_tokenizer = any(options.checkpoint.glob("tokenizer*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.checkpoint) if has_tokenizer else None
    try:
        with moed.Client(options.address, retries=3) as client:
            model = from_pretrained_without_experts(options.checkpoint, client, model_name=options.model,
                                                    dtype=options.dtype and getattr(torch, options.dtype))
            print(model.moed, file=sys.stderr)
            prompt = tokenizer.encode(options.prompt) if tokenizer else list(options.prompt.encode())
            tokens, begin = torch.tensor([prompt]), time.perf_counter()
            done = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=options.count)
            seconds, new = time.perf_counter() - begin, done[0, len(prompt):].tolist()
    except moed.Error as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    print(options.prompt + (tokenizer.decode(new) if tokenizer else bytes(new).decode("utf-8", "replace")))
    print(f"{len(new)} tokens, {len(new) / seconds:.1f} a second", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
