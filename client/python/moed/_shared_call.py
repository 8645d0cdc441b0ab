"""Forward calls in a session of shared memory: by its ring, or by an RPC whose tensors lie there.

Arrays that lie in the session stay where they are (hidden states, `out`, routing); others are copied to parts of it, in one pass
from arrays that are not contiguous too, and the output is copied from there.
"""
from __future__ import annotations

import math
import time
from typing import Any, List, Optional, Tuple

import numpy as np

from moed import errors
from moed._call import Call, Result
from moed._encoding import encode_request
from moed._session import MAX_TEXT, Session, Submission

_GATE, _TOP_K, _LOGITS = 0, 1, 2         # Submission.routing
_ROUTED_ONLY, _RETURN_ROUTING, _PER_SLOT = 1, 2, 4  # Submission.flags
_MOST_SLOTS = 256                        # k of no model is larger; what a call without ids of its own makes room for


def fits_ring(call: Call) -> bool:
    """Whether the call's texts fit into a submission, as all do that a server takes."""
    texts = (call.model.encode(), call.request_id.encode())
    return all(len(text) <= MAX_TEXT and b"\0" not in text for text in texts)


class SharedCall:
    def __init__(self, session: Session, call: Call):
        self._session, self.call = session, call
        self._keep: List[Any] = [call.hidden.raw, call.output]  # what the server may read and write until it has answered

    def place(self) -> bool:
        """Puts the call's tensors into the session; False when that has not enough free memory."""
        call = self.call
        self._session.reap()
        hidden, output = self._in(call.hidden.raw), self._session.region.offset_of(call.output)
        self._from: Optional[np.ndarray] = None
        if output is None:
            output, self._from = self._new(call.output.shape, call.output.dtype)
        if hidden is None or output is None:
            return False
        scales = self._in(call.hidden.scales) if call.hidden.scales is not None else 0
        if scales is None:
            return False
        self._hidden, self._output, self._scales = hidden, output, scales
        self._ids = self._weights = self._logits = self._used_ids_at = self._used_weights_at = 0
        self._routing, self._k, self._experts = _GATE, 0, 0
        return self._place_routing()

    def _place_routing(self) -> bool:
        call = self.call
        offsets: List[Optional[int]] = []
        if call.ids is not None and call.weights is not None:
            self._routing, self._k = _TOP_K, call.ids.shape[1]
            offsets = [self._in(call.ids), self._in(call.weights)]
            self._ids, self._weights = offsets[0] or 0, offsets[1] or 0
        elif call.logits is not None:
            self._routing, self._experts = _LOGITS, call.logits.shape[1]
            offsets = [self._in(call.logits)]
            self._logits = offsets[0] or 0
        if call.asks_routing and None not in offsets:
            self._k = self._k if call.ids is not None else _MOST_SLOTS
            ids_at, self._used_ids = self._new((call.rows * self._k,), np.dtype(np.int32))
            weights_at, self._used_weights = self._new((call.rows * self._k,), np.dtype(np.float32))
            offsets += [ids_at, weights_at]
            self._used_ids_at, self._used_weights_at = ids_at or 0, weights_at or 0
        return None not in offsets

    def _new(self, shape: Tuple[int, ...], dtype: np.dtype) -> Tuple[Optional[int], Optional[np.ndarray]]:
        part = self._session.region.allocate(math.prod(shape) * dtype.itemsize)
        if part is None:
            return None, None
        self._keep.append(part)
        return part.offset, part.array(shape, dtype)

    def _in(self, array: np.ndarray) -> Optional[int]:
        """The array's offset in the session, copied there unless it lies there."""
        there = self._session.region.offset_of(array)
        if there is not None:
            self._keep.append(array)
            return there
        offset, copy = self._new(array.shape, array.dtype)
        if copy is not None:
            np.copyto(copy, array)
        return offset

    def submission(self) -> Submission:
        call = self.call
        flags = ((_ROUTED_ONLY if call.routed_only else 0) | (_RETURN_ROUTING if call.asks_routing else 0) |
                 (_PER_SLOT if call.per_slot else 0))
        return Submission(flags, call.layer, self._routing, call.hidden.wire, call.output_wire, call.rows, call.cols, self._k,
                          self._experts, self._hidden, self._output, self._ids, self._weights, self._logits, self._used_ids_at,
                          self._used_weights_at, call.model.encode(), call.request_id.encode(), self._scales)

    def run_ring(self, timeout: Optional[float]) -> Optional[Result]:
        """None when no slot of the ring is free. The call's error as an exception."""
        submission, begin = self.submission(), time.perf_counter()
        done = self._session.run(submission, timeout, self._keep)
        self.call.waited = time.perf_counter() - begin
        if done is None:
            return None
        if done.code != 0:
            raise errors.make_error(done.code, done.message, done.retry_us / 1e6 if done.retry_us > 0 else None)
        self._take_output()
        ids = weights = None
        if self.call.asks_routing and self._used_ids is not None and self._used_weights is not None:
            count = self.call.rows * done.top_k
            shape = (self.call.rows, done.top_k)
            ids, weights = self._used_ids[:count].reshape(shape).copy(), self._used_weights[:count].reshape(shape).copy()
        return self.call.result(done, ids, weights, done, "ring")

    def request(self) -> bytes:
        """The ForwardRequest of an RPC of this call."""
        return encode_request(self.call, (self._session.key, self._hidden), (self._session.key, self._output))

    def result_of_message(self, answer: Any, tensor: Any) -> Result:
        """What the RPC's answer comes to; `tensor` is its output."""
        self.call.check_answer(tensor, self.call.output.nbytes)
        self._take_output()
        return self.call.result_of_message(answer, "shared-memory")

    def _take_output(self) -> None:
        if self._from is not None:
            np.copyto(self.call.output, self._from)
