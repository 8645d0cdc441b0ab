"""Hidden states in one byte an element, and outputs per slot, on every transport; what of them is refused before it is sent."""
import importlib.util
import unittest
from unittest import mock

import moed
import numpy as np
from support import Golden, ServerCase, max_relative, round_to_bf16, widen

TRANSPORTS = ("rpc", "shared-memory", "ring")


def e4m3_values():
    """The value of each code."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa * 2.0 ** -9, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 0x7F == 0x7F, np.nan, np.where(code & 0x80, -value, value)).astype(np.float32)


def codes_of(tensor):
    """The bytes of codes, whatever they are."""
    return np.asarray(tensor.codes).view(np.uint8)


def meant(tensor):
    """The bf16 values that a server makes of a QuantizedHidden, as uint16."""
    codes = codes_of(tensor)
    values = codes.view(np.int8).astype(np.float32) if tensor.dtype == "int8" else e4m3_values()[codes]
    return round_to_bf16(values * tensor.scales[:, None])


class Quantize(unittest.TestCase):
    def test_every_fp8_code_is_the_nearest_one_of_its_value_and_ties_go_to_even(self):
        values = e4m3_values()
        row = values[np.isfinite(values)]
        packed = moed.quantize(row[None], "f8e4m3")
        self.assertEqual((packed.scales.tolist(), packed.dtype), ([1.0], "f8e4m3"))
        self.assertEqual(codes_of(packed)[0].tolist(), np.arange(256)[np.isfinite(values)].tolist())
        positive = values[:0x7F]
        between = (positive[:-1] + positive[1:]) / 2
        codes = codes_of(moed.quantize(np.append(between, 448)[None].astype(np.float32), "f8e4m3"))[0]
        self.assertEqual(codes[:-1].tolist(), [at + at % 2 for at in range(0x7E)])

    def test_scales_are_the_largest_magnitude_by_the_code_s_and_codes_the_nearest(self):
        x = np.random.default_rng(3).standard_normal((17, 64), np.float32) * np.logspace(-30, 30, 17, dtype=np.float32)[:, None]
        x[5] = 0
        for dtype, largest, relative in (("int8", 127, 0.5 / 127), ("f8e4m3", 448, 1 / 16)):
            packed = moed.quantize(x, dtype)
            self.assertEqual(packed.scales[5], 1)
            wanted = np.abs(x).max(axis=1) / np.float32(largest)
            self.assertTrue((packed.scales == np.where(wanted > 0, wanted, 1)).all())
            error = np.abs(widen(meant(packed)) - x).max(axis=1) / np.maximum(np.abs(x).max(axis=1), 1e-38)
            self.assertLess(error.max(), relative + 1 / 256)
            half = moed.quantize(x[:9].astype(np.float16), dtype)
            self.assertEqual(half.codes.shape, (9, 64))
            bits = round_to_bf16(x)
            self.assertEqual(codes_of(moed.quantize(bits, dtype, hidden_dtype="bf16")).tobytes(),
                             codes_of(moed.quantize(widen(bits), dtype)).tobytes())

    def test_what_is_not_finite_is_nan_in_fp8_and_refused_in_int8(self):
        x = np.ones((3, 4), np.float32)
        x[1, 2], x[1, 3] = np.nan, -np.inf
        packed = moed.quantize(x, "fp8")
        self.assertEqual((codes_of(packed)[1] & 0x7F).tolist(), [0x7E, 0x7E, 0x7F, 0x7F])
        self.assertEqual(packed.scales.tolist(), [np.float32(1 / 448)] * 3)
        with self.assertRaisesRegex(moed.InvalidArgument, "finite values for int8, got nan in row 1"):
            moed.quantize(x, "int8")

    def test_no_rows_and_no_columns_are_fine(self):
        for shape in ((0, 4), (3, 0)):
            for dtype in ("int8", "f8e4m3"):
                packed = moed.quantize(np.empty(shape, np.float32), dtype)
                self.assertEqual((packed.codes.shape, packed.scales.shape), (shape, shape[:1]))

    def test_other_dtypes_are_refused(self):
        for dtype in ("bf16", "int4", None, 8):
            with self.assertRaisesRegex(moed.InvalidArgument, "dtype: wanted f8e4m3 or int8"):
                moed.quantize(np.ones((1, 1), np.float32), dtype)

    @unittest.skipUnless(importlib.util.find_spec("ml_dtypes"), "the package ml_dtypes is not installed")
    def test_fp8_codes_are_those_of_ml_dtypes(self):
        import ml_dtypes
        x = np.random.default_rng(4).standard_normal((8, 999)).astype(np.float32)
        packed = moed.quantize(x, "f8e4m3")
        self.assertEqual(packed.codes.dtype, ml_dtypes.float8_e4m3fn)
        wanted = (x / packed.scales[:, None]).astype(ml_dtypes.float8_e4m3fn)
        self.assertEqual(codes_of(packed).tobytes(), wanted.tobytes())


class Refused(unittest.TestCase):
    """Without a server: nothing of it may be sent."""

    def test_codes_and_scales_that_do_not_fit_are_refused_by_name(self):
        codes, scales = np.zeros((4, 8), np.int8), np.ones(4, np.float32)
        with moed.Client("unix:/tmp/no-such-moed") as client:
            for hidden, text in (
                    ((codes[0], scales), r"codes: wanted shape \[M, H\]"), ((codes.astype(np.int16), scales), "codes: wanted int8"),
                    ((codes.view(np.uint8), scales), 'uint8 with dtype="f8e4m3"'), ((codes.tolist(), scales), "got list"),
                    ((codes, scales, "f8e4m3"), "codes: wanted f8e4m3 as dtype says, got an array of int8"),
                    ((codes.view(np.uint8), scales, "int8"), "codes: wanted int8 as dtype says, got an array of uint8"),
                    ((codes, scales, "int4"), "dtype: wanted f8e4m3 or int8"),
                    ((codes, scales[:3]), r"scales: wanted \[4\], one for each row of the codes, got \[3\]"),
                    ((codes, scales[None]), r"scales: wanted \[4\].*got \[1, 4\]"),
                    ((codes, scales.astype(np.float64)), "scales: wanted float32"), ((codes, None), "scales.*NoneType"),
                    ((codes, 1.0), "scales.*float")):
                with self.assertRaisesRegex(moed.InvalidArgument, text):
                    client.forward(1, moed.QuantizedHidden(*hidden))
            good = moed.QuantizedHidden(codes, scales)
            for more, text in (({"dtype": "bf16"}, "dtype: wanted none beside a QuantizedHidden"),
                               ({"output_dtype": "int8"}, "output_dtype: wanted f32, bf16 or f16"),
                               ({"out": np.empty((4, 8), np.int8)}, "out: wanted float32"), ({"per_slot": True}, "per_slot")):
                with self.assertRaisesRegex(moed.InvalidArgument, text):
                    client.forward(1, good, **more)

    def test_per_slot_without_ids_and_with_an_output_of_other_rows_is_refused(self):
        x = np.zeros((2, 8), np.float32)
        ids, weights = np.zeros((2, 3), np.int32), np.zeros((2, 3), np.float32)
        with moed.Client("unix:/tmp/no-such-moed") as client:
            for more, text in (({}, "per_slot: wanted ids and weights with it"),
                               ({"logits": np.zeros((2, 4), np.float32)}, "per_slot: wanted ids and weights"),
                               ({"ids": ids, "weights": weights, "out": np.empty((2, 8), np.float32)}, r"out: .*\[6, 8\]")):
                with self.assertRaisesRegex(moed.InvalidArgument, text):
                    client.forward(1, x, per_slot=True, **more)


class Forwards(ServerCase):
    def setUp(self):
        self.golden = Golden()

    def clients(self):
        for transport in TRANSPORTS:
            with moed.Client(self.server.unix, transport=transport) as client, self.subTest(transport=transport):
                yield client

    def test_an_answer_to_quantized_hidden_states_is_to_the_bit_that_to_their_bf16_values(self):
        g = self.golden
        for dtype in ("int8", "f8e4m3"):
            hidden = moed.quantize(g.x, dtype)
            outputs = set()
            for client in self.clients():
                for output_dtype in (None, "f32"):
                    plain = client.forward(1, meant(hidden), g.ids, g.weights, dtype="bf16", output_dtype=output_dtype or "bf16")
                    result = client.forward(1, hidden, g.ids, g.weights, output_dtype=output_dtype)
                    self.assertEqual((result.output.dtype.itemsize, result.output.shape),
                                     (4 if output_dtype else 2, (48, 256)))
                    self.assertEqual(result.output.tobytes(), plain.output.tobytes())
                outputs.add(result.output.tobytes())
                self.assertLess(max_relative(client.forward(1, hidden, g.ids, g.weights, routed_only=True,
                                                            output_dtype="f32").output, g.y), 0.1)
            self.assertEqual(len(outputs), 1)

    def test_codes_of_any_kind_and_place_give_the_same_answer(self):
        g = self.golden
        packed = moed.quantize(g.x, "f8e4m3")
        codes = codes_of(packed)
        wide = np.zeros((48, 512), np.uint8)
        wide[:, ::2] = codes
        for client in self.clients():
            wanted = client.forward(1, packed).output.tobytes()
            shared, scales = client.allocate((48, 256), np.uint8), client.allocate(48)
            shared[...], scales[...] = codes, packed.scales
            for one, by in ((codes, packed.scales), (wide[:, ::2], packed.scales[:, None]), (shared, scales)):
                self.assertEqual(client.forward(1, moed.QuantizedHidden(one, by, "f8e4m3")).output.tobytes(), wanted)
            empty = client.forward(1, moed.QuantizedHidden(np.empty((0, 256), np.int8), np.empty(0, np.float32)))
            self.assertEqual(empty.output.shape, (0, 256))

    def test_slots_add_up_to_the_routed_output_and_a_slot_without_an_expert_is_zero(self):
        g = self.golden
        ids = g.ids.copy()
        ids[3, 1] = ids[7, :] = -1
        outputs = set()
        for client in self.clients():
            out = client.allocate((48 * 4, 256), np.float32)
            result = client.forward(1, g.x, ids, g.weights, per_slot=True, return_routing=True, out=out)
            self.assertIs(result.output, out)
            self.assertTrue((result.ids == ids).all() and (result.weights == g.weights).all())
            slots = out.reshape(48, 4, 256)
            self.assertFalse(slots[3, 1].any() or slots[7].any())
            whole = client.forward(1, g.x, ids, g.weights, routed_only=True).output
            self.assertLess(max_relative(np.delete(slots.sum(axis=1), 7, 0), np.delete(whole, 7, 0)), 1e-5)
            outputs.add(out.tobytes())
            quantized_slots = client.forward(1, moed.quantize(g.x, "int8"), ids, g.weights, per_slot=True)
            self.assertEqual(quantized_slots.output.shape, (192, 256))
        self.assertEqual(len(outputs), 1)

    def test_a_message_that_was_given_up_leaves_its_session_to_the_server(self):
        with moed.Client(self.server.unix, transport="shared-memory") as client:
            client.forward(1, self.golden.x)
            session = client._sessions._session
            with mock.patch.object(client, "_send", side_effect=moed.DeadlineExceeded("late")):
                with self.assertRaises(moed.DeadlineExceeded):
                    client.forward(1, self.golden.x)
            client.forward(1, self.golden.x)
            self.assertIsNot(client._sessions._session, session)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "the package torch is not installed")
    def test_tensors_of_torch_go_and_outputs_come_as_such(self):
        import torch
        packed = moed.quantize(torch.from_numpy(self.golden.x), "f8e4m3")
        self.assertEqual(packed.codes.dtype, getattr(torch, "float8_e4m3fn", torch.uint8))
        wanted = moed.quantize(self.golden.x, "f8e4m3")
        for client in self.clients():
            output = client.forward(1, packed).output
            self.assertEqual(output.dtype, torch.bfloat16)
            self.assertEqual(output.view(torch.int16).numpy().tobytes(), client.forward(1, wanted).output.tobytes())
