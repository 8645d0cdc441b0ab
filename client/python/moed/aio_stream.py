"""Many forwards over one call, for asyncio: `AsyncClient.stream`. As moed.stream, with tasks of the client's event loop in the
place of threads: one reads answers and completes their futures."""
from __future__ import annotations

import asyncio
from typing import Any, Callable, Optional

import grpc
import grpc.aio

from moed import errors
from moed._call import Call, Result, make_call
from moed._items import GRACE, Items

__all__ = ["AsyncStream"]


class AsyncStream:
    """Made by AsyncClient.stream."""

    def __init__(self, client: Any, call: Any, timeout: Callable[[Any], Optional[float]], window: int):
        self._client, self._call, self._timeout = client, call, timeout
        self._items: Items[asyncio.Future] = Items()
        self._error: Optional[errors.Error] = None  # why nothing can be submitted any more
        self._room = asyncio.Semaphore(window)
        self._sending = asyncio.Lock()
        self._done_writing = False
        self._reader = asyncio.get_running_loop().create_task(self._read())

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(self, kind: Any, *unused: Any) -> None:
        await (self.close() if kind is None else self.cancel())

    async def submit(self, layer: int, hidden: Any, ids: Any = None, weights: Any = None, *, logits: Any = None, model: str = "",
                     dtype: Any = None, output_dtype: Any = None, out: Any = None, routed_only: bool = False,
                     return_routing: bool = False, per_slot: bool = False, request_id: str = "",
                     timeout: Optional[float] = None) -> "asyncio.Future[Result]":
        """As Stream.submit. Cancelling the future it returns ends the wait, not the request."""
        call = make_call(layer, hidden, ids, weights, logits=logits, model=model, dtype=dtype, output_dtype=output_dtype, out=out,
                         routed_only=routed_only, return_routing=return_routing, per_slot=per_slot, request_id=request_id)
        seconds = self._timeout(timeout)
        self._check()
        try:
            await asyncio.wait_for(self._room.acquire(), seconds)
        except asyncio.TimeoutError:
            raise errors.DeadlineExceeded(f"stream: the window is full, and nothing ended within {seconds:g} s") from None
        # grpc.aio cancels the whole call with a task that writes.
        return await asyncio.shield(asyncio.get_running_loop().create_task(self._send(call, seconds)))

    async def _send(self, call: Call, timeout: Optional[float]) -> asyncio.Future:
        """Sends a request that has its room in the window."""
        async with self._sending:
            try:
                self._check()
                future = self._new_future(timeout)
                request = self._items.add(call, future, timeout)
            except BaseException:
                self._room.release()
                raise
            try:
                await self._call.write(request)
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.UsageError):
                pass  # the stream is over: its reader tells the future why
            return future

    def _check(self) -> None:
        if self._error is not None:
            raise errors.again(self._error)

    def _new_future(self, timeout: Optional[float]) -> asyncio.Future:
        """One that is given up a second after the request's deadline."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if timeout is not None:
            late = errors.DeadlineExceeded("no answer on the stream within the request's timeout")
            timer = loop.call_later(timeout + GRACE, _complete, future, late)
            future.add_done_callback(lambda _: timer.cancel())
        return future

    async def close(self) -> None:
        """Takes no more requests and waits for the answers of all. May be called again."""
        self._error = self._error or errors.FailedPrecondition("the stream is closed")
        try:
            async with self._sending:
                if not self._reader.done() and not self._done_writing:
                    self._done_writing = True
                    await self._call.done_writing()
            pending = self._items.futures()
            if pending:
                await asyncio.wait(pending)
            if len(self._items) > 0:  # given up, and the server does not say anything
                self._call.cancel()
            await self._reader
        except BaseException:
            await self.cancel()
            raise

    async def cancel(self) -> None:
        """Ends the stream at once. Requests under way get Cancelled, and the server drops what did not run yet."""
        self._end(errors.Cancelled("the stream was cancelled"))
        self._call.cancel()
        await self._reader

    def _end(self, error: errors.Error) -> None:
        self._error = self._error or error
        for future in self._items.take_all():
            _complete(future, error)
            self._room.release()

    async def _read(self) -> None:
        """Reads answers to the stream's end."""
        error: errors.Error
        try:
            async for message in self._call:
                future, outcome = self._items.take(message)
                self._room.release()
                if outcome is not None:
                    _complete(future, outcome)
            error = errors.Unavailable("the server ended the stream")
        except grpc.aio.AioRpcError as failed:
            error = errors.from_rpc(failed, self._client.address)
        except errors.Error as failed:  # an answer that is none
            error = failed
            self._call.cancel()
        except asyncio.CancelledError:  # of the call, by cancel or by the client's close
            error = errors.Cancelled("the client was closed")
        self._end(error)
        # Whoever waits for room learns that there is no stream: each passes the room on to the next.
        self._room.release()


def _complete(future: asyncio.Future, outcome: Any) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
        future.exception()  # who does not wait for it is not told by the event loop either
    else:
        future.set_result(outcome)
