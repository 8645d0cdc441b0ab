"""Log-probabilities that a model gives to a text, window by window."""
from __future__ import annotations

import pathlib
from dataclasses import dataclass
from typing import Any, List

import torch
import transformers

from moed._tensors import invalid

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Scores:
    """Of each token but a window's first: its log-probability, float64, and the token that the model held for likeliest."""
    logp: torch.Tensor
    best: torch.Tensor

    @property
    def perplexity(self) -> float:
        return float(torch.exp(-self.logp.mean()))


def read_windows(path: pathlib.Path, text: bytes, start: int, size: int, vocabulary: int) -> torch.Tensor:
    """The text from byte `start` on as tokens [windows, size]; a rest is left out. With the tokenizer in `path`, without special
    tokens; a folder without one has bytes for tokens."""
    if any((path / name).is_file() for name in _TOKENIZERS):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
        tokens: List[int] = tokenizer.encode(text[start:].decode(errors="replace"), add_special_tokens=False)
    elif vocabulary == 256:
        tokens = list(text[start:])
    else:
        raise invalid(f"{path}", f"a tokenizer ({' or '.join(_TOKENIZERS)}) for {vocabulary} tokens", "none")
    count = len(tokens) // size
    if count == 0:
        raise invalid("text", f"at least {size} tokens from byte {start} on", f"{len(tokens)}")
    return torch.tensor(tokens[:count * size]).reshape(count, size)


def score(model: Any, windows: torch.Tensor) -> Scores:
    """Each window is a sequence of its own and, through a service, one call a layer."""
    logp, best = [], []
    with torch.inference_mode():
        for window in windows:
            logits = model(window[None], use_cache=False).logits[0, :-1].double()
            logp.append(logits.log_softmax(-1).gather(1, window[1:, None])[:, 0])
            best.append(logits.argmax(-1))
    return Scores(torch.cat(logp), torch.cat(best))
