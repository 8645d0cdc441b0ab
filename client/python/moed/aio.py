"""The client for asyncio: the methods of `moed.Client`, awaited.

Messages travel by grpc.aio on the running loop. A session's ring has nothing to await, so "ring" and "shared-memory" run the
blocking client in threads of this client: cancelling such a task ends the wait at once, the call itself ends in its thread.
"auto" is "rpc" here. A client belongs to the event loop in which it was made.
"""
from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import time
from typing import Any, Callable, Optional, Sequence, Union

import grpc
import grpc.aio
import numpy as np

from moed import _connection, _reporting, _tensors, errors, reports
from moed._call import Call, Result, make_call
from moed._encoding import decode_response, encode_request
from moed._items import WINDOW, check_way, check_window
from moed.aio_stream import AsyncStream
from moed.client import Client

__all__ = ["AsyncClient"]

_THREADS = 64  # as many as a ring has slots


class AsyncClient:
    def __init__(self, address: str, *, token: Optional[str] = None, tls_ca: Optional[str] = None, tls_cert: Optional[str] = None,
                 tls_key: Optional[str] = None, transport: str = "auto", session_bytes: int = 32 << 20,
                 timeout: Optional[float] = 60.0, retries: int = 0):
        """As moed.Client. To be made in a running event loop."""
        self.address = _connection.check_address(address)
        self.transport = _connection.check_transport(transport)
        token = _connection.check_token(token)
        self._timeout = _connection.check_timeout(timeout)
        self._retries = _connection.check_count("retries", retries)
        _connection.check_count("session_bytes", session_bytes)
        self._metadata = _connection.metadata(token)
        self._closed = False
        self._blocking: Optional[Client] = None
        self._pool: Optional[concurrent.futures.ThreadPoolExecutor] = None
        secure = _connection.credentials(address, tls_ca, tls_cert, tls_key)
        if transport in ("ring", "shared-memory"):
            self._blocking = Client(address, token=token or None, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key,
                                    transport=transport, session_bytes=session_bytes, timeout=timeout, retries=retries)
            self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "moed")
        options = _connection.CHANNEL_OPTIONS
        self._channel = (grpc.aio.secure_channel(address, secure, options) if secure else
                         grpc.aio.insecure_channel(address, options))
        self._methods = {path: self._channel.unary_unary(path) for path in _connection.METHODS}

    async def close(self) -> None:
        """As Client.close."""
        self._closed = True
        if self._blocking is not None and self._pool is not None:
            self._blocking.close()
            self._pool.shutdown(wait=False)
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *unused: Any) -> None:
        await self.close()

    async def forward(self, layer: int, hidden: Any, ids: Any = None, weights: Any = None, *, logits: Any = None, model: str = "",
                      dtype: Any = None, output_dtype: Any = None, out: Any = None, routed_only: bool = False,
                      return_routing: bool = False, per_slot: bool = False, request_id: str = "",
                      timeout: Optional[float] = None) -> Result:
        """As Client.forward."""
        begin = time.perf_counter()
        self._check_open()
        if self._blocking is not None:
            return await self._in_thread(functools.partial(
                self._blocking.forward, layer, hidden, ids, weights, logits=logits, model=model, dtype=dtype,
                output_dtype=output_dtype, out=out, routed_only=routed_only, return_routing=return_routing, per_slot=per_slot,
                request_id=request_id, timeout=timeout))
        call = make_call(layer, hidden, ids, weights, logits=logits, model=model, dtype=dtype, output_dtype=output_dtype, out=out,
                         routed_only=routed_only, return_routing=return_routing, per_slot=per_slot, request_id=request_id)
        attempts = _connection.Attempts(self._retries, self._timeout_of(timeout), time.monotonic)
        while True:
            try:
                result = await self._forward(call, attempts.remaining())
                return result.took(time.perf_counter() - begin, call.waited)
            except errors.Error as error:
                delay = attempts.delay(error)
                if delay is None:
                    raise
            await asyncio.sleep(delay)
            begin = time.perf_counter()

    def stream(self, *, window: int = WINDOW, timeout: Optional[float] = None) -> AsyncStream:
        """As Client.stream: `async with`, and `await stream.submit(...)` gives a Future to await."""
        self._check_open()
        check_way(self.transport)
        default = self._timeout_of(timeout)
        return AsyncStream(self, self._channel.stream_stream(_connection.FORWARD_STREAM)(metadata=self._metadata),
                           lambda seconds: default if seconds is None else _connection.check_timeout(seconds),
                           check_window(window))

    async def allocate(self, shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> np.ndarray:
        """As Client.allocate."""
        self._check_open()
        if self._blocking is not None:
            return await self._in_thread(functools.partial(self._blocking.allocate, shape, dtype))
        return np.empty(_tensors.sizes_of(shape), _tensors.element(dtype))

    async def hello(self, *, timeout: Optional[float] = None) -> reports.Hello:
        """As Client.hello."""
        return await self._ask(_reporting.hello(), timeout)

    async def status(self, model: str = "", *, timeout: Optional[float] = None) -> reports.ServerStatus:
        """As Client.status."""
        return await self._ask(_reporting.status(model), timeout)

    async def explain(self, model: str = "", layer: Optional[int] = None, *,
                      timeout: Optional[float] = None) -> reports.Explanation:
        """As Client.explain."""
        return await self._ask(_reporting.explain(model, layer), timeout)

    async def self_check(self, model: str = "", layer: Optional[int] = None, *, tokens: int = 0, seed: int = 0,
                         timeout: Optional[float] = None) -> reports.SelfCheck:
        """As Client.self_check."""
        return await self._ask(_reporting.self_check(model, layer, tokens, seed), timeout)

    async def health(self, service: str = "", *, timeout: Optional[float] = None) -> reports.Health:
        """As Client.health."""
        try:
            return await self._ask(_reporting.health(service), timeout)
        except errors.NotFound:
            return _reporting.unknown_service(service)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.FailedPrecondition("the client is closed")

    def _timeout_of(self, timeout: Optional[float]) -> Optional[float]:
        return self._timeout if timeout is None else _connection.check_timeout(timeout)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _send(self, path: str, request: bytes, timeout: Optional[float]) -> bytes:
        self._check_open()
        try:
            return await self._methods[path](request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error, self.address) from None
        except asyncio.CancelledError:
            if self._closed:  # by close, not of the task
                raise errors.Cancelled("the client was closed") from None
            raise
        except grpc.aio.UsageError as error:
            raise errors.Cancelled(f"the client was closed: {error}") from None

    async def _ask(self, question: _reporting.Question, timeout: Optional[float]) -> Any:
        return question.read(await self._send(question.path, question.request, self._timeout_of(timeout)))

    async def _forward(self, call: Call, timeout: Optional[float]) -> Result:
        request, begin = encode_request(call), time.perf_counter()
        message = await self._send(_connection.FORWARD, request, timeout)
        call.waited = time.perf_counter() - begin
        answer, tensor, data = decode_response(message)
        call.check_answer(tensor, len(data))
        call.fill(data)
        return call.result_of_message(answer, "rpc")
