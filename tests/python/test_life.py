"""Sessions and connections from their beginning to every end: closed, forgotten, killed on either side, interrupted."""
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import unittest

import moed
import numpy as np
from moed import _session
from support import GUARD, Background, Golden, Server, ServerCase, python_environment, wait_for

SLOW = ("--policy", "require:reference", "--max-batch-tokens", "64")


def start(program, *arguments):
    """Another process of this client; `program` is its text."""
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), *arguments], env=python_environment(),
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


class OneSession(ServerCase):
    """A server that has one session at a time: whoever can open one shows that the last one is over."""
    options = ("--sessions", "1")

    def setUp(self):
        self.x = Golden().x

    def can_open(self):
        with moed.Client(self.server.unix, transport="ring") as client:
            try:
                client.forward(1, self.x)
                return True
            except moed.ResourceExhausted as error:
                self.assertIn("1 may be", error.details)
                return False

    def test_who_gets_no_session_calls_by_message_or_is_told(self):
        with moed.Client(self.server.unix, transport="ring") as first, moed.Client(self.server.unix) as second:
            wait_for(lambda: self.opened(first), "the session")
            self.assertFalse(self.can_open())
            self.assertEqual(second.forward(1, self.x).transport, "rpc")

    def opened(self, client):
        try:
            return client.forward(1, self.x).transport == "ring"
        except moed.ResourceExhausted:
            return False  # that of the test before is not over yet

    def test_a_client_that_is_closed_or_forgotten_ends_its_session(self):
        client = moed.Client(self.server.unix, transport="ring")
        wait_for(lambda: self.opened(client), "the session")
        client.close()
        wait_for(self.can_open, "the end of the session")
        client = moed.Client(self.server.unix, transport="ring")
        wait_for(lambda: self.opened(client), "the session")
        del client
        gc.collect()
        wait_for(self.can_open, "the end of the session")

    def test_a_program_that_ends_in_any_way_ends_its_session(self):
        program = """
            import sys, os, time, moed, numpy
            client = moed.Client(sys.argv[1], transport="ring")
            while True:
                try:
                    client.forward(1, numpy.zeros((1, 256), numpy.float32))
                    break
                except moed.ResourceExhausted:
                    time.sleep(0.01)
            array = client.allocate((4, 256))
            print("open", flush=True)
            if sys.argv[2] == "raise":
                raise SystemExit("enough")
            if sys.argv[2] == "wait":
                time.sleep(1000)
        """
        for end in ("raise", "wait"):
            process = start(program, self.server.unix, end)
            self.addCleanup(process.communicate)
            self.assertEqual(process.stdout.readline(), "open\n")
            if end == "wait":
                self.assertFalse(self.can_open())
                process.kill()
            process.wait(GUARD)
            wait_for(self.can_open, f"the end of the session of a program that does {end}")
            self.assertNotIn("Exception ignored", process.stderr.read())


class KilledServers(unittest.TestCase):
    def setUp(self):
        self.x = Golden().x
        self.server = Server(*SLOW)
        self.addCleanup(self.server.close)

    def test_calls_under_way_get_unavailable_and_later_ones_reach_the_next_server(self):
        rows = np.tile(self.x, (16, 1))
        for transport in ("ring", "shared-memory", "rpc"):
            with self.subTest(transport=transport), moed.Client(self.server.unix, transport=transport) as client:
                client.forward(1, self.x[:1])
                calls = [Background(lambda: client.forward(1, rows)) for _ in range(3)]
                wait_for(lambda: client.status().queue.accepted >= client.status().queue.finished + 2, "calls under way")
                self.server.kill()
                for call in calls:
                    self.assertIsInstance(call.end().error, moed.Unavailable)
                    self.assertIn("server unix:", str(call.error))
                with self.assertRaises(moed.Unavailable):
                    client.forward(1, self.x[:1])
                self.server.start()
                again = moed.Client(self.server.unix, transport=transport, retries=100)
                self.addCleanup(again.close)
                again.forward(1, self.x[:1])
                wait_for(lambda: self.answers(client), "the connection")

    def answers(self, client):
        try:
            return client.forward(1, self.x[:1]).output.shape == (1, 256)
        except moed.Unavailable:
            return False

    def test_retries_bridge_a_restart(self):
        with moed.Client(self.server.unix, retries=1000) as client:
            client.forward(1, self.x[:1])
            self.server.kill()
            call = Background(lambda: client.forward(1, self.x[:1]))
            time.sleep(0.2)  # lets it fail once; the claim holds whether it did or not
            self.server.start()
            self.assertIsNone(call.end().error)

    def test_closing_the_client_ends_calls_of_other_threads(self):
        rows = np.tile(self.x, (16, 1))
        for transport in ("ring", "rpc", "shared-memory"):
            client = moed.Client(self.server.unix, transport=transport)
            client.forward(1, self.x[:1])
            accepted = client.status().queue.accepted
            call = Background(lambda: client.forward(1, rows))
            with moed.Client(self.server.unix, transport="rpc") as other:
                wait_for(lambda: other.status().queue.accepted > accepted, "the call to be under way")
                client.close()
                self.assertIsInstance(call.end().error, moed.Cancelled, transport)


class Interrupts(ServerCase):
    options = SLOW

    def test_ctrl_c_ends_a_wait_and_leaves_nothing_behind(self):
        program = """
            import sys, moed, numpy
            client = moed.Client(sys.argv[1], transport=sys.argv[2])
            small, large = numpy.zeros((1, 256), numpy.float32), numpy.zeros((1200, 256), numpy.float32)
            client.forward(1, small)
            print("begins", flush=True)
            try:
                client.forward(1, large)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            print(client.forward(1, small).output.shape, flush=True)
        """
        for transport in ("ring", "rpc"):
            with self.subTest(transport=transport), moed.Client(self.server.unix, transport="rpc") as watcher:
                before = watcher.status().queue.accepted
                process = start(program, self.server.unix, transport)
                self.assertEqual(process.stdout.readline(), "begins\n")
                wait_for(lambda: watcher.status().queue.accepted >= before + 2, "the call to be under way")
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=GUARD)
                self.assertEqual((out, process.returncode), ("interrupted\n(1, 256)\n", 0), err)

                def idle():
                    queue = watcher.status().queue
                    return queue.waiting == 0 and queue.accepted == queue.finished + queue.cancelled + queue.expired
                wait_for(idle, "an idle server")

    def test_an_interrupted_message_is_dropped_by_the_server_before_its_next_piece(self):
        program = """
            import sys, moed, numpy
            client = moed.Client(sys.argv[1], transport="rpc")
            try:
                client.forward(2, numpy.zeros((6000, 256), numpy.float32))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            sys.stdin.read()  # the connection stays
        """
        with moed.Client(self.server.unix, transport="rpc") as client:
            before = client.status().queue
            process = start(program, self.server.unix)
            self.addCleanup(process.communicate)
            wait_for(lambda: client.status().queue.accepted > before.accepted, "the call to be under way")
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.stdout.readline(), "interrupted\n")
            wait_for(lambda: client.status().queue.cancelled == before.cancelled + 1, "the drop")
            self.assertIsNone(process.poll())


class Slots(ServerCase):
    options = ("--deterministic",)

    def setUp(self):
        self.x = Golden().x

    def test_without_a_free_slot_auto_sends_a_message_and_ring_refuses(self):
        for transport in ("auto", "ring"):
            with moed.Client(self.server.unix, transport=transport) as client:
                client.forward(1, self.x)
                for use in client._sessions._session._uses:
                    use.busy = True
                if transport == "auto":
                    self.assertEqual(client.forward(1, self.x).transport, "rpc")
                else:
                    with self.assertRaisesRegex(moed.ResourceExhausted, "free slot"):
                        client.forward(1, self.x)

    def test_every_slot_and_more_calls_than_fit_a_word_are_used_again(self):
        with moed.Client(self.server.unix, transport="ring") as client:
            wanted = client.forward(1, self.x).output.tobytes()
            for use in client._sessions._session._uses:
                use.sequence = 2**32 - 3
            for _ in range(2 * _session.SLOTS):
                self.assertEqual(client.forward(1, self.x).output.tobytes(), wanted)
            self.assertLess(client._sessions._session._uses[0].sequence, 2**31)

    def test_an_interrupt_at_any_point_of_a_post_leaves_no_slot_busy(self):
        # Before and after each word that a post writes.
        with moed.Client(self.server.unix, transport="ring") as client:
            wanted = client.forward(1, self.x).output.tobytes()
            session = client._sessions._session
            words = session._words

            class Interrupting:
                left = 0

                def __getitem__(self, at):
                    return words[at]

                def __setitem__(self, at, value):
                    Interrupting.left -= 1
                    if Interrupting.left == 0:
                        raise KeyboardInterrupt
                    words[at] = value
                    Interrupting.left -= 1
                    if Interrupting.left == 0:
                        raise KeyboardInterrupt
            for point in range(1, 7):
                Interrupting.left = point
                session._words = Interrupting()
                try:
                    client.forward(1, self.x)
                except KeyboardInterrupt:
                    pass
                session._words = words
                for _ in range(2):
                    self.assertEqual(client.forward(1, self.x).output.tobytes(), wanted)

                def is_free():
                    session.reap()
                    return not any(use.busy or use.keep for use in session._uses)
                wait_for(is_free, "the slot")

    def test_a_child_of_fork_opens_a_session_of_its_own_and_leaves_its_parent_s_alone(self):
        with moed.Client(self.server.unix, transport="ring") as client:
            client.forward(1, self.x)
            session = client._sessions._session
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if not session.alive() else 2
                    session.close()
                finally:
                    os._exit(code)
            self.assertEqual(os.waitpid(child, 0)[1], 0)
            self.assertTrue(session.alive())
            self.assertEqual(client.forward(1, self.x).transport, "ring")
