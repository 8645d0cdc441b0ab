"""One forward, from the arguments of a caller to its result, whatever way it travels.

A `Call` is checked when it is made: shapes and dtypes fit together, and arrays of routing are contiguous. Names and layers are
the server's to check. M is the number of token rows, H the hidden size, E the number of experts, k the slots per token.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple

import numpy as np

from moed import _cuda, _tensors
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
    waited for the answer beyond the server's own time. Both are 0 on a stream.

    `weights_id` tells whose weights answered: the number that the first 16 digits of ModelHello.weights_hash are, whatever
    restarts and changes there were. 0 for a model without weights."""
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
    weights_id: int = 0

    def took(self, seconds: float, waited: float) -> "Result":
        """Sets the times of a call that took `seconds`, of which `waited` were spent waiting for the answer."""
        self.client_us, self.transport_us = (seconds - waited) * 1e6, max(0.0, waited * 1e6 - self.timing.total_us)
        return self


@dataclass(slots=True)
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
    device: Any = None             # of torch, where the hidden states were and the results go
    hidden_memory: Optional[_cuda.DeviceMemory] = None  # where they are by CUDA IPC; the arrays of that name have only a shape then
    output_memory: Optional[_cuda.DeviceMemory] = None
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

    @property
    def on_device(self) -> bool:
        return self.hidden_memory is not None or self.output_memory is not None

    def fill(self, data: Any) -> None:
        """Copies the output's elements from a buffer of as many."""
        if self.output_memory is not None:
            return
        flat = np.frombuffer(data, self.output.dtype) if self.output.size else self.output.reshape(-1)
        self.output[...] = flat.reshape(self.output.shape)

    def check_answer(self, tensor: Any, data_bytes: int) -> None:
        """Internal unless the answer's output, whose message is `tensor`, is of the shape and dtype asked for."""
        wanted = self.output.nbytes if self.output_memory is None else 0
        if data_bytes == wanted and tensor.dtype == self.output_wire and tensor.shape == list(self.output.shape):
            return
        raise Internal(f"output: wanted dtype {self.output_wire}, shape {list(self.output.shape)} and {wanted} bytes, got "
                       f"{tensor.dtype}, {list(tensor.shape)} and {data_bytes}")

    def result(self, answer: Any, ids: Optional[np.ndarray], weights: Optional[np.ndarray], timing: Any,
               transport: str) -> Result:
        """`answer` and `timing` have the fields of the messages of these names."""
        output = self.out
        if output is None:
            output = self._to_device(_tensors.give_back(self.output, self.output_wire, self.hidden))
        elif self.output_memory is None and type(output) is not np.ndarray and _tensors.device_of(output) is not None:
            output.copy_(_tensors.give_back(self.output, self.output_wire, _tensors.View(self.output_wire, self.output, "torch")))
        if self.return_routing and self.per_slot:
            ids, weights = self.ids, self.weights
        times = Timing(timing.receive_us, timing.queue_us, timing.compute_us, timing.send_us, timing.batch_rows)
        if ids is not None:
            ids, weights = (self._to_device(_tensors.like_torch(one, self.hidden)) for one in (ids, weights))
        return Result(output, answer.backend, answer.scheme, answer.generation, times, ids, weights, self.request_id, transport,
                      weights_id=answer.weights_id)

    def _to_device(self, tensor: Any) -> Any:
        return tensor if self.device is None or tensor is None else tensor.to(self.device)

    def result_of_message(self, answer: Any, transport: str) -> Result:
        """The same from a ForwardResponse, with the routing that it has."""
        if not self.return_routing or self.per_slot:
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
              out: Any, routed_only: bool, return_routing: bool, request_id: str, per_slot: bool = False,
              cuda: Optional[_cuda.Driver] = None) -> Call:
    """The call of these arguments, as Client.forward describes them; with `cuda` its tensors on a GPU are named by CUDA IPC.
    InvalidArgument when they contradict each other."""
    view, hidden_memory = _read_hidden(hidden, dtype, cuda)
    rows, cols = view.raw.shape
    if ids is not None or weights is not None or logits is not None:
        ids, weights, logits = _read_routing(rows, ids, weights, logits)
    if per_slot:
        if ids is None:
            raise invalid("per_slot", "ids and weights with it", "another routing")
        rows *= ids.shape[1]
    wire = _output_wire(view, output_dtype, out)
    device = None
    if view.kind == "torch":
        device = _tensors.device_of(hidden.codes if isinstance(hidden, QuantizedHidden) else hidden)
    if hidden_memory is not None and out is None and device is not None:
        out = _cuda.new_tensor(hidden, rows, cols, wire)
    output, output_memory = _read_out(out, rows, cols, wire, cuda)
    if per_slot and (hidden_memory is not None or output_memory is not None):
        raise invalid("per_slot", "tensors of the host, or copied", "CUDA IPC")
    return Call(_text("model", model, None), _number("layer", layer), view, ids, weights, logits, wire, out, output,
                bool(routed_only), bool(return_routing), _text("request_id", request_id, _MAX_TEXT), bool(per_slot), device,
                hidden_memory, output_memory)


def _read_hidden(hidden: Any, dtype: Any, cuda: Optional[_cuda.Driver]) -> Tuple[_tensors.View, Optional[_cuda.DeviceMemory]]:
    if isinstance(hidden, QuantizedHidden):
        if dtype is not None:
            raise invalid("dtype", "none beside a QuantizedHidden, which has its own", repr(dtype))
        return hidden.view(), None
    if cuda is None or not _cuda.is_on_device(hidden):
        return _tensors.read_hidden(hidden, dtype), None
    array = _cuda.read("hidden", hidden)
    wire = _tensors.wire_dtype("dtype", array.dtype if dtype is None else dtype)
    if wire != _tensors.wire_dtype("dtype", array.dtype) or (dtype is None and array.needs_saying):
        raise invalid("hidden", "the dtype that dtype says (uint16 with dtype=\"bf16\")", array.dtype)
    view = _tensors.View(wire, _tensors.stand_in(*array.shape, wire), "torch" if _tensors.is_torch(hidden) else "numpy")
    return view, cuda.share("hidden", array)


def _read_out(out: Any, rows: int, cols: int, wire: int,
              cuda: Optional[_cuda.Driver]) -> Tuple[np.ndarray, Optional[_cuda.DeviceMemory]]:
    """The output's memory on the host, and its place on a GPU where the server writes it there."""
    if out is None:
        return _tensors.empty(rows, cols, wire), None
    if type(out) is np.ndarray or not _cuda.is_on_device(out) or (cuda is None and not _tensors.is_torch(out)):
        return _tensors.read_output(out, rows, cols, wire), None
    array = _cuda.read("out", out)
    if _tensors.wire_dtype("out", array.dtype) != wire or array.shape != (rows, cols):
        raise invalid("out", f"{_tensors.name_of(wire)} of shape [{rows}, {cols}]", f"{array.dtype} of shape {list(array.shape)}")
    if cuda is None:  # copied there when the answer is here
        return _tensors.empty(rows, cols, wire), None
    memory = cuda.share("out", array)
    return (_tensors.empty if memory is None else _tensors.stand_in)(rows, cols, wire), memory


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
    if type(out) is not np.ndarray and _cuda.is_on_device(out):
        return _tensors.wire_dtype("out", _cuda.read("out", out).dtype)
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
