"""Models of transformers with their experts on a server: the same numbers, by both routers, with shared experts on either side,
and refusals where model and server do not fit together."""
import gc
import weakref

import torch
import transformers

import moed
from models_support import DEEPSEEK, MODELS, UNQUANTIZED, ModelCase, Server, load, tokens
from moed.transformers import RemoteMoe, attach


def logits(model, prompt=None):
    with torch.no_grad():
        return model(tokens() if prompt is None else prompt).logits.float()


def apart(got, want):
    return float((got - want).norm() / want.norm())


class Attach(ModelCase):
    def test_gives_the_logits_of_the_whole_model_with_either_router(self):
        for name in UNQUANTIZED:
            want = logits(load(name))
            for router in ("model", "server"):
                with self.subTest(name, router=router):
                    self.assertLess(apart(logits(self.attached(name, router=router)), want), 1e-5)

    def test_counts_the_shared_expert_once_wherever_it_runs(self):
        want = logits(load(DEEPSEEK))
        for shared in ("model", "server"):
            for router in ("model", "server"):
                with self.subTest(shared=shared, router=router):
                    model = self.attached(DEEPSEEK, shared=shared, router=router)
                    self.assertEqual(hasattr(model.model.layers[1].mlp, "shared_experts"), shared == "model")
                    self.assertLess(apart(logits(model), want), 1e-5)

    def test_takes_batches_with_padding(self):
        model, whole = self.attached("tiny-mixtral-bf16"), load("tiny-mixtral-bf16")
        ids = torch.cat([tokens(16), tokens(16, start=9000)])
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        with torch.no_grad():
            got, want = (one(ids, attention_mask=mask).logits[:, -1] for one in (model, whole))
        self.assertLess(apart(got, want), 1e-5)

    def test_some_layers_may_stay(self):
        model = self.attached(DEEPSEEK, layers=[2])
        self.assertEqual((model.moed.layers, model.moed.local_layers), ([2], [1]))
        self.assertLess(apart(logits(model), logits(load(DEEPSEEK))), 1e-5)

    def test_says_what_runs_where(self):
        model = self.attached(DEEPSEEK, layers=[1], wire="bf16", router="server")
        text = repr(model.moed)
        for word in ("layers 1 on", self.server.address, DEEPSEEK, "local MoE layers 2", "router of the server",
                     "shared experts of the server", "wire bf16"):
            self.assertIn(word, text)
        self.assertIn("RemoteMoe", str(model))
        self.assertIn("layer=1", str(model))

    def test_dtype_on_the_wire_is_the_models_unless_said_otherwise(self):
        want = logits(load(DEEPSEEK))
        errors = {wire: apart(logits(self.attached(DEEPSEEK, wire=wire)), want) for wire in (None, "f32", "f16", "bf16")}
        self.assertEqual(errors[None], errors["f32"])
        self.assertLess(errors["f32"], 1e-5)
        self.assertTrue(1e-5 < errors["bf16"] < 2e-2, errors)
        self.assertLess(errors["f16"], 2e-2)

    def test_bfloat16_models_send_bfloat16(self):
        model = load(DEEPSEEK, torch.bfloat16)
        want = logits(model)
        attach(model, self.client, model_name=DEEPSEEK)
        self.assertLess(apart(logits(model), want), 3e-2)

    def test_frees_the_experts(self):
        model = load(DEEPSEEK)
        gone = [weakref.ref(parameter) for name, parameter in model.named_parameters() if "experts" in name]
        self.assertGreater(len(gone), 4)
        attach(model, self.client, model_name=DEEPSEEK)
        gc.collect()
        self.assertEqual([ref for ref in gone if ref() is not None], [])
        self.assertFalse([name for name, _ in model.named_parameters() if "experts" in name])

    def test_records_router_logits_with_the_models_router(self):
        model = self.attached("tiny-mixtral-bf16")
        with torch.no_grad():
            output = model(tokens(), output_router_logits=True)
        self.assertEqual(output.router_logits[0].shape, (64, 8))

    def test_forward_that_records_gradients_is_refused(self):
        model = self.attached(DEEPSEEK)
        self.assert_refused(RuntimeError, ["layer 1", "torch.no_grad()"], lambda: model(tokens()))
        with torch.inference_mode():
            model(tokens())


class Refusals(ModelCase):
    def check(self, kind, words, model=None, client=None, **options):
        model = load(DEEPSEEK) if model is None else model
        self.assert_refused(kind, words, lambda: attach(model, client or self.client, **{"model_name": DEEPSEEK, **options}))
        self.assertFalse(any(isinstance(module, RemoteMoe) for module in model.modules()))

    def test_options(self):
        self.check(moed.InvalidArgument, ["router", "'mine'"], router="mine")
        self.check(moed.InvalidArgument, ["shared", "'both'"], shared="both")
        self.check(moed.InvalidArgument, ["wire", "'f64'"], wire="f64")
        self.check(moed.InvalidArgument, ["layers", "1, 2", "got 0, 7"], layers=[0, 1, 7])
        self.check(moed.InvalidArgument, ["layers"], layers=[])

    def test_names_that_the_server_does_not_have(self):
        self.check(moed.InvalidArgument, ["model_name", "\"other\"", DEEPSEEK], model_name="other")
        self.check(moed.InvalidArgument, ["model_name", DEEPSEEK], model_name="")

    def test_models_without_experts(self):
        config = transformers.LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                                          vocab_size=256)
        self.check(moed.InvalidArgument, ["model", "MixtralSparseMoeBlock", "LlamaForCausalLM"],
                   model=transformers.LlamaForCausalLM(config))

    def test_servers_of_another_model(self):
        self.check(moed.FailedPrecondition, ["layers", "wanted 1, 2", "got 0"], model_name="tiny-mixtral-bf16")
        self.check(moed.FailedPrecondition, ["layers", "got 0, 1"], model_name="tiny-qwen3moe-bf16")
        self.check(moed.FailedPrecondition, ["layer 0, E", "wanted 16", "got 8"], model=load("tiny-qwen3moe-bf16"), layers=[0],
                   model_name="tiny-mixtral-bf16")
        self.check(moed.FailedPrecondition, ["layer 0, H", "wanted 288", "got 256"], model=load("tiny-gptoss-bf16"), layers=[0],
                   model_name="tiny-mixtral-bf16")

    def test_servers_of_another_k(self):
        model = load(DEEPSEEK)
        model.model.layers[2].mlp.gate.top_k = 3
        self.check(moed.FailedPrecondition, ["layer 2, k", "wanted 3", "got 4"], model=model)

    def test_servers_without_the_shared_expert(self):
        self.check(moed.FailedPrecondition, ["layer 1, shared expert", "shared=\"model\""], layers=[1],
                   model_name="tiny-qwen3moe-bf16")

    def test_servers_of_some_experts(self):
        server = Server(f"{DEEPSEEK}={MODELS / DEEPSEEK}", options=("--experts", "0:8"))
        self.addCleanup(server.close)
        with moed.Client(server.address) as client:
            self.check(moed.FailedPrecondition, ["experts there", "wanted 0:16", "got 0:8"], client=client)

    def test_servers_that_are_not_there(self):
        with moed.Client("unix:/tmp/moed-nobody-listens-here", timeout=2) as client:
            self.check(moed.Error, ["moed-nobody-listens-here"], client=client)
