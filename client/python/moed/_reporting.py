"""The calls that ask a server about itself, and those that change what it serves: for each its method, its request, and what its
answer becomes. Without any transport, so that the blocking and the asyncio client say the same."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

from moed import _connection, _messages, reports
from moed._tensors import invalid


class Question(NamedTuple):
    path: str
    request: bytes
    read: Callable[[bytes], Any]


def _reader(message: Any, kind: Any) -> Callable[[bytes], Any]:
    return lambda answer: reports.from_wire(kind, message.FromString(answer))


def hello_request() -> bytes:
    return _messages.HelloRequest(protocol=_connection.PROTOCOL, client="moed Python client").SerializeToString()


def hello() -> Question:
    return Question(_connection.HELLO, hello_request(), _reader(_messages.HelloResponse, reports.Hello))


def status(model: str) -> Question:
    request = _fill(_messages.StatusRequest, model=model)
    return Question(_connection.STATUS, request, _reader(_messages.StatusResponse, reports.ServerStatus))


def explain(model: str, layer: Optional[int]) -> Question:
    request = _fill(_messages.ExplainRequest, model=model, layer=layer)
    return Question(_connection.EXPLAIN, request, _reader(_messages.ExplainResponse, reports.Explanation))


def self_check(model: str, layer: Optional[int], tokens: int, seed: int) -> Question:
    request = _fill(_messages.SelfCheckRequest, model=model, layer=layer, tokens=tokens, seed=seed)
    return Question(_connection.SELF_CHECK, request, _reader(_messages.SelfCheckResponse, reports.SelfCheck))


def load(model: str, path: str) -> Question:
    return _change(_connection.LOAD_MODEL, _fill(_messages.LoadModelRequest, model=model, path=path))


def swap(model: str, path: str, keep_previous: bool) -> Question:
    return _change(_connection.SWAP_MODEL, _fill(_messages.SwapModelRequest, model=model, path=path, keep_previous=keep_previous))


def unload(model: str) -> Question:
    return _change(_connection.UNLOAD_MODEL, _fill(_messages.UnloadModelRequest, model=model))


def rollback(model: str) -> Question:
    return _change(_connection.ROLLBACK_MODEL, _fill(_messages.RollbackModelRequest, model=model))


def _change(path: str, request: bytes) -> Question:
    return Question(path, request, _reader(_messages.StatusResponse, reports.ServerStatus))


def health(service: str) -> Question:
    """NotFound of this one is no error: `unknown_service`."""
    def read(answer: bytes) -> reports.Health:
        status = _messages.HealthCheckResponse.FromString(answer).status
        return reports.Health(service, _messages.HEALTH_STATES.get(status, "UNKNOWN"))
    return Question(_connection.HEALTH, _fill(_messages.HealthCheckRequest, service=service), read)


def unknown_service(service: str) -> reports.Health:
    return reports.Health(service, "SERVICE_UNKNOWN")


def _fill(message: Any, **fields: Any) -> bytes:
    """A request's bytes; InvalidArgument for values that its fields cannot have."""
    try:
        return message(**fields).SerializeToString()
    except (TypeError, ValueError) as error:
        raise invalid("arguments", f"those of {message.DESCRIPTOR.name}", f"{fields}: {error}") from None
