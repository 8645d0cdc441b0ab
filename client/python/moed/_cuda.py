"""Tensors in a GPU's memory: named to a server by CUDA IPC handles, or copied through the host.

A handle names a whole allocation, so a tensor is a handle and an offset from the allocation's start. Handles are asked of the CUDA
driver (libcuda) by ctypes: nothing here imports a CUDA package, and torch only where a caller has. Before a tensor is named, the
stream that may still write it is waited for. Threads: any; the driver's context of a tensor is made current for each request.
"""
from __future__ import annotations

import ctypes
import functools
import operator
import sys
from typing import Any, NamedTuple, Optional, Tuple

import numpy as np

from moed import errors
from moed._tensors import invalid, is_torch

_CONTEXT = 1           # CU_POINTER_ATTRIBUTE_CONTEXT
_HANDLE_BYTES = 64
_ALIGNMENT = 16        # of a tensor from the start of its allocation, as the server wants it
_TYPES = {"<f4": "f32", "<f2": "f16", "<u2": "bf16"}  # of __cuda_array_interface__, which has no bfloat16


class DeviceMemory(NamedTuple):
    """What the message of this name has."""
    handle: bytes
    offset: int


class DeviceArray(NamedTuple):
    """A contiguous tensor of a caller: `dtype` is the wire's name, `stream` what __cuda_array_interface__ says, None: nothing to
    wait for."""
    pointer: int
    shape: Tuple[int, int]
    dtype: str
    stream: Optional[int]
    needs_saying: bool  # uint16, which is bf16 only when the caller says so


def is_on_device(value: Any) -> bool:
    """Whether `value` says that it lies in a GPU's memory."""
    if type(value) is np.ndarray:
        return False
    if is_torch(value):
        return value.device.type == "cuda"
    return hasattr(value, "__cuda_array_interface__")


def read(name: str, value: Any) -> DeviceArray:
    """A tensor [M, H] on a GPU. InvalidArgument for one that is not contiguous, and for other dtypes."""
    if is_torch(value):
        sys.modules["torch"].cuda.current_stream(value.device).synchronize()
        dtype = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(str(value.dtype).rpartition(".")[2])
        pointer, shape, stream, contiguous = value.data_ptr(), tuple(value.shape), None, value.is_contiguous()
    else:
        facts = value.__cuda_array_interface__
        dtype, shape = _TYPES.get(facts["typestr"]), tuple(operator.index(size) for size in facts["shape"])
        pointer, stream, contiguous = facts["data"][0], facts.get("stream"), _is_contiguous(facts, shape)
    if dtype is None:
        raise invalid(name, "float32, float16 or bfloat16 (uint16) on a GPU", getattr(value, "dtype", type(value).__name__))
    if len(shape) != 2 or not contiguous:
        raise invalid(name, "a contiguous tensor [M, H] on a GPU", f"shape {list(shape)}{'' if contiguous else ', strided'}")
    return DeviceArray(pointer, (shape[0], shape[1]), dtype, stream, dtype == "bf16" and not is_torch(value))


def new_tensor(like: Any, rows: int, cols: int, wire: int) -> Any:
    """A tensor of torch on the device of `like`."""
    torch = sys.modules["torch"]
    return torch.empty((rows, cols), dtype={1: torch.float32, 2: torch.bfloat16, 3: torch.float16}[wire], device=like.device)


def _is_contiguous(facts: Any, shape: Tuple[int, ...]) -> bool:
    strides, expected = facts.get("strides"), int(facts["typestr"][2:])
    if strides is None:
        return True
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


class Driver:
    """The CUDA driver of this machine, or a `library` with its functions."""

    def __init__(self, library: Any):
        self._library = library
        self._call("cuInit", 0)

    def _call(self, function: str, *arguments: Any) -> None:
        """Internal with the driver's name of the error."""
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(name))
            raise errors.Internal(f"{function}: {(name.value or b'unknown error').decode()} ({code})")

    def share(self, name: str, array: DeviceArray) -> Optional[DeviceMemory]:
        """What names the tensor to a server with the same GPU, after its stream has finished; None for no elements. Internal when
        the driver refuses, as it does for memory that cudaMalloc did not allocate (torch: not with expandable_segments)."""
        if 0 in array.shape:
            return None  # no memory: it travels as what it is
        context, pointer = ctypes.c_void_p(), ctypes.c_uint64(array.pointer)
        self._call("cuPointerGetAttribute", ctypes.byref(context), _CONTEXT, pointer)
        self._call("cuCtxPushCurrent_v2", context)
        try:
            if array.stream is not None:
                self._call("cuStreamSynchronize", ctypes.c_void_p(array.stream))
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), pointer)
            handle = (ctypes.c_char * _HANDLE_BYTES)()
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(context))
        offset = array.pointer - base.value
        if offset % _ALIGNMENT != 0:
            raise invalid(name, f"one that starts at a multiple of {_ALIGNMENT} bytes of its allocation", offset)
        return DeviceMemory(bytes(handle), offset)


@functools.lru_cache(maxsize=None)
def driver() -> Driver:
    """This machine's. Unimplemented where there is none, or no GPU."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, errors.Internal) as error:
        raise errors.Unimplemented(f"cuda=\"ipc\": wanted the CUDA driver and a GPU, got {error}") from None


def choose(cuda: Any, transport: str) -> Optional[Driver]:
    """The driver for "ipc", None for "copy". InvalidArgument for others, and for "ipc" beside a transport that is not a message."""
    if cuda not in ("copy", "ipc"):
        raise invalid("cuda", "copy or ipc", repr(cuda))
    if cuda == "copy":
        return None
    if transport not in ("auto", "rpc"):
        raise invalid("cuda", f"copy with transport {transport}", "ipc, which goes by messages")
    return driver()
