"""Requests and answers of Forward as bytes, with one copy of each tensor.

Protocol Buffers' own serialisation would copy a tensor into the message and again into the bytes. Here the small fields go
through it and the tensors are put between them; what is before a tensor depends on few things and is kept for the next call. An
answer of a few KiB is read by Protocol Buffers alone, which takes less time than to save the copy. grpcio copies what it is given
once more, and the answer as well; that is its own.
"""
from __future__ import annotations

import functools
from typing import Any, List, Optional, Tuple

import numpy as np

from moed import _messages, _tensors
from moed._call import Call
from moed.errors import Internal

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
# Numbers of fields in moe.proto.
_HIDDEN, _TOP_K, _LOGITS = 3, 4, 5     # of ForwardRequest
_IDS, _WEIGHTS = 1, 2                  # of TopK
_DATA = 3                              # of Tensor
_OUTPUT = 1                            # of ForwardResponse

_SMALL = 64 << 10                      # bytes of an answer
_KEPT = 4096                           # heads; a program has as many as layers by sizes of calls

Parts = List[Any]  # bytes and arrays, one after the other


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _length(number: int, length: int) -> bytes:
    """Tag and length of a field that holds bytes."""
    return _varint(number << 3 | _BYTES) + _varint(length)


@functools.lru_cache(maxsize=_KEPT)
def _head(model: str, layer: int, output_dtype: int, routed_only: bool, return_routing: bool, per_slot: bool) -> bytes:
    return _messages.ForwardRequest(model=model, layer=layer, output_dtype=output_dtype, routed_only=routed_only,
                                    return_routing=return_routing, per_slot=per_slot).SerializeToString()


@functools.lru_cache(maxsize=_KEPT)
def _before_data(number: int, wire: int, shape: Tuple[int, ...], size: int) -> bytes:
    """All that is before the `size` bytes of a tensor, which is the field `number`."""
    head = _messages.Tensor(dtype=wire, shape=shape).SerializeToString() + (_length(_DATA, size) if size > 0 else b"")
    return _length(number, len(head) + size) + head


@functools.lru_cache(maxsize=_KEPT)
def _before_top_k(shape: Tuple[int, ...], size: int) -> Tuple[bytes, bytes]:
    """What is before the ids, and between them and the weights; each has `size` bytes."""
    ids, weights = _before_data(_IDS, _tensors.I32, shape, size), _before_data(_WEIGHTS, _tensors.F32, shape, size)
    return _length(_TOP_K, len(ids) + len(weights) + 2 * size) + ids, weights


def _tensor(number: int, wire: int, array: np.ndarray) -> Parts:
    """A tensor of contiguous `array` in the field `number`."""
    head = _before_data(number, wire, array.shape, array.nbytes)
    return [head, array] if array.nbytes > 0 else [head]


def _hidden(call: Call, session: Optional[Tuple[bytes, int]]) -> Parts:
    raw = call.hidden.raw
    if call.hidden_memory is not None:
        place = {"cuda_ipc_handle": call.hidden_memory.handle, "offset": call.hidden_memory.offset}
        head = _messages.Tensor(dtype=call.hidden.wire, shape=raw.shape, device_memory=place).SerializeToString()
        return [_length(_HIDDEN, len(head)) + head]
    if session is None and call.hidden.scales is None:
        return _tensor(_HIDDEN, call.hidden.wire, np.ascontiguousarray(raw))
    tensor = _messages.Tensor(dtype=call.hidden.wire, shape=raw.shape)
    if call.hidden.scales is not None:
        tensor.scales = call.hidden.scales.tobytes()
    if session is not None:
        tensor.session_memory.key, tensor.session_memory.offset = session
    size = raw.nbytes if session is None else 0
    head = tensor.SerializeToString() + (_length(_DATA, size) if size > 0 else b"")
    return [_length(_HIDDEN, len(head) + size) + head] + ([np.ascontiguousarray(raw)] if size > 0 else [])


def encode_request(call: Call, hidden: Optional[Tuple[bytes, int]] = None, output: Optional[Tuple[bytes, int]] = None, *,
                   request_id: Optional[str] = None, timeout: Optional[float] = None) -> bytes:
    """A ForwardRequest. `hidden` and `output`: key and offset of the memory of a session where they lie, instead of in the
    messages. `request_id`: instead of the call's. `timeout`: seconds that the message itself has to tell; None: none."""
    name = call.request_id if request_id is None else request_id
    parts: Parts = [_head(call.model, call.layer, call.output_wire, call.routed_only, call.asks_routing, call.per_slot)]
    if name or output is not None or timeout is not None or call.output_memory is not None:
        more = _messages.ForwardRequest(request_id=name, timeout_us=0 if timeout is None else max(1, int(timeout * 1e6)))
        if output is not None:
            more.output_session_memory.key, more.output_session_memory.offset = output
        if call.output_memory is not None:
            more.output_memory.cuda_ipc_handle, more.output_memory.offset = call.output_memory
        parts.append(more.SerializeToString())
    if call.ids is not None and call.weights is not None:
        before_ids, before_weights = _before_top_k(call.ids.shape, call.ids.nbytes)
        parts += [before_ids, call.ids, before_weights, call.weights] if call.ids.nbytes > 0 else [before_ids, before_weights]
    elif call.logits is not None:
        parts += _tensor(_LOGITS, _tensors.F32, call.logits)
    return b"".join(parts + _hidden(call, hidden))


def _read_varint(data: memoryview, at: int) -> Tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError("a varint that does not end")


def _fields(data: memoryview):
    """(number, value of a bytes field or None, the field's own bytes) of each field in turn. ValueError or IndexError for what
    is none."""
    at = 0
    while at < len(data):
        begin = at
        tag, at = _read_varint(data, at)
        kind, value = tag & 7, None
        if kind == _VARINT:
            _, at = _read_varint(data, at)
        elif kind == _BYTES:
            length, at = _read_varint(data, at)
            value = data[at:at + length]
            at += length
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")
        if at > len(data):
            raise ValueError("a field that does not end")
        yield tag >> 3, value, data[begin:at]


def decode_response(message: bytes) -> Tuple[Any, Any, memoryview]:
    """A ForwardResponse: the message (a large one without its output), the output (without its data), and the data, which of a
    large one lies in `message`. Internal for bytes that are none."""
    rest, tensor_rest, output = [], [], memoryview(b"")
    try:
        if len(message) <= _SMALL:
            answer = _messages.ForwardResponse.FromString(message)
            return answer, answer.output, memoryview(answer.output.data)
        for number, value, whole in _fields(memoryview(message)):
            if number != _OUTPUT or value is None:
                rest.append(whole)
                continue
            for inner, data, inner_whole in _fields(value):
                if inner == _DATA and data is not None:
                    output = data
                else:
                    tensor_rest.append(inner_whole)
        return _messages.ForwardResponse.FromString(b"".join(rest)), _messages.Tensor.FromString(b"".join(tensor_rest)), output
    except (ValueError, IndexError, _messages.DecodeError) as error:
        raise Internal(f"answer: {len(message)} bytes are no ForwardResponse: {error}") from None
