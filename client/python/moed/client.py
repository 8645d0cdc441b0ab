"""The blocking client.

Threads: any number may use one client at once. A client that is closed, by `close`, by `with`, by garbage collection or at the
end of the program, ends its session; the server forgets it at once. After a fork the child's first call opens a session of its
own, but grpcio itself must not be used on both sides of a fork: make the client in the child.
"""
from __future__ import annotations

import math
import time
import weakref
from typing import Any, Optional, Sequence, Union

import grpc
import numpy as np

from moed import _connection, _cuda, _messages, _reporting, _tensors, errors, reports
from moed._call import Call, Result, make_call
from moed._encoding import decode_response, encode_request
from moed._items import WINDOW, check_way, check_window
from moed._keeper import SessionKeeper
from moed._session import Session
from moed._shared_call import SharedCall, fits_ring
from moed.stream import Stream

__all__ = ["Client"]

# What may have come from this side of the connection, while the server still works on the call.
_UNANSWERED = (errors.Cancelled, errors.DeadlineExceeded, errors.Unavailable)


def _close(channel: grpc.Channel, sessions: SessionKeeper) -> None:
    sessions.close()
    channel.close()


class Client:
    def __init__(self, address: str, *, token: Optional[str] = None, tls_ca: Optional[str] = None, tls_cert: Optional[str] = None,
                 tls_key: Optional[str] = None, transport: str = "auto", session_bytes: int = 32 << 20,
                 timeout: Optional[float] = 60.0, retries: int = 0, cuda: str = "copy"):
        """A client of the server at `address`: HOST:PORT, [IPV6]:PORT or unix:PATH. The connection is made by the first call,
        and again after it was lost.

        token          sent with every call, also in clear text
        tls_ca, tls_cert, tls_key
                       paths of PEM files: who signed the server's certificate (None: those that grpcio trusts), the certificate
                       chain to show to a server that asks for one, with its key. With one of them the connection is TLS.
        transport      "auto": a ring in shared memory where the server offers sessions and is on this host, else gRPC messages,
                       also for single calls that do not fit. "rpc": messages. "shared-memory": tensors in a session, the rest in
                       a message. "ring": no messages. The last two raise where they cannot be had.
        session_bytes  memory for tensors in a session, allocated when it opens, at the first forward or allocate
        timeout        seconds of a call, where the call does not say otherwise; None: no deadline
        retries        further attempts of a forward after UNAVAILABLE and RESOURCE_EXHAUSTED, within its timeout

        cuda           what becomes of tensors on a GPU. "copy": those of torch are copied through the host, others are refused.
                       "ipc": hidden states and outputs (of torch, or with __cuda_array_interface__) are named to a server of this
                       host with the same GPU, which reads and writes them there; all in messages

        InvalidArgument for what is none of this, NotFound for files that cannot be read, Unimplemented for a transport that this
        machine cannot have.
        """
        self.address = _connection.check_address(address)
        self.transport = _connection.check_transport(transport)
        self._token = _connection.check_token(token)
        self._timeout = _connection.check_timeout(timeout)
        self._retries = _connection.check_count("retries", retries)
        self._metadata = _connection.metadata(self._token)
        size = _connection.check_count("session_bytes", session_bytes)
        self._cuda = _cuda.choose(cuda, transport)
        secure = _connection.credentials(address, tls_ca, tls_cert, tls_key)
        self._sessions = SessionKeeper(transport, size, self._token)
        options = _connection.CHANNEL_OPTIONS
        channel = grpc.secure_channel(address, secure, options) if secure else grpc.insecure_channel(address, options)
        self._methods = {path: channel.unary_unary(path) for path in _connection.METHODS}
        self._stream_method = channel.stream_stream(_connection.FORWARD_STREAM)
        self._finalizer = weakref.finalize(self, _close, channel, self._sessions)

    def close(self) -> None:
        """Ends session and connection. Calls under way get Cancelled, later ones FailedPrecondition. Arrays of `allocate` stay
        usable as arrays. May be called again."""
        self._finalizer()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *unused: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<moed.Client of {self.address}, transport {self.transport}{'' if self._finalizer.alive else ', closed'}>"

    def forward(self, layer: int, hidden: Any, ids: Any = None, weights: Any = None, *, logits: Any = None, model: str = "",
                dtype: Any = None, output_dtype: Any = None, out: Any = None, routed_only: bool = False,
                return_routing: bool = False, per_slot: bool = False, request_id: str = "",
                timeout: Optional[float] = None) -> Result:
        """One forward of layer `layer`.

        hidden         [M, H] of float32, float16 or bfloat16: a numpy array or a torch tensor of the host. bfloat16 in numpy is
                       ml_dtypes.bfloat16, or uint16 with dtype="bf16". float32 means float32 arithmetic, the others allow bf16
                       products. Or a moed.QuantizedHidden, in one byte an element.
        ids, weights   [M, k]: experts of each row, -1 is none, and their final weights, neither normalised nor scaled by the
                       server
        logits         [M, E]: of the router, after its bias; the checkpoint's rule applies. Without ids and logits its own gate
                       routes.
        model          may be "" when the server has one model
        output_dtype   "f32", "bf16" or "f16", or a dtype of that name; default: that of `out`, else of hidden, bf16 where that
                       has one byte
        out            where the output goes: [M, H], contiguous; the result's output is this object
        routed_only    leaves out the shared expert
        return_routing sends back the ids and weights that were used
        per_slot       the output is [M * k, H]: row t * k + j is what slot j of row t adds to the sum, its weight included; zeros
                       for id -1. Takes ids and weights; the shared expert is left out
        request_id     at most 128 bytes, appears in the server's log
        timeout        seconds; None: the client's; math.inf: no deadline

        Nothing is copied that lies in arrays of `allocate`, when the client has a session; everything else is copied once. After
        DeadlineExceeded or Ctrl-C the server may still use such arrays of that call: let go of them instead of using them again,
        their memory comes back when it is through. Raises the classes of moed.errors.
        """
        begin = time.perf_counter()
        self._check_open()
        call = make_call(layer, hidden, ids, weights, logits=logits, model=model, dtype=dtype, output_dtype=output_dtype, out=out,
                         routed_only=routed_only, return_routing=return_routing, per_slot=per_slot, request_id=request_id,
                         cuda=self._cuda)
        if self._retries == 0:
            result = self._forward(call, self._timeout_of(timeout))
            return result.took(time.perf_counter() - begin, call.waited)
        attempts = _connection.Attempts(self._retries, self._timeout_of(timeout), time.monotonic)
        while True:
            try:
                result = self._forward(call, attempts.remaining())
                return result.took(time.perf_counter() - begin, call.waited)
            except errors.Error as error:
                delay = attempts.delay(error)
                if delay is None:
                    raise
            time.sleep(delay)
            begin = time.perf_counter()

    def stream(self, *, window: int = WINDOW, timeout: Optional[float] = None) -> Stream:
        """Many forwards over one call, as a context manager: `submit` sends one and returns a Future. Answers come as they
        finish; up to `window` are under way, of which the server takes 32 at a time. Everything travels in messages, whatever
        the client's transport, but "ring" and "shared-memory" clients are refused. `timeout`: of each request that says no other;
        None: the client's. There are no retries. The end of the `with` waits for all answers; an exception in it cancels them.
        """
        self._check_open()
        check_way(self.transport)
        default = self._timeout_of(timeout)
        return Stream(self, lambda requests: self._stream_method(requests, metadata=self._metadata),
                      lambda seconds: default if seconds is None else _connection.check_timeout(seconds), check_window(window))

    def allocate(self, shape: Union[int, Sequence[int]], dtype: Any = np.float32) -> np.ndarray:
        """A new array, not zeroed, in the session's memory where the client has one and that has room, else in ordinary memory:
        what lies there is not copied on its way to the server. Its memory is given back when nothing refers to it. dtype as in
        numpy, or "bf16", which is ml_dtypes.bfloat16 where that is installed, else uint16."""
        self._check_open()
        sizes, element = _tensors.sizes_of(shape), _tensors.element(dtype)
        size = math.prod(sizes) * element.itemsize
        session = None if element.hasobject else self._session(self._timeout)
        part = None if session is None else session.region.allocate(size)
        return np.empty(sizes, element) if part is None else part.array(sizes, element)

    def hello(self, *, timeout: Optional[float] = None) -> reports.Hello:
        """What the server is and offers. FailedPrecondition when it speaks another version of the contract."""
        return self._ask(_reporting.hello(), timeout)

    def status(self, model: str = "", *, timeout: Optional[float] = None) -> reports.ServerStatus:
        """State of one model, or of all."""
        return self._ask(_reporting.status(model), timeout)

    def explain(self, model: str = "", layer: Optional[int] = None, *, timeout: Optional[float] = None) -> reports.Explanation:
        """What runs each layer, or one of them, and why not the others."""
        return self._ask(_reporting.explain(model, layer), timeout)

    def self_check(self, model: str = "", layer: Optional[int] = None, *, tokens: int = 0, seed: int = 0,
                   timeout: Optional[float] = None) -> reports.SelfCheck:
        """Random tokens through each layer, or one of them, compared with the server's reference. `tokens` rows per layer, 1 to
        64, 0 for the server's default. It reads weights again: allow minutes for a large model."""
        return self._ask(_reporting.self_check(model, layer, tokens, seed), timeout)

    def health(self, service: str = "", *, timeout: Optional[float] = None) -> reports.Health:
        """Health of "" (the server), "MODEL" or "MODEL/L"; a service that the server does not have is no error."""
        try:
            return self._ask(_reporting.health(service), timeout)
        except errors.NotFound:
            return _reporting.unknown_service(service)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise errors.FailedPrecondition("the client is closed")

    def _timeout_of(self, timeout: Optional[float]) -> Optional[float]:
        return self._timeout if timeout is None else _connection.check_timeout(timeout)

    def _send(self, path: str, request: bytes, timeout: Optional[float]) -> bytes:
        self._check_open()
        try:
            # On Ctrl-C grpcio cancels the call before it lets the exception through.
            return self._methods[path](request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise errors.from_rpc(error, self.address) from None
        except ValueError as error:  # what grpcio says of a channel that was closed meanwhile
            raise errors.Cancelled(f"the client was closed: {error}") from None

    def _ask(self, question: _reporting.Question, timeout: Optional[float]) -> Any:
        return question.read(self._send(question.path, question.request, self._timeout_of(timeout)))

    def _session(self, timeout: Optional[float]) -> Optional[Session]:
        return self._sessions.get(lambda: _messages.HelloResponse.FromString(
            self._send(_connection.HELLO, _reporting.hello_request(), timeout)))

    def _forward(self, call: Call, timeout: Optional[float]) -> Result:
        session = None if self._sessions.never or call.on_device else self._session(timeout)
        if session is not None and fits_ring(call):
            shared = SharedCall(session, call)
            result = self._forward_shared(session, shared, timeout) if shared.place() else None
            if result is not None:
                return result
            if self.transport != "auto":
                raise errors.ResourceExhausted("session: wanted free memory and a free slot for this call, got none; the session "
                                               f"has {session.region.size} bytes")
        request, begin = encode_request(call), time.perf_counter()
        message = self._send(_connection.FORWARD, request, timeout)
        call.waited = time.perf_counter() - begin
        answer, tensor, data = decode_response(message)
        call.check_answer(tensor, len(data))
        call.fill(data)
        return call.result_of_message(answer, "rpc")

    def _forward_shared(self, session: Session, shared: SharedCall, timeout: Optional[float]) -> Optional[Result]:
        """By the ring, or with a message where that is demanded. None when the ring has no free slot."""
        try:
            if self.transport != "shared-memory":
                return shared.run_ring(timeout)
            answer, tensor, _ = decode_response(self._send_shared(session, shared, timeout))
            return shared.result_of_message(answer, tensor)
        except errors.Unavailable as error:
            self._sessions.lost(session)
            if error.details.startswith("server "):
                raise
            raise errors.Unavailable(f"server {self.address}: {error.details}", retry_after=error.retry_after) from None
        except errors.NotFound:
            self._sessions.lost(session)  # what the server says of a session that it does not know any more
            raise

    def _send_shared(self, session: Session, shared: SharedCall, timeout: Optional[float]) -> bytes:
        request, begin = shared.request(), time.perf_counter()
        try:
            message = self._send(_connection.FORWARD, request, timeout)
            shared.call.waited = time.perf_counter() - begin
            return message
        except BaseException as error:
            if not isinstance(error, errors.Error) or isinstance(error, _UNANSWERED):
                self._sessions.leave(session)
            raise
