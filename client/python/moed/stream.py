"""Many forwards over one call: `Client.stream`.

Threads: any number may submit. One thread of the stream reads answers and completes their futures, in the order in which the
server finished. At most `window` requests are under way; then `submit` waits. An error of one request is that future's alone; a
stream that breaks completes all of them with its error, and `submit` raises it from then on.
"""
from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from typing import Any, Callable, Iterator, Optional

import grpc

from moed import errors
from moed._call import Call, Result, make_call
from moed._items import GRACE, Items

__all__ = ["Answer", "Stream"]


class Answer(concurrent.futures.Future):
    """What a request of a stream comes to: a Future whose `result()` is a moed.Result, or raises the request's error. It cannot
    be cancelled alone."""

    def __init__(self, timeout: Optional[float]):
        super().__init__()
        self._end = None if timeout is None else time.monotonic() + timeout
        self.set_running_or_notify_cancel()

    def result(self, timeout: Optional[float] = None) -> Result:
        """The answer. Without `timeout` (then a TimeoutError as of any Future) it waits until a second after the request's own
        deadline, and raises DeadlineExceeded."""
        if timeout is not None or self._end is None:
            return super().result(timeout)
        try:
            return super().result(max(0.0, self._end + GRACE - time.monotonic()))
        except concurrent.futures.TimeoutError as error:
            if isinstance(error, errors.Error):
                raise
            self.complete(errors.DeadlineExceeded("no answer on the stream within the request's timeout"))
            return super().result(0)

    def left(self) -> Optional[float]:
        """Seconds until nobody waits any more; None: no deadline."""
        return None if self._end is None else self._end + GRACE - time.monotonic()

    def complete(self, outcome: Any) -> None:
        """With a Result or an exception; nothing when it is complete."""
        try:
            if isinstance(outcome, BaseException):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)
        except concurrent.futures.InvalidStateError:
            pass


class Stream:
    """Made by Client.stream."""

    def __init__(self, client: Any, start: Callable[[Iterator[bytes]], Any], timeout: Callable[[Any], Optional[float]],
                 window: int):
        self._client = client  # whose end would close the channel
        self._timeout, self._window = timeout, window
        self._items: Items[Answer] = Items()    # guarded by _changed, as what follows
        self._changed = threading.Condition()
        self._error: Optional[errors.Error] = None  # why nothing can be submitted any more
        self._requests: "queue.SimpleQueue[Optional[bytes]]" = queue.SimpleQueue()
        self._call = start(iter(self._requests.get, None))
        self._reader = threading.Thread(target=self._read, name="moed-stream", daemon=True)
        self._reader.start()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: Any, *unused: Any) -> None:
        self.close() if kind is None else self.cancel()

    def submit(self, layer: int, hidden: Any, ids: Any = None, weights: Any = None, *, logits: Any = None, model: str = "",
               dtype: Any = None, output_dtype: Any = None, out: Any = None, routed_only: bool = False,
               return_routing: bool = False, per_slot: bool = False, request_id: str = "",
               timeout: Optional[float] = None) -> Answer:
        """Sends a forward, described at Client.forward, and returns at once with its Answer; where `window` requests are under
        way it waits for one of them, within `timeout`. Arrays are copied before it returns; `out` is written until the answer
        came. A request_id must not be under way already. Not to be called in a callback of an Answer, which would wait for
        itself."""
        call = make_call(layer, hidden, ids, weights, logits=logits, model=model, dtype=dtype, output_dtype=output_dtype, out=out,
                         routed_only=routed_only, return_routing=return_routing, per_slot=per_slot, request_id=request_id)
        seconds = self._timeout(timeout)
        with self._changed:
            if not self._changed.wait_for(lambda: self._error is not None or len(self._items) < self._window, seconds):
                raise errors.DeadlineExceeded(f"stream: {self._window} requests are under way, and none ended within {seconds:g} s")
            return self._send(call, seconds)

    def _send(self, call: Call, timeout: Optional[float]) -> Answer:
        if self._error is not None:
            raise errors.again(self._error)
        answer = Answer(timeout)
        self._requests.put(self._items.add(call, answer, timeout))
        return answer

    def close(self) -> None:
        """Takes no more requests and waits for the answers of all. May be called again, but not in a callback of an Answer."""
        self._end(errors.FailedPrecondition("the stream is closed"), over=False)
        self._requests.put(None)
        try:
            with self._changed:
                while len(self._items) > 0 and self._changed.wait(self._longest()):
                    pass
                late = len(self._items) > 0
            self.cancel() if late else self._join()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise

    def cancel(self) -> None:
        """Ends the stream at once. Requests under way get Cancelled, and the server drops what did not run yet."""
        self._end(errors.Cancelled("the stream was cancelled"), over=True)
        self._call.cancel()
        self._requests.put(None)
        self._join()

    def _join(self) -> None:
        if threading.current_thread() is not self._reader:  # as in a callback
            self._reader.join()

    def _longest(self) -> Optional[float]:
        """Seconds until the last of the requests under way is given up."""
        lefts = [answer.left() for answer in self._items.futures()]
        return None if None in lefts else max(0.0, max(left for left in lefts if left is not None))

    def _end(self, error: errors.Error, over: bool) -> None:
        """Nothing is submitted any more; when it is `over`, nothing is answered either."""
        with self._changed:
            self._error = self._error or error
            answers = self._items.take_all() if over else []
            self._changed.notify_all()
        for answer in answers:
            answer.complete(error)

    def _read(self) -> None:
        """Reads answers to the stream's end."""
        error: errors.Error
        try:
            for message in self._call:
                with self._changed:
                    answer, outcome = self._items.take(message)
                    self._changed.notify_all()
                if outcome is not None:
                    answer.complete(outcome)
            error = errors.Unavailable("the server ended the stream")
        except grpc.RpcError as failed:
            error = errors.from_rpc(failed, self._client.address)
        except errors.Error as failed:  # an answer that is none
            error = failed
            self._call.cancel()
        self._end(error, over=True)
        self._requests.put(None)
