"""Texts that a model writes are the same in process and through the service, also when the server dies meanwhile: then the call is
tried again within its time, or there is an exception."""
import threading

import torch

import moed
from models_support import DEEPSEEK, MODELS, SHARED_QUANTIZED, UNQUANTIZED, ModelCase, Server, generate, load
from moed.transformers import from_pretrained_without_experts

COUNT = 200


class Generation(ModelCase):
    def test_of_200_tokens_is_the_same_text(self):
        for name in UNQUANTIZED:
            want = generate(load(name), COUNT)
            self.assertEqual(len(want), COUNT)
            for router in ("model", "server"):
                with self.subTest(name, router=router):
                    self.assertEqual(generate(self.remote(name, router=router), COUNT), want)

    def test_of_several_sequences_at_once_is_the_same_text(self):
        prompt = torch.tensor([list((MODELS / "eval.txt").read_bytes()[at:at + 24]) for at in (8192, 9000, 10000)])
        texts = []
        for model in (load(DEEPSEEK), self.remote(DEEPSEEK)):
            model.generation_config.eos_token_id = None
            texts.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=40))
        self.assertEqual(texts[0].tolist(), texts[1].tolist())


class AtToken:
    """A stopping criterion that stops nothing, but does something once, after so many tokens."""

    def __init__(self, count, action):
        self._left, self._action = count, action

    def __call__(self, ids, scores, **unused):
        self._left -= 1
        if self._left == 0:
            self._action()
        return torch.zeros(len(ids), dtype=torch.bool)


class Restarts(ModelCase):
    def setUp(self):
        self.own = Server(f"{DEEPSEEK}={MODELS / DEEPSEEK}")
        self.addCleanup(self.own.close)

    def model(self, transport="auto", **options):
        client = moed.Client(self.own.address, transport=transport, **options)
        self.addCleanup(client.close)
        return from_pretrained_without_experts(MODELS / DEEPSEEK, client, dtype=torch.float32)

    def test_server_that_comes_back_between_two_tokens_changes_nothing(self):
        want = generate(load(DEEPSEEK), 60)
        for transport in ("auto", "rpc"):
            with self.subTest(transport):
                def restart():
                    self.own.kill()
                    self.own.start()
                got = generate(self.model(transport, retries=100), 60, stopping_criteria=[AtToken(20, restart)])
                self.assertEqual(got, want)

    def test_server_that_dies_and_comes_back_at_any_time_changes_nothing(self):
        want = generate(load(DEEPSEEK), COUNT)
        model, done, restarts = self.model(retries=1000), threading.Event(), []

        def restart():
            while not done.wait(0.15):
                self.own.kill()
                self.own.start()
                restarts.append(1)
        thread = threading.Thread(target=restart)
        thread.start()
        try:
            got = generate(model, COUNT)
        finally:
            done.set()
            thread.join()
        self.assertEqual(got, want)
        self.assertGreater(len(restarts), 0)

    def test_server_that_comes_back_with_other_weights_is_an_exception(self):
        for transport in ("auto", "rpc"):
            with self.subTest(transport):
                def restart():
                    self.own.kill()
                    self.own.start_with(f"{DEEPSEEK}={MODELS / SHARED_QUANTIZED}")
                self.own.kill()
                self.own.start_with(f"{DEEPSEEK}={MODELS / DEEPSEEK}")
                model = self.model(transport, retries=100)
                self.assert_refused(moed.FailedPrecondition, ("layer 1", "weights"),
                                    lambda: generate(model, 60, stopping_criteria=[AtToken(20, restart)]))

    def test_weights_that_are_swapped_are_an_exception_unless_they_are_the_same(self):
        def swap(name):
            with moed.Admin(self.own.admin_address) as admin:
                admin.swap(DEEPSEEK, str(MODELS / name))
        want = generate(load(DEEPSEEK), 60)
        self.assertEqual(generate(self.model(), 60, stopping_criteria=[AtToken(20, lambda: swap(DEEPSEEK))]), want)
        self.assert_refused(moed.FailedPrecondition, ("layer 1", "weights"),
                            lambda: generate(self.model(), 60, stopping_criteria=[AtToken(20, lambda: swap(SHARED_QUANTIZED))]))

    def test_server_that_stays_away_is_an_exception_within_the_calls_time(self):
        model = self.model(retries=1000, timeout=1.0)
        with self.assertRaises((moed.Unavailable, moed.DeadlineExceeded)):
            generate(model, 60, stopping_criteria=[AtToken(20, self.own.kill)])

    def test_without_retries_the_first_failure_is_an_exception(self):
        model = self.model()
        with self.assertRaises(moed.Error):
            generate(model, 60, stopping_criteria=[AtToken(20, self.own.kill)])
