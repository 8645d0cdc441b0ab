"""`evaluate`: one checkpoint, in process and through a service."""
from __future__ import annotations

import math
import pathlib
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple, Union

import torch

from moed import Client
from moed._tensors import invalid
from moed.eval._reference import load_dequantized, load_whole
from moed.eval._score import Scores, read_windows, score
from moed.reports import Explanation
from moed.transformers import from_pretrained_without_experts
from moed.transformers._blocks import DTYPES

__all__ = ["Evaluation", "evaluate"]

WEIGHT_ONLY_BOUND, ACTIVATIONS_BOUND = 0.1, 0.5  # percent of perplexity


@dataclass(frozen=True)
class Evaluation:
    """What came out. Without a reference its perplexity and all differences are None, and `passed` says that the service's
    perplexity is a number."""
    checkpoint: str
    schemes: List[str]             # that run, of routed and shared experts
    backends: List[str]
    tokens: int                    # scored
    wire: str
    reference: str                 # what it was: "dequantize", a path, or "none"
    reference_perplexity: Optional[float]
    perplexity: float              # through the service
    difference_percent: Optional[float]  # of perplexities; above 0: the service's is higher
    mean_abs_dlogp: Optional[float]      # over tokens
    max_abs_dlogp: Optional[float]
    same_token_percent: Optional[float]  # where both hold the same token for likeliest
    bound_percent: float
    passed: bool


def evaluate(path: Union[str, pathlib.Path], client: Client, text: bytes, *, program: str = "moed", start: int = 0,
             window: int = 256, model_name: str = "", dtype: str = "f32", wire: Optional[str] = None,
             router: str = "model", shared: str = "server", reference: str = "dequantize",
             bound: Optional[float] = None) -> Evaluation:
    """Perplexity of `text` through the service behind `client` and in process, token for token.

    path        the checkpoint's folder, of which the server has the experts
    program     moed's path, for `moed dequantize`
    start       byte of the text where the first window begins
    window      tokens of one, scored on its own
    dtype       "f32", "bf16" or "f16": of the model around the experts, and of the reference
    reference   "dequantize", "none", or the path of an unquantized checkpoint that transformers loads whole
    bound       percent by which the perplexities may differ; None: 0.1, or 0.5 where activations are quantized
    model_name, wire, router, shared
                as in moed.transformers.attach

    Raises what that raises, and InvalidArgument or NotFound for files and arguments that do not fit.
    """
    folder, element = pathlib.Path(path), DTYPES.get(dtype)
    if element is None or window < 2 or start < 0:
        raise invalid("dtype, window and start", "f32, bf16 or f16, at least 2, at least 0", f"{dtype!r}, {window}, {start}")
    model = from_pretrained_without_experts(folder, client, dtype=element, model_name=model_name, wire=wire, router=router,
                                            shared=shared)
    windows = read_windows(folder, text, start, window, model.config.vocab_size)
    explanation = client.explain(model.moed.model_name)
    schemes, backends = _what_runs(explanation, model.moed.layers)
    if bound is None:
        bound = WEIGHT_ONLY_BOUND if all(one.endswith("16-bit activations") for one in schemes) else ACTIVATIONS_BOUND
    expected = _load_reference(folder, reference, program, explanation, element)
    served = score(model, windows)
    compared = _compare(None if expected is None else score(expected, windows), served, bound)
    return Evaluation(folder.resolve().name, schemes, backends, served.logp.numel(), wire or dtype, reference, compared[0],
                      served.perplexity, *compared[1:5], bound, compared[5])


def _what_runs(explanation: Explanation, layers: List[int]) -> Tuple[List[str], List[str]]:
    """Schemes and backends, each once."""
    rows = [layer for layer in explanation.layers if layer.layer in layers]
    schemes = [one for layer in rows for one in (layer.scheme, layer.shared_scheme) if one]
    backends = [one for layer in rows for one in (layer.choice, layer.shared_choice) if one]
    return list(dict.fromkeys(schemes)), list(dict.fromkeys(backends))


def _load_reference(path: pathlib.Path, reference: str, program: str, explanation: Explanation, dtype: torch.dtype) -> Any:
    if reference == "none":
        return None
    if reference == "dequantize":
        return load_dequantized(path, program, explanation, dtype)
    return load_whole(pathlib.Path(reference), dtype)


_Compared = Tuple[Optional[float], Optional[float], Optional[float], Optional[float], Optional[float], bool]


def _compare(expected: Optional[Scores], served: Scores, bound: float) -> _Compared:
    """The reference's perplexity, the four differences, and whether they pass; what is no number does not."""
    if expected is None:
        return None, None, None, None, None, math.isfinite(served.perplexity)
    difference = 100 * (served.perplexity / expected.perplexity - 1)
    apart = (served.logp - expected.logp).abs()
    same = 100 * float((served.best == expected.best).double().mean())
    return expected.perplexity, difference, float(apart.mean()), float(apart.max()), same, abs(difference) <= bound
