"""Every kind of error, as an exception with gRPC's code: of the client's options, of calls, of deadlines and full queues, of
tokens."""
import math
import pathlib
import pickle
import shutil
import subprocess
import unittest

import grpc
import moed
import numpy as np
from moed import errors
from moed._connection import Attempts
from support import Background, Golden, Server, ServerCase, temporary_folder, wait_for

SLOW = ("--policy", "require:reference", "--batch-wait-us", "0", "--max-batch-tokens", "64")


class Refusals(ServerCase):
    def clients(self):
        for transport in ("rpc", "shared-memory", "ring"):
            with moed.Client(self.server.unix, transport=transport) as client, self.subTest(transport=transport):
                yield client

    def test_the_server_s_refusals_have_its_code_and_its_text_on_every_transport(self):
        g = Golden()
        bad_ids = g.ids.copy()
        bad_ids[5, 2] = 16
        nan = g.logits.copy()
        nan[3, 1] = math.nan
        cases = (
            (moed.NotFound, "0", {"layer": 0}), (moed.NotFound, "99", {"layer": 99}), (moed.NotFound, "frob", {"model": "frob"}),
            (moed.InvalidArgument, "256.*512", {"hidden": np.zeros((4, 512), np.float32)}),
            (moed.InvalidArgument, "row 5, slot 2 is 16", {"ids": bad_ids, "weights": g.weights}),
            (moed.InvalidArgument, "row 3, expert 1", {"logits": nan}),
            (moed.InvalidArgument, r"\[48, 16\]", {"logits": g.logits[:, :9]}),
        )
        for client in self.clients():
            for kind, text, more in cases:
                arguments = {"layer": 1, "hidden": g.x, **more}
                with self.assertRaisesRegex(kind, text) as caught:
                    client.forward(**arguments)
                self.assertEqual(caught.exception.code, kind.code)
                self.assertRegex(caught.exception.details, text)
            client.forward(1, g.x)  # nothing of it stays

    def test_arguments_that_no_message_can_say_are_refused_by_name(self):
        with moed.Client(self.server.unix) as client:
            x = Golden().x
            for more, text in (({"layer": 2**31}, "layer"), ({"layer": "1"}, "layer"),
                               ({"request_id": "a" * 129}, "128 bytes, got 129"), ({"request_id": b"a"}, "request_id"),
                               ({"model": "\udcff"}, "model"), ({"timeout": 0}, "timeout"),
                               ({"timeout": -1}, "timeout"), ({"timeout": math.nan}, "timeout"), ({"timeout": "1"}, "timeout")):
                with self.assertRaisesRegex(moed.InvalidArgument, text):
                    client.forward(**{"layer": 1, "hidden": x, **more})
            with self.assertRaisesRegex(moed.InvalidArgument, "ExplainRequest"):
                client.explain(layer=2**40)
            with self.assertRaisesRegex(moed.NotFound, "frob"):
                client.status("frob")

    def test_a_closed_client_says_so(self):
        client = moed.Client(self.server.unix)
        client.forward(1, Golden().x)
        client.close()
        client.close()
        for call in (lambda: client.forward(1, Golden().x), client.status, lambda: client.allocate(3)):
            with self.assertRaisesRegex(moed.FailedPrecondition, "closed"):
                call()
        self.assertIn("closed", repr(client))

    def test_a_message_beyond_the_limit_is_refused(self):
        with moed.Client(self.server.unix, transport="rpc") as client:
            with self.assertRaises(moed.ResourceExhausted):
                client.forward(1, np.zeros((270000, 256), np.float32))


class Options(unittest.TestCase):
    def test_options_that_are_none_are_refused_by_name(self):
        for address in ("", "localhost", "localhost:", ":1", "localhost:0", "localhost:65536", "a/b:1", "unix:",
                        "unix:" + "a" * 108, 5):
            with self.assertRaisesRegex(moed.InvalidArgument, "address"):
                moed.Client(address)
        for name, value in (("transport", "pigeon"), ("token", "short"), ("token", "with a space in the text"), ("token", 5),
                            ("timeout", -1), ("retries", -1), ("retries", 1.5), ("session_bytes", "1"), ("tls_cert", "a")):
            with self.assertRaisesRegex(moed.InvalidArgument, name):
                moed.Client("localhost:1", **{name: value})
        with self.assertRaisesRegex(moed.NotFound, "tls_ca.*frob"):
            moed.Client("localhost:1", tls_ca="/frob")
        with self.assertRaisesRegex(moed.InvalidArgument, "tls_ca: wanted HOST:PORT"):
            moed.Client("unix:/frob", tls_ca="/frob")
        with self.assertRaisesRegex(moed.InvalidArgument, "PEM file with a CERTIFICATE"):
            moed.Client("localhost:1", tls_ca=__file__)

    def test_a_token_that_is_refused_is_not_in_the_text(self):
        with self.assertRaises(moed.InvalidArgument) as caught:
            moed.Client("localhost:1", token="secret secret secret")
        self.assertNotIn("secret", str(caught.exception))

    def test_good_addresses_are_taken(self):
        for address in ("localhost:1", "[::1]:50061", "unix:/frob", "10.0.0.1:65535"):
            moed.Client(address).close()

    def test_without_a_server_calls_are_unavailable_and_name_the_address(self):
        for transport in ("auto", "rpc", "ring"):
            with moed.Client("unix:/tmp/no-such-moed", transport=transport) as client:
                with self.assertRaisesRegex(moed.Unavailable, "server unix:/tmp/no-such-moed: "):
                    client.forward(1, np.zeros((1, 256), np.float32))

    def test_a_server_without_sessions_has_messages_only(self):
        server = Server("--session-socket", "none")
        self.addCleanup(server.close)
        with moed.Client(server.unix) as client:
            self.assertEqual(client.forward(1, Golden().x).transport, "rpc")
            self.assertIsNone(client.hello().shared_memory)
        for transport in ("ring", "shared-memory"):
            with moed.Client(server.unix, transport=transport) as client:
                with self.assertRaisesRegex(moed.Unimplemented, "offers none"):
                    client.forward(1, Golden().x)


class Exceptions(unittest.TestCase):
    def test_errors_are_of_their_kind_and_survive_pickling(self):
        error = errors.make_error(8, "full", 0.25)
        again = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(again), again.code, again.details, again.retry_after),
                         (moed.ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED, "full", 0.25))
        self.assertEqual(str(again), "RESOURCE_EXHAUSTED: full (retry after 0.250 s)")
        self.assertIsInstance(errors.make_error(3, ""), ValueError)
        self.assertIsInstance(errors.make_error(14, ""), ConnectionError)
        self.assertIsInstance(errors.make_error(4, ""), TimeoutError)

    def test_codes_without_a_class_and_numbers_that_are_no_code_are_errors_too(self):
        self.assertEqual(errors.make_error(15, "").code, grpc.StatusCode.DATA_LOSS)
        self.assertEqual(errors.make_error(77, "").code, grpc.StatusCode.UNKNOWN)

    def test_details_that_are_no_status_are_ignored(self):
        self.assertIsNone(errors.retry_delay([("grpc-status-details-bin", b"\xff\xff")]))
        self.assertIsNone(errors.retry_delay([("grpc-status-details-bin", b""), ("other", "x")]))
        self.assertIsNone(errors.retry_delay(None))


class Overload(ServerCase):
    """A server that computes slowly, one call at a time, where two may wait."""
    options = (*SLOW, "--queue", "2")

    def setUp(self):
        self.rows = np.tile(Golden().x, (12, 1))  # takes the reference some tenths of a second

    def occupy(self, client, count):
        """So many calls under way, of which one runs. They end before the test does."""
        calls = [Background(lambda: client.forward(1, self.rows)) for _ in range(count)]
        self.addCleanup(lambda: [call.end() for call in calls])
        return calls

    def test_a_deadline_that_passes_while_a_call_waits_is_told_on_every_transport(self):
        for transport in ("rpc", "shared-memory", "ring"):
            with self.subTest(transport=transport), moed.Client(self.server.unix, transport=transport) as client:
                client.forward(1, self.rows[:1])
                busy = Background(lambda: client.forward(1, self.rows))
                wait_for(lambda: client.status().queue.accepted > client.status().queue.finished, "the call to run")
                with self.assertRaises(moed.DeadlineExceeded):
                    client.forward(1, self.rows, timeout=0.05)
                self.assertIsNone(busy.end().error)
                self.assertEqual(client.forward(1, self.rows[:3]).output.shape, (3, 256))  # its slot and memory are free again

    def test_the_memory_of_a_call_that_gave_up_comes_back_when_the_server_is_through(self):
        size = 2 * self.rows.nbytes + (1 << 16)  # of one call
        with moed.Client(self.server.unix, transport="ring", session_bytes=size) as client:
            client.forward(1, self.rows[:1])
            with self.assertRaises(moed.DeadlineExceeded):
                client.forward(1, self.rows, timeout=0.02)

            def runs():
                try:
                    return client.forward(1, self.rows).transport == "ring"
                except moed.ResourceExhausted as error:
                    self.assertIn("free memory", error.details)
            wait_for(runs, "the memory")

    def test_a_full_queue_refuses_with_the_time_to_wait_and_retries_use_it(self):
        with moed.Client(self.server.unix, transport="rpc") as client:
            calls = self.occupy(client, 3)
            wait_for(lambda: client.status().queue.waiting >= 2 or any(call.error for call in calls), "a full queue")
            with self.assertRaises(moed.ResourceExhausted) as caught:
                for _ in range(3):
                    client.forward(1, self.rows)
            self.assertGreater(caught.exception.retry_after, 0)
            with moed.Client(self.server.unix, transport="rpc", retries=1000) as patient:
                self.assertEqual(patient.forward(1, self.rows[:2]).output.shape, (2, 256))

    def test_the_ring_tells_a_full_queue_too(self):
        with moed.Client(self.server.unix, transport="ring") as client:
            calls = [Background(lambda: client.forward(1, self.rows)) for _ in range(6)]
            kinds = {type(call.end().error) for call in calls}
            self.assertEqual(kinds, {type(None), moed.ResourceExhausted})


class Tokens(unittest.TestCase):
    def test_a_server_that_wants_a_token_gets_it_with_calls_and_sessions(self):
        folder = pathlib.Path(temporary_folder(self))
        (folder / "tokens").write_text("a-token-of-the-test\n")
        server = Server("--token-file", str(folder / "tokens"))
        self.addCleanup(server.close)
        for transport in ("rpc", "ring", "shared-memory"):
            with moed.Client(server.unix, transport=transport, token="a-token-of-the-test") as client:
                self.assertEqual(client.forward(1, Golden().x).transport, transport)
            for token in (None, "another-token-of-the-test"):
                with moed.Client(server.unix, transport=transport, token=token) as client:
                    with self.assertRaises(moed.Unauthenticated):
                        client.forward(1, Golden().x)

    @unittest.skipUnless(shutil.which("openssl"), "the program openssl is not installed")
    def test_tls_is_spoken_with_the_server_s_certificate_and_with_nobody_else(self):
        folder = temporary_folder(self)
        for name in ("cert", "other"):
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days",
                            "2", "-keyout", f"{folder}/{name}.key", "-out", f"{folder}/{name}", "-subj", "/CN=localhost", "-addext",
                            "subjectAltName=DNS:localhost,IP:127.0.0.1"], check=True, capture_output=True)
        server = Server("--tls-cert", f"{folder}/cert", "--tls-key", f"{folder}/cert.key")
        self.addCleanup(server.close)
        with moed.Client(server.tcp, tls_ca=f"{folder}/cert") as client:
            self.assertEqual(client.forward(1, Golden().x).output.shape, (48, 256))
        for more in ({"tls_ca": f"{folder}/other"}, {}):
            with moed.Client(server.tcp, timeout=20, **more) as client:
                with self.assertRaises(moed.Unavailable):
                    client.forward(1, Golden().x)


class Puppets:
    def __init__(self):
        self.now = 100.0

    def clock(self):
        return self.now


class Retries(unittest.TestCase):
    def attempts(self, more, timeout, chance=0.0):
        self.puppets = Puppets()
        return Attempts(more, timeout, self.puppets.clock, lambda: chance)

    def test_only_unavailable_and_resource_exhausted_are_tried_again(self):
        for kind in (moed.InvalidArgument, moed.NotFound, moed.DeadlineExceeded, moed.Internal, moed.Cancelled,
                     moed.Unauthenticated):
            self.assertIsNone(self.attempts(5, 60).delay(kind("")))
        for kind in (moed.Unavailable, moed.ResourceExhausted):
            self.assertIsNotNone(self.attempts(5, 60).delay(kind("")))

    def test_waits_double_up_to_two_seconds_and_end_with_the_attempts(self):
        attempts = self.attempts(8, None)
        waits = [attempts.delay(moed.Unavailable("")) for _ in range(9)]
        self.assertEqual(waits[:3] + waits[5:], [0.05, 0.1, 0.2, 1.6, 2.0, 2.0, None])

    def test_chance_takes_up_to_half_of_a_wait(self):
        self.assertEqual(self.attempts(1, 60, chance=1.0).delay(moed.Unavailable("")), 0.025)

    def test_what_the_server_says_counts_and_the_deadline_above_all(self):
        attempts = self.attempts(5, 10)
        self.assertEqual(attempts.delay(moed.ResourceExhausted("", retry_after=3.5)), 3.5)
        self.puppets.now += 3.5
        self.assertAlmostEqual(attempts.remaining(), 6.5)
        self.assertIsNone(attempts.delay(moed.ResourceExhausted("", retry_after=6.5)))
        self.puppets.now += 20
        self.assertGreater(attempts.remaining(), 0)  # a timeout that a call can have

    def test_without_retries_the_first_error_is_the_result(self):
        self.assertIsNone(self.attempts(0, 60).delay(moed.Unavailable("")))
        self.assertIsNone(self.attempts(3, None).remaining())
