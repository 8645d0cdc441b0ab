"""Arrays of callers as plain memory, and back: numpy arrays and torch tensors of the host, without a copy where that can be.

bfloat16, which numpy lacks, is `ml_dtypes.bfloat16` where a caller uses that, else uint16 with dtype="bf16" beside it; inside it
is always uint16. torch is never imported here: whoever hands over a tensor has done so. Inputs in torch's tensors on a GPU are
copied to the host; other memory of a GPU is refused by name (but see _cuda.py).

Inputs that are not contiguous are copied, in one pass where they are copied anyway; an output must be contiguous and writable.
Everything wrong is an InvalidArgument that names the argument, what was wanted and what was got.
"""
from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any, Dict, Optional, Tuple

import numpy as np

from moed.errors import InvalidArgument

F32, BF16, F16, I32, F8E4M3, I8 = 1, 2, 3, 4, 5, 6  # of moe.v1.DType
_NAMES = {F32: "f32", BF16: "bf16", F16: "f16"}
_RAW: Dict[int, Any] = {F32: np.dtype(np.float32), BF16: np.dtype(np.uint16), F16: np.dtype(np.float16)}
_BY_DTYPE = {_RAW[F32]: F32, _RAW[F16]: F16}
_BY_RAW = {dtype: wire for wire, dtype in _RAW.items()}
_SAID = {(_RAW[F32], None): F32, (_RAW[F16], None): F16, (_RAW[BF16], "bf16"): BF16}  # the most frequent hidden states
_WIRE = {"f32": F32, "float32": F32, "f16": F16, "float16": F16, "half": F16, "bf16": BF16, "bfloat16": BF16}
_WANTED = "float32, float16 or bfloat16 (uint16 with dtype=\"bf16\")"


def invalid(name: str, wanted: str, got: Any) -> InvalidArgument:
    return InvalidArgument(f"{name}: wanted {wanted}, got {got}")


@dataclass(slots=True)
class View:
    """A tensor of a caller: `raw` is its memory as numpy sees it, of the wire's dtype `wire`; `kind` is "numpy", "ml_dtypes" or
    "torch". `scales` [M] float32 is there where an element has one byte."""
    wire: int
    raw: np.ndarray
    kind: str
    scales: Optional[np.ndarray] = None


def is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def device_of(value: Any) -> Any:
    """The torch device of a tensor on a GPU; None for everything else."""
    return value.device if is_torch(value) and value.device.type == "cuda" else None


def describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype.str if not value.dtype.isnative else value.dtype.name}"
    return f"a tensor of {value.dtype}" if is_torch(value) else type(value).__name__


def _of_torch(name: str, tensor: Any) -> np.ndarray:
    """The tensor's memory; bfloat16 as uint16."""
    torch = sys.modules["torch"]
    if tensor.device.type not in ("cpu", "cuda"):
        raise invalid(name, "memory of the host", f"a tensor on {tensor.device}; .cpu() copies it")
    try:
        plain = tensor.detach().cpu()  # which leaves one of the host where it is
        if plain.dtype == torch.bfloat16:
            return plain.view(torch.int16).numpy().view(np.uint16)
        if str(plain.dtype) == "torch.float8_e4m3fn":  # which older ones lack
            return plain.view(torch.uint8).numpy()
        return plain.numpy()
    except (RuntimeError, TypeError) as error:
        raise invalid(name, "a dense tensor", f"{describe(tensor)}: {error}") from None


def as_array(name: str, value: Any) -> np.ndarray:
    """Any array of a caller, with bfloat16 of torch as uint16 and its float8_e4m3fn as uint8."""
    if is_torch(value):
        return _of_torch(name, value)
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    if hasattr(value, "__cuda_array_interface__"):
        raise invalid(name, "memory of the host", f"{type(value).__name__} in a GPU's memory")
    raise invalid(name, "a numpy array or a torch tensor", type(value).__name__)


def two_dimensions(name: str, array: np.ndarray, wanted: str) -> np.ndarray:
    if array.ndim != 2:
        raise invalid(name, f"shape {wanted}", list(array.shape))
    return array


def wire_dtype(name: str, dtype: Any) -> int:
    """The wire's number of "f32", "bf16", "f16", or of a numpy or torch dtype of that name."""
    text = dtype if isinstance(dtype, str) else str(dtype).rpartition(".")[2] if not isinstance(dtype, type) else dtype.__name__
    if text not in _WIRE:
        raise invalid(name, "f32, bf16 or f16", repr(dtype))
    return _WIRE[text]


def dtype_of(name: str, value: Any, said: Any = None) -> Tuple[int, str]:
    """The wire's dtype and the kind of a tensor of floats. `said` is what the caller says beside it, which uint16 needs to be
    bf16."""
    wanted = None if said is None else wire_dtype("dtype", said)
    if is_torch(value):
        wire, kind = _WIRE.get(str(value.dtype).rpartition(".")[2]), "torch"
    elif isinstance(value, np.ndarray) and value.dtype in _BY_DTYPE:  # as nearly always; a dtype's name is made anew each time
        wire, kind = _BY_DTYPE[value.dtype], "numpy"
    elif isinstance(value, np.ndarray) and value.dtype.isnative:
        kind = "ml_dtypes" if value.dtype.name == "bfloat16" else "numpy"
        wire = BF16 if kind == "ml_dtypes" or (value.dtype == np.uint16 and wanted == BF16) else None
    else:
        as_array(name, value)  # names what it is, unless it is an array in another byte order
        wire, kind = None, ""
    if wire is None:
        raise invalid(name, _WANTED, describe(value))
    if wanted is not None and wanted != wire:
        raise invalid(name, f"{_NAMES[wanted]} as dtype says", describe(value))
    return wire, kind


def read_hidden(value: Any, said: Any) -> View:
    """Hidden states [M, H]."""
    if type(value) is np.ndarray and value.ndim == 2 and (said is None or said == "bf16"):
        known = _SAID.get((value.dtype, said))
        if known is not None:
            return View(known, value, "numpy")
    wire, kind = dtype_of("hidden", value, said)
    raw = as_array("hidden", value)
    return View(wire, two_dimensions("hidden", raw.view(_RAW[wire]) if kind == "ml_dtypes" else raw, "[M, H]"), kind)


def dtype_of_output(value: Any) -> int:
    """The wire's dtype of a caller's output, where uint16 is bf16."""
    known = _BY_RAW.get(value.dtype) if type(value) is np.ndarray else None
    if known is not None:
        return known
    return dtype_of("out", value, "bf16" if isinstance(value, np.ndarray) and value.dtype == np.uint16 else None)[0]


def read_output(value: Any, rows: int, cols: int, wire: int) -> np.ndarray:
    """The memory of the caller's output [rows, cols] of dtype `wire`."""
    got = dtype_of_output(value)
    raw = value if type(value) is np.ndarray else as_array("out", value)
    if got != wire or raw.shape != (rows, cols):
        raise invalid("out", f"{_NAMES[wire]} of shape [{rows}, {cols}]", f"{_NAMES[got]} of shape {list(raw.shape)}")
    if not raw.flags.c_contiguous or not raw.flags.writeable:
        raise invalid("out", "a contiguous array that can be written",
                      "one that is not contiguous" if not raw.flags.c_contiguous else "a read-only one")
    return raw.view(_RAW[wire])


def read_ids(value: Any) -> np.ndarray:
    """Expert ids [M, k] as contiguous int32; other integers are converted when all of them fit."""
    raw = two_dimensions("ids", as_array("ids", value), "[M, k]")
    if raw.dtype.kind not in "iu" or not raw.dtype.isnative:
        raise invalid("ids", "integers", describe(value))
    limits = np.iinfo(np.int32)
    if raw.dtype != np.int32 and raw.size and (int(raw.min()) < limits.min or int(raw.max()) > limits.max):
        raise invalid("ids", f"numbers from {limits.min} to {limits.max}", f"some from {int(raw.min())} to {int(raw.max())}")
    return np.ascontiguousarray(raw, dtype=np.int32)


def read_floats(name: str, value: Any, wanted: str) -> np.ndarray:
    """Weights or logits as contiguous float32; float16 and bfloat16 are widened, which is exact, float64 is refused."""
    wire, _ = dtype_of(name, value)
    return _widen(wire, two_dimensions(name, as_array(name, value), wanted))


def _widen(wire: int, raw: np.ndarray) -> np.ndarray:
    if wire == BF16:
        bits = raw.view(np.uint16)
        return np.ascontiguousarray((bits.astype(np.uint32) << 16).view(np.float32))
    return np.ascontiguousarray(raw, dtype=np.float32)


def read_scales(value: Any, rows: int) -> np.ndarray:
    """A scale for each of `rows` rows, [M] or [M, 1], as contiguous float32 [M]."""
    wire, _ = dtype_of("scales", value)
    raw = as_array("scales", value)
    if raw.shape not in ((rows,), (rows, 1)):
        raise invalid("scales", f"[{rows}], one for each row of the codes", list(raw.shape))
    return _widen(wire, raw).reshape(-1)


def empty(rows: int, cols: int, wire: int) -> np.ndarray:
    return np.empty((rows, cols), _RAW[wire])


def stand_in(rows: int, cols: int, wire: int) -> np.ndarray:
    """Something of this shape and dtype that has no memory of its own, for a tensor that is elsewhere."""
    return np.broadcast_to(np.zeros((), _RAW[wire]), (rows, cols))


def name_of(wire: int) -> str:
    return _NAMES[wire]


def give_back(raw: np.ndarray, wire: int, like: View) -> Any:
    """`raw`, of dtype `wire`, as what the caller of `like` works with; shares its memory."""
    if like.kind == "torch":
        torch = sys.modules["torch"]
        if wire == BF16:
            return torch.from_numpy(raw.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(raw)
    if wire != BF16 or (like.kind == "numpy" and like.wire == BF16):
        return raw  # who sends bf16 as uint16 gets it so
    ml_dtypes = find_ml_dtypes()
    return raw if ml_dtypes is None else raw.view(ml_dtypes.bfloat16)


def like_torch(raw: Optional[np.ndarray], like: View) -> Any:
    """Ids or weights of an answer: a tensor where the hidden states were one."""
    return sys.modules["torch"].from_numpy(raw) if raw is not None and like.kind == "torch" else raw


def sizes_of(shape: Any) -> Tuple[int, ...]:
    """A shape as numpy takes it: a number or several."""
    try:
        sizes = tuple(operator.index(size) for size in (shape if hasattr(shape, "__iter__") else (shape,)))
    except TypeError:
        sizes = (-1,)
    if any(size < 0 for size in sizes):
        raise invalid("shape", "sizes of 0 and more", repr(shape))
    return sizes


def element(dtype: Any) -> np.dtype:
    """The numpy dtype of arrays that `allocate` makes: any of numpy's, or one of the wire's names; bf16 as `ml_dtypes.bfloat16`
    or uint16."""
    if not isinstance(dtype, str) or dtype not in _WIRE:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(dtype, torch.dtype):
            try:
                return np.dtype(dtype)
            except TypeError:
                raise invalid("dtype", "a dtype", repr(dtype)) from None
    wire = wire_dtype("dtype", dtype)
    ml_dtypes = find_ml_dtypes() if wire == BF16 else None
    return _RAW[wire] if ml_dtypes is None else np.dtype(ml_dtypes.bfloat16)


def find_ml_dtypes() -> Any:
    """The package; None where it is not installed."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    return ml_dtypes
