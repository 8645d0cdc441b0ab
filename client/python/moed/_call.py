"""One forward, from the arguments of a caller to its result, whatever way it travels.

A `Call` is checked when it is made: shapes and dtypes fit together, and arrays of routing are contiguous. Names and layers are
the server's to check. M is the number of token rows, H the hidden size, E the number of experts, k the slots per token.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np

from moed import _tensors
from moed._tensors import invalid
from moed.errors import Internal
from moed.quantized import QuantizedHidden

_MAX_TEXT = 128  # bytes of a request_id, as the server takes it


@dataclass
class Timing:
    """The server's own durations in microseconds; they need no synchronised clocks. `batch_rows`: rows of all calls that were
    computed together with this one, its own included."""
    receive_us: int = 0
    queue_us: int = 0
    compute_us: int = 0
    send_us: int = 0
    batch_rows: int = 0

    @property
    def total_us(self) -> int:
        return self.receive_us + self.queue_us + self.compute_us + self.send_us


@dataclass
class Result:
    """`output` [M, H], with per_slot [M * k, H], is a numpy array or a torch tensor, as the hidden states were, or the caller's
    `out`. `ids` and `weights` [M, k] are None unless return_routing was set. `transport` is the way that the call took: "rpc",
    "shared-memory", "ring" or "stream".

    By this client's clock, in microseconds: `client_us` is its own work (checking, copying, encoding), `transport_us` what it
    waited for the answer beyond the server's own time. Both are 0 on a stream."""
    output: Any
    backend: str
    scheme: str
    generation: int
    timing: Timing
    ids: Any = None
    weights: Any = None
    request_id: str = ""
    transport: str = "rpc"
    client_us: float = 0.0
    transport_us: float = 0.0

    def took(self, seconds: float, waited: float) -> "Result":
        """Sets the times of a call that took `seconds`, of which `waited` were spent waiting for the answer."""
        self.client_us, self.transport_us = (seconds - waited) * 1e6, max(0.0, waited * 1e6 - self.timing.total_us)
        return self


@dataclass
class Call:
    model: str
    layer: int
    hidden: _tensors.View
    ids: Optional[np.ndarray]      # [M, k] int32
    weights: Optional[np.ndarray]  # [M, k] float32
    logits: Optional[np.ndarray]   # [M, E] float32
    output_wire: int
    out: Any                       # the caller's; None: there is none
    output: np.ndarray             # [M, H] or [M * k, H], its memory or new
    routed_only: bool
    return_routing: bool
    request_id: str
    per_slot: bool = False
    waited: float = 0.0            # seconds for the answer

    @property
    def asks_routing(self) -> bool:
        """Whether the server is to send the routing back. Per slot it is the caller's own."""
        return self.return_routing and not self.per_slot

    @property
    def rows(self) -> int:
        return self.hidden.raw.shape[0]

    @property
    def cols(self) -> int:
        return self.hidden.raw.shape[1]

    def fill(self, data: Any) -> None:
        """Copies the output's elements from a buffer of as many."""
        flat = np.frombuffer(data, self.output.dtype) if self.output.size else self.output.reshape(-1)
        self.output[...] = flat.reshape(self.output.shape)

    def check_answer(self, tensor: Any, data_bytes: int) -> None:
        """Internal unless the answer's output, whose message is `tensor`, is of the shape and dtype asked for."""
        if tensor.dtype == self.output_wire and tuple(tensor.shape) == self.output.shape and data_bytes == self.output.nbytes:
            return
        raise Internal(f"output: wanted dtype {self.output_wire}, shape {list(self.output.shape)} and {self.output.nbytes} "
                       f"bytes, got {tensor.dtype}, {list(tensor.shape)} and {data_bytes}")

    def result(self, answer: Any, ids: Optional[np.ndarray], weights: Optional[np.ndarray], timing: Any,
               transport: str) -> Result:
        """`answer` and `timing` have the fields of the messages of these names."""
        output = self.out if self.out is not None else _tensors.give_back(self.output, self.output_wire, self.hidden)
        if self.return_routing and self.per_slot:
            ids, weights = self.ids, self.weights
        times = Timing(timing.receive_us, timing.queue_us, timing.compute_us, timing.send_us, timing.batch_rows)
        return Result(output, answer.backend, answer.scheme, answer.generation, times, _tensors.like_torch(ids, self.hidden),
                      _tensors.like_torch(weights, self.hidden), self.request_id, transport)

    def result_of_message(self, answer: Any, transport: str) -> Result:
        """The same from a ForwardResponse, with the routing that it has."""
        if not self.asks_routing:
            return self.result(answer, None, None, answer.timing, transport)
        routing = answer.routing
        ids = np.frombuffer(routing.ids.data, np.int32).copy()
        weights = np.frombuffer(routing.weights.data, np.float32).copy()
        shape = tuple(routing.ids.shape)
        if len(shape) != 2 or shape[0] != self.rows or ids.size != shape[0] * shape[1] or weights.size != ids.size:
            raise Internal(f"routing: wanted [{self.rows}, k] ids and weights, got {list(shape)} with {ids.size} and "
                           f"{weights.size}")
        return self.result(answer, ids.reshape(shape), weights.reshape(shape), answer.timing, transport)


def make_call(layer: int, hidden: Any, ids: Any, weights: Any, *, logits: Any, model: str, dtype: Any, output_dtype: Any,
              out: Any, routed_only: bool, return_routing: bool, request_id: str, per_slot: bool = False) -> Call:
    """The call of these arguments, as Client.forward describes them. InvalidArgument when they contradict each other."""
    view = _read_hidden(hidden, dtype)
    rows, cols = view.raw.shape
    ids, weights, logits = _read_routing(rows, ids, weights, logits)
    if per_slot:
        if ids is None:
            raise invalid("per_slot", "ids and weights with it", "another routing")
        rows *= ids.shape[1]
    wire = _output_wire(view, output_dtype, out)
    output = _tensors.empty(rows, cols, wire) if out is None else _tensors.read_output(out, rows, cols, wire)
    return Call(_text("model", model, None), _number("layer", layer), view, ids, weights, logits, wire, out, output,
                bool(routed_only), bool(return_routing), _text("request_id", request_id, _MAX_TEXT), bool(per_slot))


def _read_hidden(hidden: Any, dtype: Any) -> _tensors.View:
    if not isinstance(hidden, QuantizedHidden):
        return _tensors.read_hidden(hidden, dtype)
    if dtype is not None:
        raise invalid("dtype", "none beside a QuantizedHidden, which has its own", repr(dtype))
    return hidden.view()


def _read_routing(rows: int, ids: Any, weights: Any, logits: Any) -> Tuple[Any, Any, Any]:
    """The three as contiguous arrays of int32 and float32; None for what there is not."""
    if (ids is None) != (weights is None):
        raise invalid("ids and weights", "both or neither", "ids alone" if weights is None else "weights alone")
    if ids is not None and logits is not None:
        raise invalid("logits", "none beside ids", "both")
    if ids is not None:
        ids, weights = _tensors.read_ids(ids), _tensors.read_floats("weights", weights, "[M, k]")
        if ids.shape != weights.shape or ids.shape[0] != rows:
            raise invalid("ids and weights", f"[{rows}, k] both", f"{list(ids.shape)} and {list(weights.shape)}")
    if logits is not None:
        logits = _tensors.read_floats("logits", logits, "[M, E]")
        if logits.shape[0] != rows:
            raise invalid("logits", f"{rows} rows, as hidden has", logits.shape[0])
    return ids, weights, logits


def _output_wire(view: _tensors.View, output_dtype: Any, out: Any) -> int:
    if output_dtype is not None:
        return _tensors.wire_dtype("output_dtype", output_dtype)
    if out is None:
        return view.wire if view.scales is None else _tensors.BF16
    return _tensors.dtype_of_output(out)


def _number(name: str, value: Any) -> int:
    if type(value) is int and 0 <= value < 2**31:  # as nearly always
        return value
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and -2**31 <= value < 2**31:
        return int(value)
    raise invalid(name, "a number of 32 bits", repr(value))


def _text(name: str, value: Any, limit: Optional[int]) -> str:
    if value == "":
        return ""
    if not isinstance(value, str):
        raise invalid(name, "a text", type(value).__name__)
    if limit is not None and len(value.encode("utf-8", "surrogatepass")) > limit:
        raise invalid(name, f"at most {limit} bytes", len(value.encode("utf-8", "surrogatepass")))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, "a text that UTF-8 can say", repr(value)) from None
    return value
