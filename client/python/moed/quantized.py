"""Hidden states in one byte an element, with a scale a row: half the bytes of bfloat16 on their way to the server.

The server computes with what bf16(code x scale) is, the product rounded once: the answer is to the bit that of a call with these
values. FP8 here is OCP E4M3 without infinities: its codes are ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn, or uint8 with
dtype="f8e4m3" beside them.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np

from moed import _tensors
from moed._tensors import invalid

__all__ = ["QuantizedHidden", "quantize"]

_WIRE = {"f8e4m3": _tensors.F8E4M3, "fp8": _tensors.F8E4M3, "int8": _tensors.I8, "i8": _tensors.I8}
_NAMES = {_tensors.F8E4M3: "f8e4m3", _tensors.I8: "int8"}
_LARGEST = {_tensors.F8E4M3: np.float32(448), _tensors.I8: np.float32(127)}  # what a code says at most
_NAN, _SIGN = 0x7F, 0x80                # of E4M3
_LEAST_EXPONENT, _MANTISSA_BITS = -6, 3  # of its normal numbers


@dataclass(frozen=True)
class QuantizedHidden:
    """`codes` [M, H] of int8 or FP8 and `scales` [M] (or [M, 1]) of float32: arrays of numpy or tensors of torch, for
    `Client.forward` in the place of hidden states. `dtype`: "int8" or "f8e4m3", which codes of uint8 need."""
    codes: Any
    scales: Any
    dtype: Optional[str] = None

    def view(self) -> _tensors.View:
        """The tensors' memory. InvalidArgument for what fits not together."""
        wire, kind = _codes_of(self.codes, self.dtype)
        raw = _tensors.two_dimensions("codes", _tensors.as_array("codes", self.codes), "[M, H]")
        raw = raw.view(np.int8 if wire == _tensors.I8 else np.uint8)
        return _tensors.View(wire, raw, kind, _tensors.read_scales(self.scales, raw.shape[0]))


def _wire_of(dtype: Any) -> int:
    if dtype not in _WIRE:
        raise invalid("dtype", "f8e4m3 or int8", repr(dtype))
    return _WIRE[dtype]


def _codes_of(codes: Any, said: Optional[str]) -> Tuple[int, str]:
    """Dtype on the wire and kind of a caller's codes."""
    wanted = None if said is None else _wire_of(said)
    kind = "torch" if _tensors.is_torch(codes) else "numpy"
    name = str(codes.dtype).rpartition(".")[2] if hasattr(codes, "dtype") else ""
    if name == "uint8":
        wire = wanted if wanted == _tensors.F8E4M3 else None
    elif name == "float8_e4m3fn":
        wire, kind = _tensors.F8E4M3, "torch" if kind == "torch" else "ml_dtypes"
    else:
        wire = _tensors.I8 if name == "int8" else None
    if wire is None or (wanted is not None and wanted != wire):
        is_what = "int8 or float8_e4m3fn (uint8 with dtype=\"f8e4m3\")" if wanted is None else f"{_NAMES[wanted]} as dtype says"
        raise invalid("codes", is_what, _tensors.describe(codes))
    return wire, kind


def quantize(hidden: Any, dtype: str, *, hidden_dtype: Any = None) -> QuantizedHidden:
    """Hidden states [M, H], as `Client.forward` takes them, in one byte an element: "int8" or "f8e4m3". Each row's scale is its
    largest magnitude by the code's (127 or 448), 1 for a row of zeros; values go to the nearest code, ties to even. NaN and
    infinities become NaN in FP8 and are refused with their row in int8. `hidden_dtype`: "bf16" for hidden states in uint16."""
    wire = _wire_of(dtype)
    view = _tensors.read_hidden(hidden, hidden_dtype)
    values = (view.raw.astype(np.uint32) << 16).view(np.float32) if view.wire == _tensors.BF16 else view.raw.astype(np.float32)
    finite = np.isfinite(values)
    if wire == _tensors.I8 and not finite.all():
        row = int(np.argmin(finite.all(axis=1)))
        raise invalid("hidden", "finite values for int8", f"{values[row][~finite[row]][0]} in row {row}")
    largest = np.abs(np.where(finite, values, np.float32(0))).max(axis=1, initial=np.float32(0))
    scales = np.where(largest > 0, largest / _LARGEST[wire], np.float32(1)).astype(np.float32)
    with np.errstate(invalid="ignore", divide="ignore"):
        scaled = np.clip(values / scales[:, None], -_LARGEST[wire], _LARGEST[wire])  # the quotient may be rounded beyond
        codes = np.rint(scaled).astype(np.int8) if wire == _tensors.I8 else np.where(finite, _e4m3(scaled), _NAN).astype(np.uint8)
    return _like(codes, scales, wire, view.kind)


def _e4m3(values: np.ndarray) -> np.ndarray:
    """The nearest codes of values of at most 448: units of the last place, which are 2^-9 for subnormal numbers."""
    magnitude = np.abs(values)
    exponent = np.where(magnitude >= 2.0 ** _LEAST_EXPONENT, np.frexp(magnitude)[1] - 1, _LEAST_EXPONENT)
    units = np.nan_to_num(np.rint(np.ldexp(magnitude, _MANTISSA_BITS - exponent))).astype(np.int32)
    # A normal number has 8 to 16 units: adding them to the exponent's bits carries a mantissa that was rounded up.
    return np.where(np.signbit(values), _SIGN, 0) | (((exponent - _LEAST_EXPONENT) << _MANTISSA_BITS) + units)


def _like(codes: np.ndarray, scales: np.ndarray, wire: int, kind: str) -> QuantizedHidden:
    """Codes and scales as what the caller works with."""
    if kind == "torch":
        torch = sys.modules["torch"]
        tensor = torch.from_numpy(codes)
        if wire == _tensors.F8E4M3 and hasattr(torch, "float8_e4m3fn"):
            tensor = tensor.view(torch.float8_e4m3fn)
        return QuantizedHidden(tensor, torch.from_numpy(scales), _NAMES[wire])
    ml_dtypes = _tensors.find_ml_dtypes() if wire == _tensors.F8E4M3 else None
    return QuantizedHidden(codes if ml_dtypes is None else codes.view(ml_dtypes.float8_e4m3fn), scales, _NAMES[wire])
