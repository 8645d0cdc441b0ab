"""What a server tells about itself, as plain dataclasses whose `repr` is a table, in a notebook too.

Fields have the names and the meaning of moe.proto, where each is described; states are texts ("ready", "f32"). All are made from
the messages by one function, `from_wire`.
"""
from __future__ import annotations

import dataclasses
import functools
import html
from dataclasses import dataclass
from typing import (Annotated, Any, ClassVar, Dict, List, Optional, Sequence, Type, TypeVar, Union, cast, get_args,
                    get_origin, get_type_hints)

from moed import _messages

__all__ = ["BackendVerdict", "Explanation", "Health", "Hello", "HostStatus", "LayerExplanation", "LayerStatus", "ModelHello",
           "ModelStatus", "QueueStatus", "Reason", "SelfCheck", "SelfCheckRow", "ServerStatus", "SharedMemory"]

T = TypeVar("T")


def _state(number: int) -> str:
    return _messages.LAYER_STATES.get(number, f"unknown state {number}")


def _dtype(number: int) -> str:
    return _messages.DTYPES.get(number, f"unknown dtype {number}")


# Enumerations of the messages as texts.
State = Annotated[str, _state]
DTypeName = Annotated[str, _dtype]


@functools.lru_cache(maxsize=None)
def _hints(kind: Any) -> Dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _convert(hint: Any, value: Any) -> Any:
    """A field's value, as its type in a dataclass says."""
    if get_origin(hint) is list:
        return [_convert(get_args(hint)[0], one) for one in value]
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0](value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return from_wire(hint, value)
    return value


def from_wire(kind: Type[T], message: Any) -> T:
    """The dataclass `kind` of a message with fields of the same names. An Optional field is None where the message has none."""
    values = {}
    for name, hint in _hints(cast(Any, kind)).items():
        if name.startswith("_"):
            continue
        if get_origin(hint) is Union:  # Optional[X]
            values[name] = _convert(get_args(hint)[0], getattr(message, name)) if message.HasField(name) else None
        else:
            values[name] = _convert(hint, getattr(message, name))
    return kind(**values)


class _Table:
    """Gives a report its repr: a head line, and a table of `_rows` below `_columns`."""

    _columns: ClassVar[Sequence[str]] = ()

    def _head(self) -> str:
        raise NotImplementedError

    def _rows(self) -> List[Sequence[Any]]:
        raise NotImplementedError

    def __repr__(self) -> str:
        cells = [list(self._columns)] + [[str(cell) for cell in row] for row in self._rows()]
        widths = [max(len(row[at]) for row in cells) for at in range(len(self._columns))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([self._head()] + ["  " + line for line in lines])

    def _repr_html_(self) -> str:
        def row(kind: str, cells: Sequence[Any]) -> str:
            return "<tr>" + "".join(f"<{kind}>{html.escape(str(cell))}</{kind}>" for cell in cells) + "</tr>"
        body = "".join(row("td", cells) for cells in self._rows())
        return f"<p>{html.escape(self._head())}</p><table>{row('th', self._columns)}{body}</table>"


def _size(count: int) -> str:
    """Bytes for people: "3.8 MiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass
class ModelHello:
    name: str
    hidden: int
    num_experts: int
    top_k: int
    layers: List[int]
    generation: int
    first_expert: int
    end_expert: int
    weights_hash: str


@dataclass
class SharedMemory:
    socket: str
    version: int
    server_id: bytes
    max_bytes: int


@dataclass(repr=False)
class Hello(_Table):
    """What a client must know before its first call. `shared_memory` is None where the server offers none."""
    protocol: int
    version: str
    models: List[ModelHello]
    hidden_dtypes: List[DTypeName]
    max_message_bytes: int
    shared_memory: Optional[SharedMemory]

    _columns = ("model", "H", "E", "k", "layers", "experts here", "generation")

    def _head(self) -> str:
        shared = self.shared_memory.socket if self.shared_memory else "none"
        return (f"moed {self.version}, protocol {self.protocol}, hidden states in {', '.join(self.hidden_dtypes)}, "
                f"messages up to {_size(self.max_message_bytes)}, session socket: {shared}")

    def _rows(self) -> List[Sequence[Any]]:
        return [(m.name, m.hidden, m.num_experts, m.top_k, _ranges(m.layers), f"{m.first_expert}:{m.end_expert}", m.generation)
                for m in self.models]


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: "0-3,5"."""
    parts: List[List[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


@dataclass
class LayerStatus:
    layer: int
    state: State
    scheme: str
    executed_scheme: str
    backend: str
    note: str
    bytes: int
    file_bytes: int
    numa_nodes: List[int]


@dataclass
class ModelStatus:
    name: str
    state: State
    error: str
    generation: int
    hidden: int
    num_experts: int
    top_k: int
    layers: List[LayerStatus]
    path: str
    weights_hash: str


@dataclass
class HostStatus:
    threads: int
    threads_limit: str
    pinned: bool
    processors: int
    cpu_quota: float
    numa_nodes: List[int]
    gpu: str
    gpu_free_bytes: int


@dataclass
class QueueStatus:
    waiting: int
    waiting_rows: int
    accepted: int
    refused: int
    expired: int
    cancelled: int
    finished: int
    runs: int
    rows: int
    merged: int


@dataclass(repr=False)
class ServerStatus(_Table):
    """Models, layers, their states and what runs them. `host` and `queue` are zeros from a server that does not tell."""
    models: List[ModelStatus]
    version: str
    host: HostStatus
    queue: QueueStatus

    _columns = ("model", "layer", "state", "backend", "scheme", "bytes", "note")

    def _head(self) -> str:
        gpu = f", {self.host.gpu}" if self.host.gpu else ""
        return (f"moed {self.version}: {self.host.threads} threads{gpu}; {self.queue.waiting} calls wait, "
                f"{self.queue.finished} ran, {self.queue.refused} were refused")

    def _rows(self) -> List[Sequence[Any]]:
        return [(model.name, layer.layer, layer.state, layer.backend, layer.executed_scheme or layer.scheme, _size(layer.bytes),
                 layer.note or model.error) for model in self.models for layer in model.layers]


@dataclass
class Reason:
    code: str
    text: str


@dataclass
class BackendVerdict:
    name: str
    ok: bool
    reasons: List[Reason]


@dataclass
class LayerExplanation:
    layer: int
    scheme: str
    choice: str
    bytes: int
    workspace_bytes: int
    backends: List[BackendVerdict]
    note: str
    shared_scheme: str
    shared_choice: str


@dataclass(repr=False)
class Explanation(_Table):
    """For each layer the chosen backend and, for every other one, each reason why not."""
    device: str
    layers: List[LayerExplanation]
    fits: bool

    _columns = ("layer", "backend", "verdict", "why")

    def _head(self) -> str:
        return f"{self.device}: " + ("every layer has a backend" if self.fits else "not every layer has a backend and room")

    def _rows(self) -> List[Sequence[Any]]:
        rows: List[Sequence[Any]] = []
        for layer in self.layers:
            for one in layer.backends:
                verdict = "chosen" if one.name == layer.choice else "fits" if one.ok else "no"
                rows.append((layer.layer, one.name, verdict, "; ".join(reason.text for reason in one.reasons)))
        return rows


@dataclass
class SelfCheckRow:
    layer: int
    backend: str
    scheme: str
    tokens: int
    max_rel: float
    bound: float
    passed: bool


@dataclass(repr=False)
class SelfCheck(_Table):
    """Random tokens through the active backend of each layer, compared with the server's reference."""
    rows: List[SelfCheckRow]
    passed: bool

    _columns = ("layer", "backend", "scheme", "tokens", "max_rel", "bound", "passed")

    def _head(self) -> str:
        return f"self-check {'passed' if self.passed else 'FAILED'}"

    def _rows(self) -> List[Sequence[Any]]:
        return [(r.layer, r.backend, r.scheme, r.tokens, f"{r.max_rel:.3g}", f"{r.bound:.3g}", "yes" if r.passed else "NO")
                for r in self.rows]


@dataclass
class Health:
    """State of a service: "" is the server, "MODEL" a model, "MODEL/L" a layer. `status` is "SERVING", "NOT_SERVING", "UNKNOWN",
    or "SERVICE_UNKNOWN" for a service that the server does not have."""
    service: str
    status: str

    @property
    def serving(self) -> bool:
        return self.status == "SERVING"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.service or 'server')}: {html.escape(self.status)}</p>"
