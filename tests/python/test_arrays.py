"""What may be handed over: strided arrays, outputs, integer types, arrays of a session, bfloat16, tensors of torch; and what is
refused."""
import gc
import importlib.util
import unittest

import moed
import numpy as np
from moed import _tensors
from support import Golden, ServerCase, max_relative


def have(module):
    return importlib.util.find_spec(module) is not None


class Arrays(ServerCase):
    def setUp(self):
        self.golden = Golden()
        self.client = moed.Client(self.server.unix)
        self.addCleanup(self.client.close)
        g = self.golden
        self.wanted = self.client.forward(1, g.x, g.ids, g.weights).output

    def clients(self):
        for transport in ("rpc", "shared-memory", "ring"):
            with moed.Client(self.server.unix, transport=transport) as client:
                yield client

    def test_arrays_that_are_not_contiguous_are_copied(self):
        g = self.golden
        wide = np.zeros((48, 512), np.float32)
        wide[:, ::2] = g.x
        for client in self.clients():
            for hidden in (wide[:, ::2], np.asfortranarray(g.x), g.x[::-1][::-1]):
                output = client.forward(1, hidden, np.asfortranarray(g.ids), g.weights[:, ::-1][:, ::-1]).output
                self.assertEqual(output.tobytes(), self.wanted.tobytes())

    def test_the_output_goes_where_out_says(self):
        g = self.golden
        for client in self.clients():
            for out in (np.empty((48, 256), np.float32), client.allocate((48, 256), np.float32)):
                result = client.forward(1, g.x, g.ids, g.weights, out=out)
                self.assertIs(result.output, out)
                self.assertEqual(out.tobytes(), self.wanted.tobytes())

    def test_out_decides_the_type_of_the_output(self):
        out = np.empty((48, 256), np.uint16)
        result = self.client.forward(1, self.golden.x, out=out)
        self.assertIs(result.output, out)
        self.assertEqual(self.client.forward(1, self.golden.x, output_dtype="bf16").output.tobytes(), out.tobytes())

    def test_an_output_that_does_not_fit_is_refused_by_name(self):
        read_only = np.empty((48, 256), np.float32)
        read_only.flags.writeable = False
        for out, text in ((np.empty((47, 256), np.float32), r"out: wanted f32 of shape \[48, 256\], got f32 of shape \[47, "),
                          (np.empty((48, 512), np.float32)[:, ::2], "not contiguous"), (read_only, "read-only"),
                          (np.empty((48, 256), np.float64), "float64"), (bytearray(4), "bytearray")):
            with self.assertRaisesRegex(moed.InvalidArgument, text):
                self.client.forward(1, self.golden.x, out=out)
        with self.assertRaisesRegex(moed.InvalidArgument, "out: wanted bf16"):
            self.client.forward(1, self.golden.x, output_dtype="bf16", out=np.empty((48, 256), np.float32))

    def test_ids_may_be_any_integers_and_weights_any_short_floats(self):
        g = self.golden
        half = g.weights.astype(np.float16)
        wanted = self.client.forward(1, g.x, g.ids, half.astype(np.float32)).output
        for ids in (g.ids.astype(np.int64), g.ids.astype(np.uint8)):
            self.assertEqual(self.client.forward(1, g.x, ids, half).output.tobytes(), wanted.tobytes())
        with self.assertRaisesRegex(moed.InvalidArgument, "ids: wanted numbers from"):
            self.client.forward(1, g.x, g.ids.astype(np.int64) + 2**32, g.weights)

    def test_what_is_no_tensor_of_floats_is_refused_by_name(self):
        g = self.golden
        for hidden, text in ((g.x.astype(np.float64), "hidden: wanted float32.*got an array of float64"), (g.x[0], r"\[256\]"),
                             (g.x.tolist(), "hidden: wanted a numpy array or a torch tensor, got list"), (None, "NoneType"),
                             (g.x.astype(">f4"), ">f4"), (g.bits, "uint16"), (g.x[None], r"\[1, 48, 256\]")):
            with self.assertRaisesRegex(moed.InvalidArgument, text):
                self.client.forward(1, hidden)
        with self.assertRaisesRegex(moed.InvalidArgument, "bf16 as dtype says"):
            self.client.forward(1, g.x, dtype="bf16")
        with self.assertRaisesRegex(moed.InvalidArgument, "output_dtype: wanted"):
            self.client.forward(1, g.x, output_dtype="int8")

    def test_memory_of_a_gpu_is_refused_by_name(self):
        class OnDevice:
            __cuda_array_interface__ = {"shape": (1, 256), "typestr": "<f4", "data": (64, False), "version": 3}
        with self.assertRaisesRegex(moed.InvalidArgument, "hidden: wanted memory of the host, got OnDevice in a GPU's memory"):
            self.client.forward(1, OnDevice())

    def test_routing_that_contradicts_itself_is_refused_by_name(self):
        g = self.golden
        for more, text in (({"ids": g.ids}, "both or neither, got ids alone"), ({"weights": g.weights}, "weights alone"),
                           ({"ids": g.ids, "weights": g.weights, "logits": g.logits}, "none beside ids"),
                           ({"ids": g.ids[:5], "weights": g.weights[:5]}, r"\[48, k\] both, got \[5, 4\]"),
                           ({"ids": g.ids, "weights": g.weights[:, :2]}, r"\[48, 4\] and \[48, 2\]"),
                           ({"ids": g.x, "weights": g.weights}, "ids: wanted integers"),
                           ({"ids": g.ids, "weights": g.weights.astype(np.float64)}, "weights: wanted float32"),
                           ({"logits": g.logits[:7]}, "logits: wanted 48 rows")):
            with self.assertRaisesRegex(moed.InvalidArgument, text):
                self.client.forward(1, g.x, **more)

    def test_arrays_of_a_session_are_used_where_they_lie(self):
        g = self.golden
        # Room for nothing but the two arrays: a copy of either would have none.
        with moed.Client(self.server.unix, transport="ring", session_bytes=2 * g.x.nbytes) as client:
            hidden, out = client.allocate(g.x.shape), client.allocate(g.x.shape)
            hidden[...] = g.x
            result = client.forward(1, hidden, out=out)
            self.assertEqual(result.output.tobytes(), self.client.forward(1, g.x).output.tobytes())
            with self.assertRaises(moed.ResourceExhausted):
                client.forward(1, g.x, out=out)

    def test_an_output_that_overlaps_the_hidden_states_in_a_session_is_refused(self):
        hidden = self.client.allocate((48, 256))
        hidden[...] = self.golden.x
        with self.assertRaisesRegex(moed.InvalidArgument, "no byte of hidden"):
            self.client.forward(1, hidden, out=hidden)

    def test_memory_of_a_session_is_given_back_with_the_last_view_of_it(self):
        with moed.Client(self.server.unix, transport="ring", session_bytes=1 << 16) as client:
            first = client.allocate(1 << 16, np.uint8)
            region = client._sessions._session.region
            self.assertEqual(region.offset_of(first) % 64, 0)
            view = first[100:200].reshape(10, 10)
            del first
            gc.collect()
            self.assertIsNone(region.offset_of(client.allocate(1 << 16, np.uint8)))  # ordinary memory: the view keeps all of it
            del view
            gc.collect()
            self.assertIsNotNone(region.offset_of(client.allocate(1 << 16, np.uint8)))

    def test_arrays_of_a_session_outlive_the_client(self):
        with moed.Client(self.server.unix, transport="ring") as client:
            array = client.allocate((100, 100), np.float16)
            array[...] = 7
        del client
        gc.collect()
        self.assertTrue((array == 7).all())
        array[...] = 8
        self.assertEqual(int(array.sum(dtype=np.int64)), 80000)

    def test_allocate_takes_numbers_shapes_and_dtypes_and_refuses_others(self):
        self.assertEqual(self.client.allocate(3).shape, (3,))
        self.assertEqual(self.client.allocate((2, 0, 4), "f16").shape, (2, 0, 4))
        self.assertEqual(self.client.allocate([np.int64(2)], "bf16").dtype.itemsize, 2)
        self.assertIsNone(self.client._sessions._session.region.offset_of(self.client.allocate(1 << 30, np.uint8)))
        for shape in (-1, (2, -3), 1.5, "3", None):
            with self.assertRaisesRegex(moed.InvalidArgument, "shape"):
                self.client.allocate(shape)
        with self.assertRaisesRegex(moed.InvalidArgument, "dtype"):
            self.client.allocate(3, "frob")

    @unittest.skipUnless(have("ml_dtypes"), "the package ml_dtypes is not installed")
    def test_bfloat16_of_ml_dtypes_goes_and_comes(self):
        import ml_dtypes
        g = self.golden
        hidden = g.bits.view(ml_dtypes.bfloat16)
        result = self.client.forward(1, hidden, g.ids, g.weights, routed_only=True)
        self.assertEqual(result.output.dtype, ml_dtypes.bfloat16)
        self.assertLess(max_relative(result.output.astype(np.float32), g.y), 0.01)

    @unittest.skipUnless(have("torch"), "the package torch is not installed")
    def test_tensors_of_torch_go_and_come(self):
        import torch
        g = self.golden
        hidden = torch.from_numpy(g.bits.copy().view(np.int16)).view(torch.bfloat16)
        for client in self.clients():
            ids, weights = torch.from_numpy(g.ids.copy()).long(), torch.from_numpy(g.weights.copy())
            result = client.forward(1, hidden, ids, weights, routed_only=True, return_routing=True)
            self.assertEqual((result.output.dtype, result.ids.dtype), (torch.bfloat16, torch.int32))
            self.assertLess(max_relative(result.output.float().numpy(), g.y), 0.01)
            out = torch.empty((48, 256))
            self.assertIs(client.forward(1, hidden.t().contiguous().t(), out=out).output, out)
            self.assertEqual(client.forward(1, hidden.float().requires_grad_()).output.dtype, torch.float32)


class Dtypes(unittest.TestCase):
    def test_a_dtype_may_be_said_in_every_way_that_numpy_has(self):
        for said, wire in (("f32", 1), ("float32", 1), (np.float32, 1), (np.dtype(np.float32), 1), ("bf16", 2), ("f16", 3),
                           (np.float16, 3)):
            self.assertEqual(_tensors.wire_dtype("dtype", said), wire)
        for said in ("f64", np.float64, 3, np.int8, object()):
            with self.assertRaises(moed.InvalidArgument):
                _tensors.wire_dtype("dtype", said)
