"""A session of shared memory with a server of the same host, and the ring in it: proto/ring/layout.h and session.h, in Python.

Threads: any number at once; a call has a slot of the ring for itself. Slots are chosen and posted under a lock, waits are
without it. A call that gave up (its time passed, Ctrl-C) leaves its slot and its memory to the server until that has answered.
The session is over when the server closes the connection, or `close` did: every wait ends within 0.1 s then.
How the words of the ring are ordered is told in _futex.py.
"""
from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from typing import Any, List, NamedTuple, Optional, Tuple

from moed import _futex, errors
from moed._region import PAGE, Region, round_up

MAGIC, VERSION = 0x64656F6D, 1
SLOTS = 64
_HEADER_BYTES, _SLOT_BYTES = 192 + 4 * 256, 2048
_POSTED, _QUEUE = 64, 192              # offsets in the header
_DONE, _WAITS, _COMPLETION = 512, 516, 576  # offsets in a slot
_SUBMISSION = struct.Struct("<IIiIII12Q136s136sQ112x")
_COMPLETION_FORM = struct.Struct("<iIQ5q64s256s504sQq")
_OPEN_REQUEST = struct.Struct("<IIQQII256s")
_OPEN_ANSWER = struct.Struct("<IIiI16s16s464s")
MAX_TEXT = 135  # bytes of a model's name or a request_id

_SPIN = 20e-6      # seconds of looking before a call sleeps: less than in C++, since it holds the interpreter's lock meanwhile
_IN_VAIN, _EACH = 4, 7  # after so many looks in vain in a row only each so many-th call looks
_LOOK = 0.1        # how often a waiting call looks whether the server is there
_ANSWER_TIME = 10  # for the server to open a session, which may mean to pin it


class Submission(NamedTuple):
    """What the ring's struct of this name has, without sequence and timeout."""
    flags: int
    layer: int
    routing: int
    hidden_dtype: int
    output_dtype: int
    rows: int
    cols: int
    top_k: int
    num_experts: int
    hidden_offset: int
    output_offset: int
    ids_offset: int
    weights_offset: int
    logits_offset: int
    used_ids_offset: int
    used_weights_offset: int
    model: bytes
    request_id: bytes
    scales_offset: int


class Completion(NamedTuple):
    code: int
    top_k: int
    generation: int
    receive_us: int
    queue_us: int
    compute_us: int
    send_us: int
    batch_rows: int
    backend: str
    scheme: str
    message: str
    weights_id: int
    retry_us: int


class _Use:
    """A slot: `sequence` of its last submission, `keep` what must live until that was answered."""

    def __init__(self) -> None:
        self.busy = self.left = False
        self.sequence = 0
        self.keep: Any = None


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode("utf-8", "replace")


class Session:
    def __init__(self, path: str, server_id: bytes, version: int, token: str, size: int):
        """Opens a session with `size` bytes for tensors. Unavailable when nobody answers at `path`, or another server than
        `server_id`; Unauthenticated when `token` ("": none) cannot be shown to whoever has the socket; else the server's
        refusal."""
        if version != VERSION:
            raise errors.FailedPrecondition(f"shared memory: this client speaks version {VERSION}, the server {version}")
        self.owner = os.getpid()
        self._closed = self._lost = False
        ring_bytes = round_up(_HEADER_BYTES + SLOTS * _SLOT_BYTES, PAGE)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connect(path, token)
            self.region = self._make_region(ring_bytes + round_up(size, PAGE), ring_bytes)
            self._words = self.region.words()
            self._words[0], self._words[1], self._words[2] = MAGIC, VERSION, SLOTS
            self.key = self._shake_hands(path, server_id, token)
        except BaseException:
            self._socket.close()
            raise
        finally:
            if hasattr(self, "region"):
                self.region.close_descriptor()
        self._lock = threading.Lock()
        self._uses = [_Use() for _ in range(SLOTS)]  # guarded by _lock
        self._any_left = False                       # whether a use is left; guarded by _lock
        # Looks in vain since one that saw its answer; a hint that threads may change at once.
        self._in_vain = 0 if len(os.sched_getaffinity(0)) > 1 else -1

    def _connect(self, path: str, token: str) -> None:
        try:
            self._socket.connect(path)
        except (OSError, ValueError) as error:
            raise errors.Unavailable(f"session socket {path}: {error}") from None
        if not token:
            return
        # Anybody can make a socket at a path that a server elsewhere told, so a token goes only to a process of this user or of
        # root.
        _, uid, _ = struct.unpack("3i", self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        if uid not in (0, os.geteuid()):
            raise errors.Unauthenticated(f"session socket {path}: wanted a server of user {os.geteuid()} or root to show the "
                                         f"token to, got one of user {uid}")

    @staticmethod
    def _make_region(size: int, reserved: int) -> Region:
        try:
            return Region(size, reserved)
        except OSError as error:
            raise errors.ResourceExhausted(f"shared memory of {size} bytes: {error}") from None

    def _shake_hands(self, path: str, server_id: bytes, token: str) -> bytes:
        request = _OPEN_REQUEST.pack(MAGIC, VERSION, self.region.size, 0, SLOTS, 0, token.encode())
        self._socket.settimeout(_ANSWER_TIME)
        try:
            socket.send_fds(self._socket, [request], [self.region.fd])
            packet = self._socket.recv(_OPEN_ANSWER.size)
        except OSError as error:
            raise errors.Unavailable(f"session socket {path}: {error}") from None
        if not packet:
            raise errors.Unavailable(f"session socket {path}: the server closed the connection")
        if len(packet) != _OPEN_ANSWER.size:
            raise errors.FailedPrecondition("session: the answer is none of this protocol")
        magic, version, code, _, key, answered_by, message = _OPEN_ANSWER.unpack(packet)
        if magic != MAGIC or version != VERSION:
            raise errors.FailedPrecondition("session: the answer is none of this protocol")
        if answered_by != server_id:
            raise errors.Unavailable("session: another server answers at the socket")
        if code != 0:
            raise errors.make_error(code, _text(message))
        return key

    def close(self, lost: bool = False) -> None:
        """Ends the session on both sides. A call under way gets Cancelled, or Unavailable when the session was `lost`, that is
        ended by the server; arrays of the session stay as they are. May be called again."""
        self._lost = self._lost or (lost and not self._closed)
        self._closed = True
        if self.owner != os.getpid():
            self._socket.close()  # a child of fork must not end its parent's session
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()

    def alive(self) -> bool:
        """Whether the server still holds its end. The server says nothing on an open session: whatever there is to read is its
        end."""
        if self._closed or self.owner != os.getpid():
            return False
        poll = select.poll()
        try:
            poll.register(self._socket.fileno(), select.POLLIN)
            return not poll.poll(0)
        except (OSError, ValueError):
            return False  # closed meanwhile

    def run(self, submission: Submission, timeout: Optional[float], keep: Any) -> Optional[Completion]:
        """Runs one submission and returns its completion, which may say that the call failed. None when no slot is free.
        `keep` is what must live until the server has answered. DeadlineExceeded when `timeout` (None: none) passed, Unavailable
        when the session ended, Cancelled when it was closed."""
        use: List[Tuple[int, int]] = []  # slot and sequence, once posted: what an interrupt at any point has to leave
        try:
            if not self._post(submission, timeout, keep, use):
                return None
            _futex.wake(self.region.address + _POSTED)
            self._wait(*use[0], timeout)
            return self._take(*use[0])
        except BaseException:
            if use:
                self._leave(*use[0])
            raise

    def _done(self, slot: int) -> int:
        return self._words[(_HEADER_BYTES + slot * _SLOT_BYTES + _DONE) // 4]

    def reap(self) -> None:
        """Takes back slots, and what they kept, whose callers left and whose answers came since."""
        if not self._any_left:
            return
        with self._lock:
            self._any_left = False
            for slot, use in enumerate(self._uses):
                if use.left and self._done(slot) == use.sequence:
                    use.busy, use.left, use.keep = False, False, None
                self._any_left = self._any_left or use.left

    def _free_slot(self) -> Optional[int]:
        """The lowest slot that nobody uses."""
        return next((slot for slot, use in enumerate(self._uses) if not use.busy), None)

    def _post(self, submission: Submission, timeout: Optional[float], keep: Any, out: List[Tuple[int, int]]) -> bool:
        """Takes a free slot and posts it; `out` gets slot and sequence. False when no slot is free."""
        with self._lock:
            slot = self._free_slot()
            if slot is None:
                return False
            use, posted = self._uses[slot], self._words[_POSTED // 4]
            try:
                use.busy, use.left, use.keep = True, False, keep
                use.sequence = use.sequence % 0xFFFFFFFF + 1
                self._write(slot, use.sequence, submission, timeout)
                self._words[_QUEUE // 4 + posted % SLOTS] = slot
                self._words[_POSTED // 4] = (posted + 1) % 2**32
                out.append((slot, use.sequence))
                return True
            except BaseException:  # Ctrl-C may come between any two of these
                out.clear()
                use.busy = use.left = self._words[_POSTED // 4] != posted
                self._any_left = self._any_left or use.left
                use.keep = keep if use.busy else None
                raise

    def _write(self, slot: int, sequence: int, submission: Submission, timeout: Optional[float]) -> None:
        (flags, layer, routing, hidden_dtype, output_dtype, *numbers, model, request_id, scales_offset) = submission
        microseconds = 0 if timeout is None else max(1, int(timeout * 1e6))
        _SUBMISSION.pack_into(self.region.map, _HEADER_BYTES + slot * _SLOT_BYTES, sequence, flags, layer, routing, hidden_dtype,
                              output_dtype, *numbers, microseconds, model, request_id, scales_offset)

    def _wait(self, slot: int, sequence: int, timeout: Optional[float]) -> None:
        begin = time.monotonic()
        word = _HEADER_BYTES + slot * _SLOT_BYTES + _DONE
        if slot == 0 and self._looks(sequence):  # who holds the lowest slot: the only call where there is one at a time
            words, at, end = self._words, word // 4, begin + _SPIN
            while words[at] != sequence:
                if time.monotonic() >= end:
                    self._in_vain += 1
                    break
            else:
                self._in_vain = 0
                return
        while True:
            seen = self._words[word // 4]
            if seen == sequence:
                return
            limit = _LOOK
            if timeout is not None:
                limit = min(limit, begin + timeout - time.monotonic())
                if limit <= 0:
                    raise errors.DeadlineExceeded(f"no answer within {timeout:g} s")
            self._words[(word - _DONE + _WAITS) // 4] = 1
            _futex.wait(self.region.address + word, seen, limit)
            if self._words[word // 4] == seen and not self.alive():
                if self._closed and not self._lost:
                    raise errors.Cancelled("the client was closed")
                raise errors.Unavailable("the server ended the session")

    def _looks(self, sequence: int) -> bool:
        """Whether to look for the answer before sleeping: not while answers take longer than a look anyway, be it that they are
        large or that the server waits for this processor."""
        return 0 <= self._in_vain < _IN_VAIN or (self._in_vain >= _IN_VAIN and sequence % _EACH == 0)

    def _take(self, slot: int, sequence: int) -> Completion:
        at = _HEADER_BYTES + slot * _SLOT_BYTES + _COMPLETION
        *numbers, backend, scheme, message, weights_id, retry_us = _COMPLETION_FORM.unpack_from(self.region.map, at)
        with self._lock:
            use = self._uses[slot]
            use.busy, use.keep = False, None
        return Completion._make((*numbers, _text(backend), _text(scheme), _text(message), weights_id, retry_us))

    def _leave(self, slot: int, sequence: int) -> None:
        """Nobody waits for this use of the slot any more; nothing when it is over."""
        with self._lock:
            use = self._uses[slot]
            if use.busy and use.sequence == sequence:
                use.left = self._any_left = True
