"""What the blocking and the asyncio client have in common: addresses, credentials, options of the channel, and when to try
again."""
from __future__ import annotations

import math
import random
from typing import Any, Callable, List, Optional, Tuple

import grpc

from moed import errors
from moed._keeper import TRANSPORTS
from moed._tensors import invalid

FORWARD = "/moe.v1.Moe/Forward"
FORWARD_STREAM = "/moe.v1.Moe/ForwardStream"
HELLO = "/moe.v1.Moe/Hello"
STATUS = "/moe.v1.Moe/Status"
EXPLAIN = "/moe.v1.Moe/Explain"
SELF_CHECK = "/moe.v1.Moe/SelfCheck"
HEALTH = "/grpc.health.v1.Health/Check"
LOAD_MODEL = "/moe.v1.Admin/LoadModel"
SWAP_MODEL = "/moe.v1.Admin/SwapModel"
UNLOAD_MODEL = "/moe.v1.Admin/UnloadModel"
ROLLBACK_MODEL = "/moe.v1.Admin/RollbackModel"
METHODS = (FORWARD, HELLO, STATUS, EXPLAIN, SELF_CHECK, HEALTH, LOAD_MODEL, SWAP_MODEL, UNLOAD_MODEL, ROLLBACK_MODEL)
PROTOCOL = 1

MAX_MESSAGE = 256 << 20  # bytes; the server's default
_MAX_FILE = 1 << 20
_UNIX = "unix:"
_MAX_UNIX = 107  # bytes of a socket's path that the kernel takes

# A proxy that is meant for web pages must not see a serving stack's internal traffic. A server that starts again is found within
# two seconds, instead of gRPC's two minutes.
CHANNEL_OPTIONS = (("grpc.max_receive_message_length", MAX_MESSAGE), ("grpc.max_send_message_length", MAX_MESSAGE),
                   ("grpc.enable_http_proxy", 0), ("grpc.initial_reconnect_backoff_ms", 100),
                   ("grpc.max_reconnect_backoff_ms", 2000))


def check_address(address: Any) -> str:
    """InvalidArgument for what is not HOST:PORT, [IPV6]:PORT or unix:PATH."""
    def bad(got: str) -> errors.InvalidArgument:
        return invalid("address", "HOST:PORT, [IPV6]:PORT or unix:PATH", f"{address!r}: {got}")
    if not isinstance(address, str):
        raise bad(type(address).__name__)
    if address.startswith(_UNIX):
        length = len(address.encode()) - len(_UNIX)
        if not 0 < length <= _MAX_UNIX:
            raise bad(f"a path of {length} bytes, wanted 1 to {_MAX_UNIX}")
        return address
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host:
        raise bad("no host" if colon else "no port")
    if not bracketed and any(sign in host for sign in ":/[] "):
        raise bad(f"the host {host!r}")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise bad(f"the port {port!r}")
    return address


def check_token(token: Any) -> str:
    """The token to send; "" for None."""
    if token is None:
        return ""
    if isinstance(token, str) and 16 <= len(token) <= 255 and all(32 < ord(sign) < 127 for sign in token):
        return token
    # Not the text itself: a token is a secret, and errors go into logs.
    raise invalid("token", "16 to 255 printable ASCII characters without space",
                  "another text" if isinstance(token, str) else type(token).__name__)


def check_count(name: str, value: Any) -> int:
    """A whole number of 0 and more."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise invalid(name, "a whole number, 0 or more", repr(value))


def check_transport(transport: Any) -> str:
    if transport not in TRANSPORTS:
        raise invalid("transport", " or ".join(TRANSPORTS), repr(transport))
    return transport


def check_timeout(value: Any) -> Optional[float]:
    """Seconds; None and infinity: no deadline."""
    if value is None or value == math.inf:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
        return float(value)
    raise invalid("timeout", "seconds above 0, or math.inf for none", repr(value))


def _read_pem(name: str, path: Optional[str], kind: str) -> Optional[bytes]:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE + 1)
    except (OSError, TypeError) as error:
        raise errors.NotFound(f"{name}: wanted a readable file, got {path!r}: {error}") from None
    if len(text) > _MAX_FILE or b"-----BEGIN " not in text or f"{kind}-----".encode() not in text:
        raise invalid(name, f"a PEM file with a {kind}", repr(path))
    return text


def credentials(address: str, ca: Optional[str], cert: Optional[str], key: Optional[str]) -> Optional[grpc.ChannelCredentials]:
    """For TLS; None for clear text, when none of the three is given."""
    if ca is None and cert is None and key is None:
        return None
    if (cert is None) != (key is None):
        raise invalid("tls_cert and tls_key", "both or neither", "tls_cert alone" if key is None else "tls_key alone")
    if address.startswith(_UNIX):
        raise invalid("tls_ca", "HOST:PORT for TLS", repr(address))
    return grpc.ssl_channel_credentials(_read_pem("tls_ca", ca, "CERTIFICATE"), _read_pem("tls_key", key, "PRIVATE KEY"),
                                        _read_pem("tls_cert", cert, "CERTIFICATE"))


def metadata(token: str) -> Optional[List[Tuple[str, str]]]:
    return [("authorization", f"Bearer {token}")] if token else None


class Attempts:
    """When a forward that failed is tried again: forwards change nothing on the server, so trying again is safe, after
    UNAVAILABLE and RESOURCE_EXHAUSTED it can help. `more` further attempts, all within `timeout` seconds of the first; between
    them what the server said in its RetryInfo, else 50 ms, doubled each time up to 2 s, less up to half of it so that clients do
    not come back all at once."""

    def __init__(self, more: int, timeout: Optional[float], clock: Callable[[], float],
                 chance: Callable[[], float] = random.random):
        self._left, self._clock, self._chance, self._wait = more, clock, chance, 0.05
        self._end = math.inf if timeout is None else clock() + timeout

    def remaining(self) -> Optional[float]:
        """The timeout of the next attempt."""
        return None if self._end == math.inf else max(self._end - self._clock(), 1e-6)

    def delay(self, error: errors.Error) -> Optional[float]:
        """Seconds to wait before another attempt; None: there is none, `error` is the result."""
        if not isinstance(error, (errors.Unavailable, errors.ResourceExhausted)) or self._left <= 0:
            return None
        wait = self._wait * (1 - self._chance() / 2) if error.retry_after is None else error.retry_after
        if self._clock() + wait >= self._end:
            return None
        self._left, self._wait = self._left - 1, min(2 * self._wait, 2.0)
        return wait
