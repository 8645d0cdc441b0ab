"""Models are loaded without their experts: nothing of them is read, whatever they are and wherever they lie."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import safetensors.torch
import torch

import moed
from models_support import (DEEPSEEK, GUARD, MODELS, SHARED_QUANTIZED, UNQUANTIZED, ModelCase, checkpoints, folder_of, load,
                            tokens)
from moed.transformers import from_pretrained_without_experts
from moed.transformers._loading import Checkpoint

BIG = 2 << 30  # bytes of expert weights: a process that read them would grow by as much
MEASURED = """
import resource, sys
import torch, moed, moed.transformers as remote
path, address = sys.argv[1:]
with moed.Client(address) as client:
    remote.from_pretrained_without_experts("{small}", client, model_name="{name}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    remote.from_pretrained_without_experts(path, client, model_name="{name}")
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def is_expert(name):
    return ".experts." in name


def write_sparse(path, tensors, experts):
    """A safetensors file of these tensors and of `experts`, {name: [dtype, shape, bytes]}, whose bytes are holes in the file."""
    header, end, data = {}, 0, []
    for name, tensor in tensors.items():
        bits = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        dtype = {torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + len(bits)]}
        data.append(bits)
        end += len(bits)
    for name, (dtype, shape, size) in experts.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + b"".join(data))
        file.truncate(8 + len(text) + end)


class Loading(ModelCase):
    def logits(self, model):
        with torch.no_grad():
            return model(tokens()).logits

    def load_from(self, path, name, **options):
        return from_pretrained_without_experts(path, self.client, model_name=name, dtype=torch.float32, **options)

    def test_every_checkpoint_loads_and_answers(self):
        for name in checkpoints():
            with self.subTest(name):
                model = self.remote(name)
                self.assertFalse([one for one, _ in model.named_parameters() if is_expert("." + one)])
                self.assertTrue(self.logits(model).isfinite().all())

    def test_gives_what_from_pretrained_and_attach_give(self):
        for name in UNQUANTIZED:
            with self.subTest(name):
                self.assertTrue(torch.equal(self.logits(self.remote(name)), self.logits(self.attached(name))))

    def test_dtype_is_the_checkpoints_unless_said_otherwise(self):
        model = from_pretrained_without_experts(MODELS / DEEPSEEK, self.client, model_name=DEEPSEEK)
        self.assertEqual(model.dtype, torch.bfloat16)
        gate = model.model.layers[1].mlp.gate  # float32 whatever the model is, as in transformers
        self.assertEqual((gate.weight.dtype, gate.e_score_correction_bias.dtype), (torch.float32, torch.float32))
        want = load(DEEPSEEK, torch.bfloat16)
        self.assertTrue(torch.equal(want.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight))
        self.assertLess(float((self.logits(model) - self.logits(want)).norm() / self.logits(want).norm()), 3e-2)

    def test_experts_of_nothing_but_nan_are_not_noticed(self):
        with folder_of(DEEPSEEK) as folder:
            file = folder / "model.safetensors"
            tensors = safetensors.torch.load_file(file)
            poisoned = {name: torch.full_like(one, torch.nan) if is_expert(name) else one for name, one in tensors.items()}
            self.assertGreater(sum(map(is_expert, tensors)), 90)
            safetensors.torch.save_file(poisoned, file)
            got = self.logits(self.load_from(folder, DEEPSEEK))
        self.assertTrue(torch.equal(got, self.logits(self.remote(DEEPSEEK))))

    def test_files_that_have_only_experts_may_be_missing(self):
        name = "ct-w4a16-g32-sharded"
        index = json.loads((MODELS / name / "model.safetensors.index.json").read_text())["weight_map"]
        needed = {file for tensor, file in index.items() if not is_expert(tensor)}
        only_experts = set(index.values()) - needed
        self.assertTrue(only_experts)
        with folder_of(name, leave_out=only_experts) as folder:
            got = self.logits(self.load_from(folder, name))
        self.assertTrue(torch.equal(got, self.logits(self.remote(name))))
        missing = min(needed)
        with folder_of(name, leave_out={missing}) as folder:
            self.assert_refused(moed.NotFound, ["wanted file", missing], lambda: self.load_from(folder, name))

    def test_needs_no_memory_for_experts(self):
        name = "tiny-mixtral-bf16"
        with folder_of(name) as folder:
            tensors = safetensors.torch.load_file(folder / "model.safetensors")
            rest = {key: one for key, one in tensors.items() if not is_expert(key)}
            experts = {key: ["BF16", [BIG // 2 // 24, 1], BIG // 2 // 24 * 2] for key in tensors if is_expert(key)}
            write_sparse(folder / "model.safetensors", rest, experts)
            self.assertGreater((folder / "model.safetensors").stat().st_size, BIG * 0.9)
            done = subprocess.run([sys.executable, "-c", MEASURED.format(name=name, small=MODELS / name), str(folder),
                                   self.server.address], capture_output=True, text=True, timeout=GUARD, env=os.environ)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(int(done.stdout) * 1024, BIG / 16)

    def test_shared_expert_that_is_quantized_runs_on_the_server_only(self):
        self.assertTrue(self.logits(self.remote(SHARED_QUANTIZED, shared="server")).isfinite().all())
        self.assert_refused(moed.InvalidArgument, ["shared_experts", "run on the server"],
                            lambda: self.remote(SHARED_QUANTIZED, shared="model"))

    def test_shared_expert_that_is_plain_may_run_here(self):
        name = "ct-w4a16-g32-sym"
        here, there = self.logits(self.remote(name, shared="model")), self.logits(self.remote(name, shared="server"))
        self.assertLess(float((here - there).norm() / there.norm()), 1e-5)

    def test_layers_cannot_stay(self):
        self.assert_refused(moed.InvalidArgument, ["layers", "got [1]"], lambda: self.remote(DEEPSEEK, layers=[1]))

    def test_tied_embeddings_are_read_once(self):
        with folder_of("tiny-qwen3moe-bf16") as folder:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
            tensors = safetensors.torch.load_file(folder / "model.safetensors")
            del tensors["lm_head.weight"]
            safetensors.torch.save_file(tensors, folder / "model.safetensors")
            model = self.load_from(folder, "tiny-qwen3moe-bf16")
        self.assertIs(model.lm_head.weight, model.model.embed_tokens.weight)
        self.assertTrue(self.logits(model).isfinite().all())


class Refusals(ModelCase):
    def refuse(self, kind, words, change):
        with folder_of(DEEPSEEK) as folder:
            tensors = safetensors.torch.load_file(folder / "model.safetensors")
            change(folder, tensors)
            if tensors and (folder / "model.safetensors").exists():
                safetensors.torch.save_file(tensors, folder / "model.safetensors")
            self.assert_refused(kind, words, lambda: from_pretrained_without_experts(folder, self.client, model_name=DEEPSEEK))

    def test_tensor_that_is_missing_is_named(self):
        name = "model.layers.1.self_attn.o_proj.weight"
        self.refuse(moed.NotFound, [f"wanted tensor {name}", "got none"], lambda folder, tensors: tensors.pop(name))

    def test_weights_outside_the_experts_that_are_quantized_are_named(self):
        name = "model.layers.1.self_attn.o_proj"

        def pack(folder, tensors):
            tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").to(torch.int32)
        self.refuse(moed.NotFound, [f"{name}.weight", f"got {name}.qweight", "quantized"], pack)

        def narrow(folder, tensors):
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
        self.refuse(moed.InvalidArgument, [f"{name}.weight", "float8_e4m3fn"], narrow)

    def test_shapes_that_the_configuration_contradicts_are_named(self):
        def cut(folder, tensors):
            tensors["lm_head.weight"] = tensors["lm_head.weight"][:128].clone()
        self.refuse(moed.InvalidArgument, ["lm_head.weight", "wanted shape [256, 256]", "got [128, 256]"], cut)

    def test_files_that_are_no_such_files_are_named(self):
        def overwrite(name, text):
            def change(folder, tensors):
                tensors.clear()  # nothing is written again
                (folder / name).write_bytes(text)
            return change
        self.refuse(moed.InvalidArgument, ["model.safetensors", "a safetensors file"], overwrite("model.safetensors", b"garbage"))
        for text in (b"{", b"[]", b"{\"weight_map\": [1]}", b"{\"weight_map\": {\"lm_head.weight\": 1}}"):
            self.refuse(moed.InvalidArgument, ["model.safetensors.index.json", "weight_map"],
                        overwrite("model.safetensors.index.json", text))

    def test_files_elsewhere_are_not_read(self):
        with folder_of(DEEPSEEK) as folder:
            inside = folder / "inside"
            inside.mkdir()
            for file in ("../model.safetensors", str(folder / "model.safetensors")):
                (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))
                self.assert_refused(moed.NotFound, ["wanted file", file], lambda: Checkpoint(inside).read("lm_head.weight"))

    def test_folders_without_weights_or_configuration_are_named(self):
        self.refuse(moed.NotFound, ["model.safetensors", "got neither"],
                    lambda folder, tensors: (folder / "model.safetensors").unlink())
        with tempfile.TemporaryDirectory() as folder:
            self.assert_refused(moed.NotFound, ["config.json", folder], lambda: from_pretrained_without_experts(
                pathlib.Path(folder), self.client, model_name=DEEPSEEK))
