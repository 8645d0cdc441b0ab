"""What is under way on one ForwardStream: which request an answer belongs to, and what it comes to. Without transport and
without threads, so that the blocking and the asyncio stream do the same."""
from __future__ import annotations

from typing import Any, Dict, Generic, List, NamedTuple, Optional, Tuple, TypeVar, Union

from moed import _connection, errors
from moed._call import Call, Result
from moed._encoding import decode_response, encode_request
from moed._tensors import invalid

Future = TypeVar("Future")

WINDOW = 32   # as many the server has under way of a stream
GRACE = 1.0   # seconds after a request's deadline in which the server tells that it passed


class Item(NamedTuple):
    call: Call
    future: Any


def check_way(transport: str) -> None:
    """Streams are messages: InvalidArgument for a client that demanded another way."""
    if transport not in ("auto", "rpc"):
        raise invalid("transport", "auto or rpc for a stream", repr(transport))


def check_window(window: Any) -> int:
    if _connection.check_count("window", window) < 1:
        raise invalid("window", "1 or more", window)
    return window


def _error(status: Any) -> errors.Error:
    """Of a CallStatus."""
    return errors.make_error(status.code, status.message, status.retry_us / 1e6 if status.retry_us > 0 else None)


class Items(Generic[Future]):
    def __init__(self) -> None:
        self._items: Dict[str, Item] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._items)

    def add(self, call: Call, future: Future, timeout: Optional[float]) -> bytes:
        """The request as a message, with an id that tells it among those under way. InvalidArgument for an id of the caller's that
        is under way already, ResourceExhausted for a request that no message can be: it would end the stream."""
        name = call.request_id
        while not name or (not call.request_id and name in self._items):
            self._count += 1
            name = f"#{self._count}"
        if name in self._items:
            raise invalid("request_id", "one that is not under way on this stream", repr(name))
        request = encode_request(call, request_id=name, timeout=timeout)
        if len(request) > _connection.MAX_MESSAGE:
            raise errors.ResourceExhausted(f"request: wanted a message of at most {_connection.MAX_MESSAGE} bytes, got "
                                           f"{len(request)}")
        self._items[name] = Item(call, future)
        return request

    def futures(self) -> List[Future]:
        return [item.future for item in self._items.values()]

    def take(self, message: bytes) -> Tuple[Future, Union[Result, errors.Error, None]]:
        """The future of the request that `message` answers, and the answer: None when the future is done, nobody waits any more.
        The error of an answer that belongs to no request is raised: the stream is of no more use."""
        answer, tensor, data = decode_response(message)
        failed = answer.HasField("status")
        item = self._items.pop(answer.request_id, None)
        if item is None:
            raise (_error(answer.status) if failed else
                   errors.Internal(f"stream: an answer to no request, request_id {answer.request_id!r}"))
        if item.future.done():
            return item.future, None
        if failed:
            return item.future, _error(answer.status)
        try:
            item.call.check_answer(tensor, len(data))
            item.call.fill(data)
            return item.future, item.call.result_of_message(answer, "stream")
        except errors.Error as error:
            return item.future, error

    def take_all(self) -> List[Future]:
        """The futures of all that is under way, which is nothing then."""
        futures = self.futures()
        self._items.clear()
        return futures
