"""The client for asyncio against a real moed."""
import asyncio
import unittest

import moed
import numpy as np
from moed.aio import AsyncClient
from support import Golden, Server, ServerCase, wait_for


class Async(ServerCase):
    def setUp(self):
        self.golden = Golden()
        with moed.Client(self.server.unix, transport="rpc") as client:
            self.wanted = client.forward(1, self.golden.x, self.golden.ids, self.golden.weights).output.tobytes()

    def test_every_transport_gives_the_bits_of_the_blocking_client(self):
        async def main(transport, way):
            g = self.golden
            async with AsyncClient(self.server.unix, transport=transport) as client:
                hidden = await client.allocate(g.x.shape)
                hidden[...] = g.x
                results = await asyncio.gather(*(client.forward(1, hidden, g.ids, g.weights) for _ in range(20)))
                self.assertEqual({(result.output.tobytes(), result.transport) for result in results}, {(self.wanted, way)})
        for transport, way in (("auto", "rpc"), ("rpc", "rpc"), ("ring", "ring"), ("shared-memory", "shared-memory")):
            asyncio.run(main(transport, way))

    def test_reports_and_errors_are_those_of_the_blocking_client(self):
        async def main():
            async with AsyncClient(self.server.unix) as client:
                with moed.Client(self.server.unix) as blocking:
                    self.assertEqual((await client.hello()).models, blocking.hello().models)
                    self.assertEqual((await client.explain(layer=1)).layers, blocking.explain(layer=1).layers)
                    self.assertEqual((await client.status()).models[0].path, blocking.status().models[0].path)
                self.assertTrue((await client.self_check(tokens=2)).passed)
                self.assertTrue((await client.health("ct-w4a16-g32-sym/1")).serving)
                self.assertEqual((await client.health("frob")).status, "SERVICE_UNKNOWN")
                with self.assertRaisesRegex(moed.NotFound, "99"):
                    await client.forward(99, self.golden.x)
                with self.assertRaisesRegex(moed.InvalidArgument, "timeout"):
                    await client.status(timeout=-1)
            with self.assertRaises(moed.FailedPrecondition):
                await client.status()
            async with AsyncClient("unix:/tmp/no-such-moed") as client:
                with self.assertRaisesRegex(moed.Unavailable, "server unix:/tmp/no-such-moed"):
                    await client.status()
        asyncio.run(main())


class SlowServer(unittest.TestCase):
    def test_cancelling_a_task_cancels_its_call_and_a_deadline_is_told(self):
        server = Server("--policy", "require:reference", "--max-batch-tokens", "64")
        self.addCleanup(server.close)
        rows = np.tile(Golden().x, (12, 1))

        async def main():
            async with AsyncClient(server.unix) as client:
                busy = asyncio.create_task(client.forward(1, rows))
                waiting = asyncio.create_task(client.forward(2, rows))
                while (await client.status()).queue.accepted < 2:
                    await asyncio.sleep(0.005)
                waiting.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await waiting
                with self.assertRaises(moed.DeadlineExceeded):
                    await client.forward(2, rows, timeout=0.05)
                self.assertEqual((await busy).output.shape, rows.shape)
        asyncio.run(main())
        with moed.Client(server.unix) as client:
            wait_for(lambda: client.status().queue.cancelled + client.status().queue.expired >= 2, "the calls to be dropped")
