"""Streams of forwards, blocking and for asyncio, against a real moed: answers, errors of one and of all, the window, every end;
and against a puppet of a server that does not say what it should."""
import asyncio
import concurrent.futures
import threading
import unittest

import grpc
import moed
import numpy as np
from moed import _connection, _items, _messages
from moed.aio import AsyncClient
from support import Background, Golden, Server, ServerCase, temporary_folder, wait_for

SLOW = ("--policy", "require:reference", "--batch-wait-us", "0", "--max-batch-tokens", "64")


def kinds_of_calls(golden):
    """Arguments of forwards of every kind, with the name of each."""
    g = golden
    routed = {"ids": g.ids, "weights": g.weights}
    return {
        "gate": {"hidden": g.x}, "ids": {"hidden": g.x, **routed}, "logits": {"hidden": g.x, "logits": g.logits},
        "bf16": {"hidden": g.bits, "dtype": "bf16", "output_dtype": "f32"}, "none": {"hidden": g.x[:0]},
        "routed only": {"hidden": g.x[:7], "routed_only": True}, "int8": {"hidden": moed.quantize(g.x, "int8"), **routed},
        "fp8": {"hidden": moed.quantize(g.x, "f8e4m3")}, "per slot": {"hidden": g.x, "per_slot": True, **routed},
    }


class Streams(ServerCase):
    def setUp(self):
        self.golden = Golden()
        self.client = moed.Client(self.server.unix)
        self.addCleanup(self.client.close)

    def test_answers_of_every_kind_of_call_are_to_the_bit_those_of_single_ones(self):
        calls = kinds_of_calls(self.golden)
        with moed.Client(self.server.unix, transport="rpc") as client, client.stream() as stream:
            answers = {name: stream.submit(1, **arguments) for name, arguments in calls.items()}
            for name, arguments in calls.items():
                got, wanted = answers[name].result(), client.forward(1, **arguments)
                self.assertEqual((got.output.tobytes(), got.output.shape, got.output.dtype, got.scheme, got.transport),
                                 (wanted.output.tobytes(), wanted.output.shape, wanted.output.dtype, wanted.scheme, "stream"), name)

    def test_outputs_go_where_out_says_and_the_routing_comes_back(self):
        g = self.golden
        with self.client.stream() as stream:
            outs = [self.client.allocate(g.x.shape) for _ in range(5)]
            answers = [stream.submit(2, g.x, g.ids, g.weights, out=out, return_routing=True) for out in outs]
        for out, answer in zip(outs, answers):
            self.assertIs(answer.result().output, out)
            self.assertTrue((answer.result().ids == g.ids).all())
            self.assertEqual(out.tobytes(), outs[0].tobytes())

    def test_an_error_is_that_of_its_request_alone(self):
        g = self.golden
        bad = g.ids.copy()
        bad[5, 2] = 16
        with self.client.stream() as stream:
            first = stream.submit(1, g.x)
            wrong = [stream.submit(99, g.x), stream.submit(1, g.x, bad, g.weights), stream.submit(1, g.x, model="frob")]
            with self.assertRaisesRegex(moed.InvalidArgument, "hidden"):
                stream.submit(1, g.x[0])
            last = stream.submit(1, g.x)
            for answer, kind, text in zip(wrong, (moed.NotFound, moed.InvalidArgument, moed.NotFound), ("99", "row 5", "frob")):
                with self.assertRaisesRegex(kind, text):
                    answer.result()
            self.assertEqual(first.result().output.tobytes(), last.result().output.tobytes())

    def test_request_ids_are_the_caller_s_or_none_and_one_at_a_time(self):
        x = self.golden.x
        with self.client.stream() as stream:
            named, plain = stream.submit(1, x, request_id="läuft"), [stream.submit(1, x) for _ in range(3)]
            self.assertEqual(named.result().request_id, "läuft")
            self.assertEqual([answer.result().request_id for answer in plain], [""] * 3)
            self.assertEqual(stream.submit(1, x, request_id="läuft").result().request_id, "läuft")
            clash = stream.submit(1, x, request_id="#5")  # the next of the stream's own
            self.assertEqual(stream.submit(1, x).result().request_id, "")
            clash.result()

    def test_threads_share_a_stream(self):
        g, threads = self.golden, 8
        inputs = [np.roll(g.x, at, axis=0) for at in range(threads)]
        wanted = [self.client.forward(1, x).output.tobytes() for x in inputs]
        wrong = []
        with self.client.stream(window=5) as stream:
            def work(at):
                answers = [stream.submit(1, inputs[at]) for _ in range(20)]
                wrong.extend(at for answer in answers if answer.result().output.tobytes() != wanted[at])
            workers = [threading.Thread(target=work, args=(at,)) for at in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        self.assertEqual(wrong, [])

    def test_the_end_of_the_with_waits_for_answers_and_nothing_is_taken_after_it(self):
        with self.client.stream() as stream:
            answers = [stream.submit(1, self.golden.x) for _ in range(40)]
        self.assertTrue(all(answer.done() and answer.exception() is None for answer in answers))
        stream.close()
        stream.cancel()
        with self.assertRaisesRegex(moed.FailedPrecondition, "the stream is closed"):
            stream.submit(1, self.golden.x)

    def test_answers_are_futures(self):
        with self.client.stream() as stream:
            answers = [stream.submit(1, self.golden.x[:rows]) for rows in range(1, 6)]
            rows = {answer.result().output.shape[0] for answer in concurrent.futures.as_completed(answers)}
            self.assertEqual(rows, {1, 2, 3, 4, 5})
            self.assertFalse(answers[0].cancel())
            seen = []
            stream.submit(99, self.golden.x).add_done_callback(lambda answer: seen.append(answer.exception().code))
        self.assertEqual(seen, [grpc.StatusCode.NOT_FOUND])

    def test_what_is_no_stream_is_refused(self):
        for transport in ("ring", "shared-memory"):
            with moed.Client(self.server.unix, transport=transport) as client:
                with self.assertRaisesRegex(moed.InvalidArgument, "transport: wanted auto or rpc for a stream"):
                    client.stream()
        for more, text in (({"window": 0}, "window"), ({"window": 1.5}, "window"), ({"timeout": -1}, "timeout")):
            with self.assertRaisesRegex(moed.InvalidArgument, text):
                self.client.stream(**more)
        self.client.close()
        with self.assertRaises(moed.FailedPrecondition):
            self.client.stream()

    def test_without_a_server_every_answer_is_unavailable(self):
        with moed.Client("unix:/tmp/no-such-moed") as client, client.stream() as stream:
            for _ in range(2):  # known when it is submitted, or not yet
                with self.assertRaisesRegex(moed.Unavailable, "server unix:/tmp/no-such-moed: "):
                    stream.submit(1, self.golden.x).result()
            with self.assertRaises(moed.Unavailable):
                stream.submit(1, self.golden.x)

    def test_asyncio_gives_the_bits_of_the_blocking_stream_and_errors_of_one_alone(self):
        calls = kinds_of_calls(self.golden)
        wanted = {name: self.client.forward(1, **arguments).output.tobytes() for name, arguments in calls.items()}

        async def main():
            async with AsyncClient(self.server.unix) as client:
                async with client.stream(window=3) as stream:
                    answers = {name: await stream.submit(1, **arguments) for name, arguments in calls.items()}
                    wrong = await stream.submit(99, self.golden.x, request_id="mine")
                    with self.assertRaisesRegex(moed.NotFound, "99"):
                        await wrong
                    with self.assertRaisesRegex(moed.InvalidArgument, "per_slot"):
                        await stream.submit(1, self.golden.x, per_slot=True)
                    results = await asyncio.gather(*answers.values())
                    await asyncio.gather(*[asyncio.create_task(stream.submit(1, self.golden.x)) for _ in range(40)])
                self.assertEqual({name: result.output.tobytes() for name, result in zip(answers, results)}, wanted)
                await stream.close()
                with self.assertRaisesRegex(moed.FailedPrecondition, "closed"):
                    await stream.submit(1, self.golden.x)
                self.assertEqual((await client.forward(1, self.golden.x)).output.tobytes(), wanted["gate"])
            async with AsyncClient(self.server.unix, transport="ring") as client:
                with self.assertRaisesRegex(moed.InvalidArgument, "transport"):
                    client.stream()
            async with AsyncClient("unix:/tmp/no-such-moed") as client, client.stream() as stream:
                with self.assertRaisesRegex(moed.Unavailable, "server unix:/tmp/no-such-moed: "):
                    await (await stream.submit(1, self.golden.x))
        asyncio.run(main())


class SlowStreams(ServerCase):
    options = SLOW

    def setUp(self):
        self.rows = np.tile(Golden().x, (12, 1))  # takes the reference some tenths of a second
        self.client = moed.Client(self.server.unix)
        self.addCleanup(self.client.close)

    def test_a_full_window_holds_up_who_submits_until_an_answer_came(self):
        with self.client.stream(window=2) as stream:
            answers = [stream.submit(1, self.rows) for _ in range(2)]
            with self.assertRaisesRegex(moed.DeadlineExceeded, "2 requests are under way"):
                stream.submit(1, self.rows, timeout=0.02)
            late = Background(lambda: stream.submit(1, self.rows[:1]))
            self.assertEqual(late.end().result.result().output.shape, (1, 256))
            self.assertTrue(any(answer.done() for answer in answers))

    def test_a_deadline_is_its_request_s_own(self):
        with self.client.stream() as stream:
            first, late = stream.submit(1, self.rows), stream.submit(1, self.rows, timeout=0.02)
            with self.assertRaises(moed.DeadlineExceeded):
                late.result()
            self.assertEqual(first.result().output.shape, self.rows.shape)

    def test_an_exception_cancels_what_is_under_way(self):
        before = self.client.status().queue
        with self.assertRaisesRegex(RuntimeError, "enough"):
            with self.client.stream() as stream:
                answers = [stream.submit(1, self.rows) for _ in range(3)]
                wait_for(lambda: self.client.status().queue.accepted >= before.accepted + 3, "the requests")
                raise RuntimeError("enough")
        for answer in answers:
            with self.assertRaisesRegex(moed.Cancelled, "the stream was cancelled"):
                answer.result()
        with self.assertRaises(moed.Cancelled):
            stream.submit(1, self.rows)
        wait_for(lambda: self.client.status().queue.cancelled >= before.cancelled + 2, "the drops")

    def test_closing_the_client_ends_its_streams(self):
        stream = self.client.stream()
        answer = stream.submit(1, self.rows)
        self.client.close()
        with self.assertRaises(moed.Cancelled):
            answer.result()
        stream.close()

    def test_a_server_that_is_killed_ends_every_answer_and_the_next_stream_reaches_the_next_server(self):
        server = Server(*SLOW)
        self.addCleanup(server.close)
        with moed.Client(server.unix) as client:
            with client.stream(window=3) as stream:
                answers = [stream.submit(1, self.rows) for _ in range(3)]
                held_up = Background(lambda: stream.submit(1, self.rows))
                wait_for(lambda: client.status().queue.accepted >= 3, "the requests")
                server.kill()
                for answer in answers:
                    with self.assertRaisesRegex(moed.Unavailable, "server unix:"):
                        answer.result()
                self.assertIsInstance(held_up.end().error, moed.Unavailable)
            server.start()

            def answers_again():
                with client.stream() as stream:
                    return stream.submit(1, self.rows[:1]).exception() is None
            wait_for(answers_again, "the connection")

    def test_asyncio_has_window_deadline_and_cancellation_too(self):
        async def main():
            async with AsyncClient(self.server.unix) as client:
                async with client.stream() as stream:
                    first, late = await stream.submit(1, self.rows), await stream.submit(1, self.rows, timeout=0.02)
                    with self.assertRaises(moed.DeadlineExceeded):
                        await late
                    self.assertEqual((await first).output.shape, self.rows.shape)
                async with client.stream(window=2) as stream:
                    first, second = await stream.submit(1, self.rows), await stream.submit(1, self.rows)
                    with self.assertRaisesRegex(moed.DeadlineExceeded, "window is full"):
                        await stream.submit(1, self.rows, timeout=0.01)
                    waits = asyncio.create_task(stream.submit(1, self.rows))
                    await asyncio.sleep(0)
                    waits.cancel()  # who does not want to wait for room any more leaves the stream as it is
                    first.cancel()
                    self.assertEqual((await (await stream.submit(1, self.rows[:2]))).output.shape, (2, 256))
                    self.assertEqual((await second).output.shape, self.rows.shape)
                with self.assertRaises(RuntimeError):
                    async with client.stream() as stream:
                        answer = await stream.submit(1, self.rows)
                        raise RuntimeError
                with self.assertRaisesRegex(moed.Cancelled, "the stream was cancelled"):
                    await answer
                stream = client.stream()
                answer = await stream.submit(1, self.rows)
            with self.assertRaises(moed.Cancelled):
                await answer
            await stream.close()
        asyncio.run(main())


class Puppet:
    """A server whose ForwardStream does with requests what `serve` says: a function from the iterator of requests to one of
    answers, both bytes."""

    def __init__(self, case, serve):
        self.address = f"unix:{temporary_folder(case)}/s"
        self._server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
        handler = grpc.stream_stream_rpc_method_handler(lambda requests, context: serve(requests))
        _, service, method = _connection.FORWARD_STREAM.split("/")
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        self._server.add_insecure_port(self.address)
        self._server.start()
        case.addCleanup(self._server.stop, None)


class Puppets(unittest.TestCase):
    def setUp(self):
        self.x = np.ones((2, 4), np.float32)
        self.grace, _items.GRACE = _items.GRACE, 0.05
        for module in (moed.stream, moed.aio_stream):
            module.GRACE = 0.05
        self.addCleanup(self.restore)

    def restore(self):
        for module in (_items, moed.stream, moed.aio_stream):
            module.GRACE = self.grace

    def test_who_asks_a_server_that_never_answers_is_told_after_the_deadline(self):
        over = threading.Event()
        self.addCleanup(over.set)

        def serve(requests):
            over.wait(60)
            yield from ()
        puppet = Puppet(self, serve)
        with moed.Client(puppet.address, timeout=0.05) as client:
            with client.stream() as stream:
                answers = [stream.submit(1, self.x) for _ in range(2)]
                with self.assertRaisesRegex(moed.DeadlineExceeded, "on the stream within the request's timeout"):
                    answers[0].result()
            self.assertIsInstance(answers[1].exception(), moed.Error)  # the end of the with gave up too

        async def main():
            async with AsyncClient(puppet.address, timeout=0.05) as client:
                async with client.stream() as stream:
                    answer = await stream.submit(1, self.x)
                with self.assertRaises(moed.DeadlineExceeded):
                    await answer
        asyncio.run(main())

    def test_requests_tell_their_deadline_and_answers_are_matched_whatever_their_order(self):
        def serve(requests):
            both = [_messages.ForwardRequest.FromString(next(requests)) for _ in range(2)]
            for request in reversed(both):
                answer = _messages.ForwardResponse(request_id=request.request_id, backend=str(request.timeout_us))
                answer.output.dtype, answer.output.data = 1, request.hidden.data
                answer.output.shape.extend(request.hidden.shape)
                yield answer.SerializeToString()
        with moed.Client(Puppet(self, serve).address) as client, client.stream(timeout=7) as stream:
            first, second = stream.submit(1, self.x), stream.submit(1, self.x * 2, timeout=2.5)
            self.assertEqual((first.result().backend, second.result().backend), ("7000000", "2500000"))
            self.assertEqual((first.result().output[0, 0], second.result().output[0, 0]), (1, 2))

    def test_answers_that_are_none_end_the_stream_and_every_answer_with_it(self):
        wrong_size = _messages.ForwardResponse(request_id="#1").SerializeToString()
        unknown = _messages.ForwardResponse(request_id="x").SerializeToString()
        refused = _messages.ForwardResponse()
        refused.status.code, refused.status.message = 8, "no memory for this request"
        for message, kind, text in ((b"\xff\xff", moed.Internal, "no ForwardResponse"),
                                    (wrong_size, moed.Internal, "output: wanted"), (unknown, moed.Internal, "to no request"),
                                    (refused.SerializeToString(), moed.ResourceExhausted, "no memory for this request"),
                                    (None, moed.Unavailable, "the server ended the stream")):
            def serve(requests):
                next(requests)
                if message is not None:
                    yield message
            with moed.Client(Puppet(self, serve).address, timeout=5) as client, client.stream() as stream:
                with self.assertRaisesRegex(kind, text):
                    stream.submit(1, self.x).result()

            async def main():
                async with AsyncClient(Puppet(self, serve).address, timeout=5) as client, client.stream() as stream:
                    with self.assertRaisesRegex(kind, text):
                        await (await stream.submit(1, self.x))
            asyncio.run(main())

    def test_a_request_that_no_message_can_be_is_refused_and_the_stream_lives(self):
        def serve(requests):
            for request in requests:
                name = _messages.ForwardRequest.FromString(request).request_id
                answer = _messages.ForwardResponse(request_id=name)
                answer.status.code, answer.status.message = 5, name
                yield answer.SerializeToString()
        with moed.Client(Puppet(self, serve).address) as client, client.stream() as stream:
            limit, _connection.MAX_MESSAGE = _connection.MAX_MESSAGE, 1000
            try:
                with self.assertRaisesRegex(moed.ResourceExhausted, "at most 1000 bytes, got"):
                    stream.submit(1, np.zeros((300, 1), np.float32))
            finally:
                _connection.MAX_MESSAGE = limit
            with self.assertRaises(moed.NotFound):
                stream.submit(1, self.x).result()
