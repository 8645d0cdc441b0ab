"""Sleeping on, and waking sleepers of, a word of memory that two processes share; and when that is sound in Python.

The ring wants three orders of its words (docs/transports.md). Python has no atomics, so each comes from somewhere else:

* Release (a submission's fields before `posted`) and acquire (`done` before the completion's fields): x86-64 keeps stores in
  order among stores and loads among loads, and the interpreter, for which each access is a call of its own, does not swap them.
  A word of four aligned bytes is read and written as one.
* Client posts, then must know whether the server sleeps: a store before a load, which even x86-64 swaps. So `server_waits` is
  not looked at: each post is followed by FUTEX_WAKE. The kernel has a full barrier there before it looks for sleepers, and one
  in FUTEX_WAIT between the sleeper's entry in its list and the comparison of the word: either the waker finds the sleeper or the
  sleeper sees the new word.
* Client sets `waits`, then must look at `done` once more: the same pair of store and load. That last look is FUTEX_WAIT's own
  comparison, which the barrier that was just named puts after everything that the thread stored before. The server has a fence
  between its store of `done` and its look at `waits`, so it sees the flag or the kernel sees the new `done`.

On other processors plain loads and stores do not keep the first order, so there is no ring: `available` is false and calls go by
RPC. ctypes gives up the interpreter's lock during the call, so other threads run while one sleeps. A signal ends the sleep, and
Python then runs its handler: Ctrl-C works.
"""
from __future__ import annotations

import ctypes
import os
import platform
import sys
from typing import Any

_SYS_FUTEX = 202  # of x86-64
_WAIT, _WAKE = 0, 1  # not the private kind: the word belongs to two processes
_INT_MAX = 2**31 - 1


class _TimeSpec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _is_sound() -> bool:
    return (sys.platform == "linux" and platform.machine() == "x86_64" and ctypes.sizeof(ctypes.c_void_p) == 8 and
            hasattr(os, "memfd_create"))


available = _is_sound()
_syscall: Any = None
if available:
    _syscall = ctypes.CDLL(None, use_errno=True).syscall
    _syscall.restype = ctypes.c_long
    _syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p,
                         ctypes.c_long]


def wait(address: int, value: int, seconds: float) -> None:
    """Sleeps until the word at `address` is woken, `seconds` passed or a signal came; not at all when it is not `value` any
    more."""
    limit = _TimeSpec(int(seconds), int(seconds % 1 * 1e9))
    signed = value - 2**32 if value >= 2**31 else value
    _syscall(_SYS_FUTEX, address, _WAIT, signed, ctypes.addressof(limit), None, 0)


def wake(address: int) -> None:
    """Wakes all who sleep on the word at `address`, after everything that this thread wrote before."""
    _syscall(_SYS_FUTEX, address, _WAKE, _INT_MAX, None, None, 0)
