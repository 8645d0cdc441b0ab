"""Requests and answers as bytes: what the client writes is what protobuf reads, and the other way round."""
import unittest

import moed
import numpy as np
from moed import _encoding, _messages
from moed._call import make_call

RANDOM = np.random.default_rng(5)


def call(hidden, **more):
    arguments = dict(ids=None, weights=None, logits=None, model="", dtype=None, output_dtype=None, out=None, routed_only=False,
                     return_routing=False, request_id="")
    arguments.update(more)
    return make_call(3, hidden, arguments.pop("ids"), arguments.pop("weights"), **arguments)


def tensor(dtype, array):
    return _messages.Tensor(dtype=dtype, shape=array.shape, data=array.tobytes())


class Requests(unittest.TestCase):
    def test_protobuf_reads_the_request_that_was_meant(self):
        for rows in (0, 1, 7, 300):
            hidden = RANDOM.standard_normal((rows, 33), np.float32)
            ids = RANDOM.integers(-1, 9, (rows, 2), np.int32)
            weights = RANDOM.standard_normal((rows, 2), np.float32)
            logits = RANDOM.standard_normal((rows, 9), np.float32)
            wanted = _messages.ForwardRequest(model="m", layer=3, output_dtype=2, routed_only=True, return_routing=True,
                                              request_id="id")
            wanted.hidden.MergeFromString(tensor(1, hidden).SerializeToString())
            with_ids, with_logits = type(wanted)(), type(wanted)()
            with_ids.CopyFrom(wanted)
            with_ids.top_k.ids.MergeFromString(tensor(4, ids).SerializeToString())
            with_ids.top_k.weights.MergeFromString(tensor(1, weights).SerializeToString())
            with_logits.CopyFrom(wanted)
            with_logits.router_logits.MergeFromString(tensor(1, logits).SerializeToString())
            said = dict(model="m", output_dtype="bf16", routed_only=True, return_routing=True, request_id="id")
            for more, message in (({}, wanted), ({"ids": ids, "weights": weights}, with_ids), ({"logits": logits}, with_logits)):
                data = _encoding.encode_request(call(hidden, **said, **more))
                self.assertEqual(_messages.ForwardRequest.FromString(data), message)

    def test_tensors_in_a_session_are_named_and_not_sent(self):
        request = _messages.ForwardRequest.FromString(
            _encoding.encode_request(call(np.ones((5, 8), np.float16)), (b"k" * 16, 128), (b"k" * 16, 4096)))
        hidden = request.hidden
        self.assertEqual((hidden.data, hidden.session_memory.offset, list(hidden.shape)), (b"", 128, [5, 8]))
        self.assertEqual((request.output_session_memory.key, request.output_session_memory.offset), (b"k" * 16, 4096))


class Answers(unittest.TestCase):
    def setUp(self):
        self.answer = _messages.ForwardResponse(backend="b", scheme="s", generation=2**63 + 1, request_id="id")
        self.answer.timing.queue_us = -1
        self.answer.output.MergeFromString(tensor(1, np.arange(6, dtype=np.float32).reshape(2, 3)).SerializeToString())

    def large(self):
        """The same with an output that is worth to be left where it is."""
        answer = _messages.ForwardResponse()
        answer.CopyFrom(self.answer)
        answer.output.CopyFrom(_messages.Tensor.FromString(tensor(1, np.arange(60000, dtype=np.float32).reshape(2, -1))
                                                           .SerializeToString()))
        return answer

    def test_an_answer_is_read_and_a_large_output_left_in_place(self):
        for answer, cols in ((self.answer, 3), (self.large(), 30000)):
            data = answer.SerializeToString()
            message, head, output = _encoding.decode_response(data)
            self.assertEqual((message.backend, message.generation, message.timing.queue_us), ("b", 2**63 + 1, -1))
            self.assertEqual((list(head.shape), head.dtype), ([2, cols], 1))
            self.assertTrue((np.frombuffer(output, np.float32) == np.arange(2 * cols)).all())
        self.assertIs(output.obj, data)
        self.assertEqual(head.data, b"")

    def test_fields_that_a_later_server_adds_are_passed_over(self):
        more = bytes([(60 << 3 | 1) & 0x7F | 0x80, 60 >> 4, *range(8), (61 << 3 | 5) & 0x7F | 0x80, 61 >> 4, *range(4)])
        for answer, size in ((self.answer, 24), (self.large(), 240000)):
            message, _, output = _encoding.decode_response(more + answer.SerializeToString() + more)
            self.assertEqual((message.scheme, len(output)), ("s", size))

    def test_bytes_that_are_no_answer_are_an_internal_error(self):
        data, large = self.answer.SerializeToString(), self.large().SerializeToString()
        for wrong in (b"\xff" * 20, data[:-1], b"\x0a\x05ab", b"\x0b", data + b"\x12\xff", b"\xff" * 100000, large[:-1],
                      large + b"\x0a\x05ab", b"\x0b" + large, large + b"\x12\xff"):
            with self.assertRaisesRegex(moed.Internal, "are no ForwardResponse"):
                _encoding.decode_response(wrong)

    def test_an_output_of_another_shape_or_size_is_an_internal_error(self):
        asked = call(np.zeros((2, 3), np.float32))
        _, head, output = _encoding.decode_response(self.answer.SerializeToString())
        asked.check_answer(head, len(output))
        for other in (call(np.zeros((3, 2), np.float32)), call(np.zeros((2, 3), np.float32), output_dtype="bf16")):
            with self.assertRaisesRegex(moed.Internal, "output: wanted"):
                other.check_answer(head, len(output))
        with self.assertRaisesRegex(moed.Internal, "output: wanted"):
            asked.check_answer(head, 23)
