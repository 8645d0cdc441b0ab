"""Requests and answers of Forward as bytes, with one copy of each tensor.

Protocol Buffers' own serialisation would copy a tensor into the message and again into the bytes. Here the small fields go
through it and the tensors are put between them. grpcio copies what it is given once more, and the answer as well; that is its
own.
"""
from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

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

Parts = List[Any]  # bytes and arrays, one after the other


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _size(parts: Sequence[Any]) -> int:
    return sum(part.nbytes if isinstance(part, np.ndarray) else len(part) for part in parts)


def _field(number: int, parts: Parts) -> Parts:
    """A field that holds `parts`, with its tag and length."""
    return [_varint(number << 3 | _BYTES) + _varint(_size(parts)), *parts]


def _tensor(wire: int, shape: Sequence[int], data: Optional[np.ndarray], session: Optional[Tuple[bytes, int]] = None,
            scales: Optional[np.ndarray] = None) -> Parts:
    tensor = _messages.Tensor(dtype=wire, shape=shape)
    if scales is not None:
        tensor.scales = scales.tobytes()
    if session is not None:
        tensor.session_memory.key, tensor.session_memory.offset = session
    head = tensor.SerializeToString()
    return [head] if data is None or data.nbytes == 0 else [head, *_field(_DATA, [data])]


def encode_request(call: Call, hidden: Optional[Tuple[bytes, int]] = None, output: Optional[Tuple[bytes, int]] = None, *,
                   request_id: Optional[str] = None, timeout: Optional[float] = None) -> bytes:
    """A ForwardRequest. `hidden` and `output`: key and offset of the memory of a session where they lie, instead of in the
    messages. `request_id`: instead of the call's. `timeout`: seconds that the message itself has to tell; None: none."""
    request = _messages.ForwardRequest(model=call.model, layer=call.layer, output_dtype=call.output_wire,
                                       routed_only=call.routed_only, return_routing=call.asks_routing,
                                       request_id=call.request_id if request_id is None else request_id,
                                       per_slot=call.per_slot, timeout_us=0 if timeout is None else max(1, int(timeout * 1e6)))
    if output is not None:
        request.output_session_memory.key, request.output_session_memory.offset = output
    parts: Parts = [request.SerializeToString()]
    if call.ids is not None and call.weights is not None:
        parts += _field(_TOP_K, _field(_IDS, _tensor(_tensors.I32, call.ids.shape, call.ids)) +
                        _field(_WEIGHTS, _tensor(_tensors.F32, call.weights.shape, call.weights)))
    elif call.logits is not None:
        parts += _field(_LOGITS, _tensor(_tensors.F32, call.logits.shape, call.logits))
    raw = call.hidden.raw
    parts += _field(_HIDDEN, _tensor(call.hidden.wire, raw.shape, np.ascontiguousarray(raw) if hidden is None else None, hidden,
                                     call.hidden.scales))
    return b"".join(parts)


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
    """A ForwardResponse: the message without its output, the output without its data, and the data, which lies in `message`.
    Internal for bytes that are none."""
    rest, tensor_rest, output = [], [], memoryview(b"")
    try:
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
