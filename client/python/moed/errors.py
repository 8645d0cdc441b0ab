"""What a call of a client can raise: one class for each of gRPC's codes, all of them `moed.Error`.

The server's refusals and what the client finds wrong before it calls look the same. `code` is a `grpc.StatusCode`, `details` the
text, which names the thing, what was wanted and what was got; `retry_after` is set, in seconds, where the server told when
another attempt makes sense (a google.rpc.RetryInfo in its status).
"""
from __future__ import annotations

from typing import Dict, Iterable, Optional, Tuple, Type, Union

import grpc

from moed import _messages

__all__ = [
    "Error", "AlreadyExists", "Cancelled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "PermissionDenied",
    "ResourceExhausted", "FailedPrecondition", "Unimplemented", "Internal", "Unavailable", "Unauthenticated",
]


class Error(Exception):
    """A call that failed."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, details: str, *, code: Optional[grpc.StatusCode] = None, retry_after: Optional[float] = None):
        super().__init__(details)
        if code is not None:
            self.code = code
        self.details = details
        self.retry_after = retry_after

    def __str__(self) -> str:
        when = "" if self.retry_after is None else f" (retry after {self.retry_after:.3f} s)"
        return f"{self.code.name}: {self.details}{when}"

    def __reduce__(self):
        return _rebuild, (self.code, self.details, self.retry_after)


class Cancelled(Error):
    """The call was cancelled, or the client was closed while it was under way."""
    code = grpc.StatusCode.CANCELLED


class Unknown(Error):
    code = grpc.StatusCode.UNKNOWN


class InvalidArgument(Error, ValueError):
    """A tensor, an id or an option is not what it has to be."""
    code = grpc.StatusCode.INVALID_ARGUMENT


class DeadlineExceeded(Error, TimeoutError):
    """No answer within the call's timeout."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED


class NotFound(Error, LookupError):
    """The server has no such model or layer; or a file of the client's own options cannot be read."""
    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(Error):
    """A model of this name is served already."""
    code = grpc.StatusCode.ALREADY_EXISTS


class PermissionDenied(Error):
    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(Error):
    """The server has no room for the call now, or the call is larger than a limit."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class FailedPrecondition(Error):
    """The client is closed, or client and server do not understand each other."""
    code = grpc.StatusCode.FAILED_PRECONDITION


class Unimplemented(Error):
    """What was asked for is not to be had from this server, or on this machine."""
    code = grpc.StatusCode.UNIMPLEMENTED


class Internal(Error):
    code = grpc.StatusCode.INTERNAL


class Unavailable(Error, ConnectionError):
    """The server cannot be reached, is loading or draining."""
    code = grpc.StatusCode.UNAVAILABLE


class Unauthenticated(Error):
    """The server wants a token that it knows."""
    code = grpc.StatusCode.UNAUTHENTICATED


_CLASSES: Dict[grpc.StatusCode, Type[Error]] = {kind.code: kind for kind in (
    AlreadyExists, Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, PermissionDenied, ResourceExhausted,
    FailedPrecondition, Unimplemented, Internal, Unavailable, Unauthenticated)}
_CODES: Dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"


def make_error(code: Union[int, grpc.StatusCode], details: str, retry_after: Optional[float] = None) -> Error:
    """The exception of a code, which may be gRPC's number of it; Error itself for a code without a class of its own."""
    if isinstance(code, int):
        code = _CODES.get(code, grpc.StatusCode.UNKNOWN)
    return _CLASSES.get(code, Error)(details, code=code, retry_after=retry_after)


def _rebuild(code: grpc.StatusCode, details: str, retry_after: Optional[float]) -> Error:
    return make_error(code, details, retry_after)


def again(error: Error) -> Error:
    """The same error to be raised once more, without the traceback of the last time."""
    return make_error(error.code, error.details, error.retry_after)


def retry_delay(metadata: Optional[Iterable[Tuple[str, Union[str, bytes]]]]) -> Optional[float]:
    """Seconds of the RetryInfo in a call's trailing metadata; None without one. What is no google.rpc.Status is ignored."""
    for key, value in metadata or ():
        if key != _DETAILS_KEY or not isinstance(value, bytes):
            continue
        try:
            for detail in _messages.Status.FromString(value).details:
                if detail.type_url.rpartition("/")[2] == "google.rpc.RetryInfo":
                    delay = _messages.RetryInfo.FromString(detail.value).retry_delay
                    return delay.seconds + delay.nanos / 1e9
        except _messages.DecodeError:
            return None
    return None


def from_rpc(error: grpc.RpcError, address: str) -> Error:
    """The exception of a failed RPC to the server at `address`, of grpc or of grpc.aio."""
    code, details = error.code(), error.details() or ""  # type: ignore[attr-defined]
    if code == grpc.StatusCode.UNAVAILABLE:
        details = f"server {address}: {details}"
    return make_error(code, details, retry_delay(error.trailing_metadata()))  # type: ignore[attr-defined]
