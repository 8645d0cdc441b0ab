"""The session of a client: opened when it is first wanted, and again when it was lost. Threads: any; who wants the session while
it is being opened waits for that."""
from __future__ import annotations

import os
import threading
import time
from typing import Any, Callable, Optional

from moed import _futex, _messages, errors
from moed._session import Session

# Seconds after an attempt in vain: a server that starts again offers its session socket soon after it answers calls.
_PAUSE = 2.0

TRANSPORTS = ("auto", "rpc", "shared-memory", "ring")


class SessionKeeper:
    def __init__(self, transport: str, size: int, token: str, clock: Callable[[], float] = time.monotonic):
        """Unimplemented for a transport that this machine cannot have."""
        self._wanted = transport in ("shared-memory", "ring")
        if self._wanted and not _futex.available:
            raise errors.Unimplemented(f"transport {transport}: wanted Linux on x86-64, got another machine")
        self.never = transport == "rpc" or not _futex.available  # whether calls travel by messages only
        self._size, self._token, self._clock = size, token, clock
        self._lock = threading.Lock()
        self._session: Optional[Session] = None  # guarded by _lock
        self._not_before = float("-inf")         # for another attempt; guarded by _lock
        self._closed = False                     # guarded by _lock

    def get(self, hello: Callable[[], Any]) -> Optional[Session]:
        """The session; None when calls travel by messages. `hello` asks the server for a HelloResponse; its Unavailable and
        DeadlineExceeded are raised, since a call would fare no better, and where a session was demanded also why there is
        none."""
        if self.never:
            return None
        with self._lock:
            if self._closed:
                raise errors.FailedPrecondition("the client is closed")
            session = self._session
            if session is not None and session.owner == os.getpid():
                return session
            if not self._wanted and self._clock() < self._not_before:
                return None
            answer = self._ask(hello)
            try:
                self._session = self._open(answer)
            except errors.Error:
                if self._wanted:
                    raise
                self._not_before = self._clock() + _PAUSE
            return self._session

    def _ask(self, hello: Callable[[], Any]) -> Any:
        """The HelloResponse; one that offers nothing where the server refuses the Hello and a session is only a wish."""
        try:
            return hello()
        except errors.Error as error:
            if self._wanted or isinstance(error, (errors.Unavailable, errors.DeadlineExceeded)):
                raise
            return _messages.HelloResponse()

    def _open(self, hello: Any) -> Session:
        if not hello.HasField("shared_memory"):
            raise errors.Unimplemented("shared memory: the server offers none")
        shared = hello.shared_memory
        return Session(shared.socket, shared.server_id, shared.version, self._token, self._size)

    def lost(self, session: Session) -> None:
        """Drops `session` if it is over: the server may also be draining, or have refused that one call."""
        if session.alive():
            return
        session.close(lost=True)
        with self._lock:
            if self._session is session:
                self._session = None

    def leave(self, session: Session) -> None:
        """Has later calls use another session: a call that ended before its answer came leaves the server in possession of its
        tensors, for nobody knows how long. Calls under way keep this one, and with the last of them it ends."""
        with self._lock:
            if self._session is session:
                self._session = None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            session.close()
