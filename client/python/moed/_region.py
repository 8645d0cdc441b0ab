"""Memory that this process shares with a server: a sealed memfd, mapped, and parts of it that are given out.

Threads: any. Invariants: the mapping lives as long as the Region or any Part or array of it, so that an array never points to
memory that is gone; parts start at multiples of 64 bytes and do not overlap.
"""
from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import threading
from bisect import insort
from collections import deque
from typing import Any, Deque, List, Optional, Tuple

import numpy as np

ALIGNMENT = 64
PAGE = 4096
# Linux's numbers, which fcntl of older builds of Python lacks.
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)
_SEALS = getattr(fcntl, "F_SEAL_SEAL", 1) | getattr(fcntl, "F_SEAL_SHRINK", 2) | getattr(fcntl, "F_SEAL_GROW", 4)


def round_up(count: int, unit: int) -> int:
    return (count + unit - 1) // unit * unit


class Part:
    """Bytes of a region, given back when nothing refers to the object any more, an array over it included."""

    def __init__(self, region: "Region", offset: int, size: int):
        self.region, self.offset, self.size = region, offset, size

    @property
    def __array_interface__(self) -> dict:
        return {"version": 3, "data": (self.region.address + self.offset, False), "shape": (self.size,), "typestr": "|u1"}

    def array(self, shape: Tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The part's first bytes as an array, which keeps the part."""
        count = math.prod(shape) * dtype.itemsize
        return np.asarray(self)[:count].view(dtype).reshape(shape)

    def __del__(self) -> None:
        # Garbage is collected at any point of any thread, also of one that holds the region's lock: so only a note is left here.
        self.region.returned.append(self.offset)


class Region:
    def __init__(self, size: int, reserved: int):
        """`size` bytes, a multiple of the page, of which the first `reserved` are never given out. OSError when they are not to
        be had. The descriptor is `fd`, until `close_descriptor`."""
        self.fd = os.memfd_create("moed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            os.posix_fallocate(self.fd, 0, size)  # pages that are there cannot be missing when the server touches them
            fcntl.fcntl(self.fd, _ADD_SEALS, _SEALS)
            self.map = mmap.mmap(self.fd, size)
        except BaseException:
            self.close_descriptor()
            raise
        self._anchor = (ctypes.c_char * size).from_buffer(self.map)  # keeps the mapping where it is
        self.address, self.size = ctypes.addressof(self._anchor), size
        self.returned: Deque[int] = deque()
        self._lock = threading.Lock()
        self._free: List[Tuple[int, int]] = [(reserved, size - reserved)]  # (offset, bytes), ascending, no two of them adjacent
        self._used: dict = {}  # bytes by offset

    def close_descriptor(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def allocate(self, size: int) -> Optional[Part]:
        """None when that much in one piece is not free now."""
        whole = round_up(max(size, 1), ALIGNMENT)
        with self._lock:
            self._take_back()
            for at, (offset, free) in enumerate(self._free):
                if free >= whole:
                    self._free[at:at + 1] = [(offset + whole, free - whole)] if free > whole else []
                    self._used[offset] = whole
                    return Part(self, offset, size)
        return None

    def _take_back(self) -> None:
        taken = False
        while self.returned:
            offset = self.returned.popleft()
            insort(self._free, (offset, self._used.pop(offset)))
            taken = True
        if not taken:
            return
        joined: List[Tuple[int, int]] = []
        for offset, size in self._free:
            if joined and sum(joined[-1]) == offset:
                joined[-1] = (joined[-1][0], joined[-1][1] + size)
            else:
                joined.append((offset, size))
        self._free = joined

    def offset_of(self, array: np.ndarray) -> Optional[int]:
        """Where a contiguous array of this region lies; None for other memory, and where the server would not take it."""
        offset = array.__array_interface__["data"][0] - self.address
        if offset < 0 or offset + array.nbytes > self.size or offset % ALIGNMENT or not array.flags.c_contiguous:
            return None
        return offset

    def words(self) -> Any:
        """The region as words of 32 bits; an access to one is one load or store."""
        return memoryview(self.map).cast("I")
