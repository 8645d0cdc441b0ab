"""Forwards against a real moed: golden outputs, every way that calls travel, element types, sizes, many threads."""
import threading
import unittest

import moed
import numpy as np
from support import Golden, Server, ServerCase, max_relative, narrow, widen

TRANSPORTS = ("rpc", "shared-memory", "ring")
BOUND = 0.01  # of 16-bit products; float32 is far below


class Transports(ServerCase):
    def setUp(self):
        self.golden = Golden()

    def forward(self, client, **more):
        g = self.golden
        return client.forward(g.layer, more.pop("hidden", g.x), g.ids, g.weights, routed_only=True, **more)

    def test_every_transport_gives_the_golden_output_and_the_same_bits(self):
        outputs = {}
        for transport in TRANSPORTS:
            with moed.Client(self.server.unix, transport=transport) as client:
                result = self.forward(client)
                self.assertEqual(result.transport, transport)
                self.assertLess(max_relative(result.output, self.golden.y), 1e-4)
                self.assertEqual((result.output.dtype, result.output.shape), (np.float32, (48, 256)))
                outputs[transport] = result.output.tobytes()
        self.assertEqual(len(set(outputs.values())), 1)

    def test_auto_takes_the_ring_on_a_unix_socket_and_over_tcp_of_the_same_host(self):
        for address in (self.server.unix, self.server.tcp):
            with moed.Client(address) as client:
                self.assertEqual(self.forward(client).transport, "ring")

    def test_every_pair_of_input_and_output_types_gives_the_golden_output(self):
        g = self.golden
        inputs = {"f32": g.x, "f16": g.x.astype(np.float16), "bf16": g.bits}
        for transport in TRANSPORTS:
            with moed.Client(self.server.unix, transport=transport) as client:
                for name, hidden in inputs.items():
                    for wanted in ("f32", "f16", "bf16"):
                        with self.subTest(transport=transport, hidden=name, output=wanted):
                            result = self.forward(client, hidden=hidden, dtype=name, output_dtype=wanted)
                            output = result.output
                            if wanted == "bf16":
                                output = widen(output.view(np.uint16))
                            self.assertLess(max_relative(output, g.y), BOUND)

    def test_without_an_output_type_the_answer_has_the_type_of_the_hidden_states(self):
        with moed.Client(self.server.unix) as client:
            self.assertEqual(self.forward(client, hidden=self.golden.bits, dtype="bf16").output.dtype, np.uint16)
            self.assertEqual(self.forward(client, hidden=self.golden.x.astype(np.float16)).output.dtype, np.float16)

    def test_logits_and_the_gate_of_the_checkpoint_route_and_the_routing_comes_back(self):
        g = self.golden
        for transport in TRANSPORTS:
            with moed.Client(self.server.unix, transport=transport) as client:
                by_logits = client.forward(g.layer, g.x, logits=g.logits, return_routing=True)
                by_gate = client.forward(g.layer, g.x, return_routing=True)
                by_ids = client.forward(g.layer, g.x, g.ids, g.weights, return_routing=True)
                for result in (by_logits, by_gate, by_ids):
                    self.assertEqual(result.ids.shape, (48, 4))
                    self.assertEqual(result.weights.dtype, np.float32)
                self.assertTrue((np.sort(by_logits.ids) == np.sort(g.ids)).all())
                self.assertLess(max_relative(by_logits.output, g.y_block), 1e-3)
                self.assertTrue((by_ids.ids == g.ids).all() and (by_ids.weights == g.weights).all())
                same = np.count_nonzero(np.sort(by_gate.ids) == np.sort(g.ids))
                self.assertGreater(same, 180)  # of 192: close calls may be decided otherwise

    def test_no_rows_give_no_rows(self):
        for transport in TRANSPORTS:
            with moed.Client(self.server.unix, transport=transport) as client:
                empty = np.empty((0, 256), np.float32)
                self.assertEqual(client.forward(1, empty).output.shape, (0, 256))
                routed = client.forward(1, empty, np.empty((0, 4), np.int32), np.empty((0, 4), np.float32), return_routing=True)
                self.assertEqual((routed.output.shape, routed.ids.shape), ((0, 256), (0, 4)))

    def test_an_answer_tells_what_ran_and_how_long(self):
        with moed.Client(self.server.unix) as client:
            result = self.forward(client, request_id="läuft")
            self.assertIn("int4", result.scheme)
            self.assertTrue(result.backend.startswith("cpu_"))
            self.assertEqual((result.generation, result.request_id, result.timing.batch_rows), (1, "läuft", 48))
            self.assertEqual(f"{result.weights_id:016x}", client.hello().models[0].weights_hash[:16])
            self.assertGreater(result.timing.total_us, 0)
            self.assertIsNone(result.ids)

    def test_calls_of_many_threads_at_once_get_their_serial_answers_to_the_bit(self):
        g, calls, threads = self.golden, 10, 12
        with moed.Client(self.server.unix, transport="rpc") as serial:
            inputs = [np.roll(g.x, shift, axis=0) * np.float32(1 + shift / 8) for shift in range(threads)]
            wanted = [serial.forward(1, x, g.ids, g.weights).output.tobytes() for x in inputs]
        for transport in TRANSPORTS:
            wrong = []
            with moed.Client(self.server.unix, transport=transport) as client:
                def work(at):
                    for _ in range(calls):
                        if client.forward(1, inputs[at], g.ids, g.weights).output.tobytes() != wanted[at]:
                            wrong.append(at)
                workers = [threading.Thread(target=work, args=(at,)) for at in range(threads)]
                for worker in workers:
                    worker.start()
                for worker in workers:
                    worker.join()
            self.assertEqual(wrong, [], transport)


class LargeTensors(unittest.TestCase):
    def test_tensors_of_many_mebibytes_come_back_as_they_went(self):
        server = Server("--bench-layer", "4096")
        self.addCleanup(server.close)
        hidden = np.random.default_rng(1).standard_normal((1024, 4096), np.float32)  # 16 MiB
        for transport in ("rpc", "auto"):
            with moed.Client(server.unix, transport=transport, session_bytes=8 << 20) as client:
                result = client.forward(0, hidden, model="bench")
                self.assertEqual((result.transport, result.output.tobytes()), ("rpc", hidden.tobytes()))
        with moed.Client(server.unix, transport="ring", session_bytes=33 << 20) as client:
            self.assertEqual(client.forward(0, hidden, model="bench").output.tobytes(), hidden.tobytes())
        with moed.Client(server.unix, transport="ring", session_bytes=8 << 20) as client:
            with self.assertRaisesRegex(moed.ResourceExhausted, "free memory"):
                client.forward(0, hidden, model="bench")


class OtherModels(unittest.TestCase):
    def test_each_model_of_a_server_is_called_by_its_name(self):
        names = ("gptq-int4-g32-sym", "tiny-gptoss-bf16")
        server = Server(models=names)
        self.addCleanup(server.close)
        with moed.Client(server.unix) as client:
            for name in names:
                g = Golden(name, 0)
                result = client.forward(0, narrow(g.x), g.ids, g.weights, model=name, dtype="bf16", output_dtype="f32")
                self.assertLess(max_relative(result.output, g.y), BOUND, name)
