"""What quantized activations do to the input of a projection, in torch: a second implementation, for references.

Values are replaced by those that their codes stand for, in float32, rounded to nearest with ties to even, saturating. The rules
are those of kernels/activation_quant.h, written from their description:

    int8     scale = absmax / 127
    fp8      scale = absmax / 448, rounded up to a power of two where the checkpoint says so ("ue8m0")
    mx       scale = 2^e of 32 values: e = floor(log2 absmax) - emax ("floor"), one more from a significand of 1.75 on ("even"),
             or e = ceil(log2(absmax / largest code)) ("ceil")
    nvfp4    block scale = E4M3(stored * absmax16 / 6), code = E2M1(x * stored / block scale)
    static   the stored scale
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Optional

import torch

from moed._tensors import invalid

_LARGEST = {"int8": 127.0, "fp8": 448.0, "fp4": 6.0}
_LARGEST_EXPONENT = {"fp8": 8, "fp4": 2}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# Between codes i and i + 1; where the even one is i + 1, the midpoint itself belongs to it.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_MIDPOINTS[1::2] = torch.nextafter(_MIDPOINTS[1::2], torch.zeros(3))

_TEXT = re.compile(r"(int8|fp8|fp4) (dynamic|static) (token|tensor|g\d+) activations$")


@dataclass(frozen=True)
class Rule:
    """`element` int8, fp8 or fp4; `scale` "absmax", "pow2", "floor", "even", "ceil", "nvfp4" or "static"; `group` values share
    one, 0: a whole row, -1: all rows of a request."""
    element: str
    scale: str
    group: int

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint has a number for it, a projection each."""
        return self.scale in ("static", "nvfp4")


def parse_rule(scheme: str, config: Dict[str, Any]) -> Optional[Rule]:
    """The rule of one projection: `scheme` is the server's text, "int4 g32 symmetric, f16 scales, int8 dynamic token activations",
    `config` the checkpoint's quantization_config. None for activations that are not quantized."""
    if scheme.endswith("16-bit activations"):
        return None
    match = _TEXT.search(scheme)
    if match is None:
        raise invalid("scheme", "one whose activations the reference can quantize", repr(scheme))
    element, mode, group = match.groups()
    size = {"token": 0, "tensor": -1}.get(group) if group[0] == "t" else int(group[1:])
    assert size is not None
    if mode == "static":
        return Rule(element, "static", size)
    if element == "fp4" and "e4m3 scales" in scheme:
        return Rule(element, "nvfp4", size)
    if element != "int8" and "e8m0 scales" in scheme and size > 0:
        return Rule(element, _mx_scale(config), size)
    return Rule(element, "pow2" if config.get("scale_fmt") == "ue8m0" else "absmax", size)


def _mx_scale(config: Dict[str, Any]) -> str:
    """ModelOpt has one way, Quark says which, compressed-tensors has another."""
    if config.get("quant_method") == "modelopt":
        return "ceil"
    inputs = (config.get("global_quant_config") or {}).get("input_tensors") or {}
    mode = str(inputs.get("scale_calculation_mode", "even"))
    if mode not in ("floor", "even", "ceil"):
        raise invalid("scale_calculation_mode", "floor, even or ceil", repr(mode))
    return mode


def parse_rules(scheme: str, config: Dict[str, Any]) -> Dict[str, Optional[Rule]]:
    """Rules of "gate", "up" and "down"; the server writes them apart where they differ."""
    parts = scheme.split("; ")
    if len(parts) == 1:
        return dict.fromkeys(("gate", "up", "down"), parse_rule(scheme, config))
    return {part.split(" ", 1)[0]: parse_rule(part.split(" ", 1)[1], config) for part in parts}


def quantize(rule: Optional[Rule], stored: Optional[float], x: torch.Tensor) -> torch.Tensor:
    """x [M, n] float32, all rows of a request, as its codes' values. `stored` as Rule.is_stored says. A group without any value
    but 0 stays so; NaN and infinity make their group NaN."""
    if rule is None or x.numel() == 0:
        return x
    if rule.scale == "static":
        assert stored is not None
        lowest = -128.0 if rule.element == "int8" else -_LARGEST[rule.element]
        return _round(rule.element, x / stored, lowest) * stored
    rows, cols = x.shape
    size = cols if rule.group <= 0 else rule.group
    groups = torch.nn.functional.pad(x, (0, -cols % size)).reshape(rows, -1, size)
    absmax = groups.abs().amax() if rule.group < 0 else groups.abs().amax(dim=-1, keepdim=True)
    values = _in_groups(rule, stored, groups, absmax)
    values = torch.where(absmax.isfinite(), values, torch.nan)
    return values.reshape(rows, -1)[:, :cols]


def _in_groups(rule: Rule, stored: Optional[float], groups: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    if rule.scale == "nvfp4":
        assert stored is not None
        block = _e4m3(stored * absmax / _LARGEST["fp4"])
        values = _round(rule.element, groups * stored / block) * block / stored
        return torch.where(block == 0, 0.0, values)
    scale = _scale(rule, absmax)
    return torch.where(scale == 0, 0.0, _round(rule.element, groups / scale) * scale)


def _scale(rule: Rule, absmax: torch.Tensor) -> torch.Tensor:
    """Of groups with these largest magnitudes; 0 for those that have only zeros."""
    absolute = absmax / _LARGEST[rule.element]
    if rule.scale == "absmax":
        return absolute
    by_exponent = rule.scale in ("floor", "even")
    mantissa, exponent = torch.frexp(absmax if by_exponent else absolute)  # in [0.5, 1)
    if by_exponent:
        exponent = exponent - 1 - _LARGEST_EXPONENT[rule.element] + (mantissa >= (0.875 if rule.scale == "even" else 1.0)).int()
    else:  # up to a power of two
        exponent = exponent - (mantissa == 0.5).int()
    return torch.where(absmax == 0, 0.0, torch.ldexp(torch.ones_like(absmax), exponent.clamp(-127, 127)))


def _round(element: str, x: torch.Tensor, lowest: float = -127.0) -> torch.Tensor:
    if element == "int8":
        return x.round().clamp(lowest, 127.0)
    return _e4m3(x) if element == "fp8" else _e2m1(x)


def _e4m3(x: torch.Tensor) -> torch.Tensor:
    # The cast alone gives NaN above the largest value.
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32)


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    values = _E2M1[torch.bucketize(x.abs(), _MIDPOINTS)].copysign(x)
    return torch.where(x.isnan(), x, values)
