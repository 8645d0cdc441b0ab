"""Every checkpoint has the perplexity through the service that it has in process, with bfloat16 on the wire and the router here:
within 0.1 % where only weights are quantized, within 0.5 % where activations are as well. With float32 there the two are the same
but for rounding."""
import json

import moed
from models_support import MODELS, PROGRAM, START, TEXT, UNQUANTIZED, WINDOW, ModelCase, checkpoints
from moed.eval._tables import table
from moed.eval.evaluate import evaluate

# One of each kind of activations, to compare with float32 on the wire.
KINDS = ("ct-w4a16-g32-sym", "ct-w8a8-int8-static", "ct-fp8-channel-dynamic", "quark-int4-fp8", "hf-fp8-block128", "ct-mxfp4",
         "ct-mxfp8", "ct-nvfp4", "modelopt-nvfp4", "quark-mxfp4-gptoss")


class Perplexity(ModelCase):
    """Prints at the end what came out."""
    rows = []

    @classmethod
    def tearDownClass(cls):
        print("\n" + table(cls.rows))

    def evaluate(self, name, **options):
        return evaluate(MODELS / name, self.client, TEXT.read_bytes(), program=PROGRAM, start=START, window=WINDOW,
                        model_name=name, **options)

    def check_bfloat16(self, name):
        row = self.evaluate(name, wire="bf16")
        self.rows.append(row)
        golden = json.loads((MODELS / name / "golden.json").read_text())
        activations = [rule for layer in golden["layers"].values() for rule in layer.get("rules", [])] or "y_q_missing" in golden
        self.assertEqual(row.bound_percent, 0.5 if activations else 0.1)
        self.assertTrue(row.passed, row)
        self.assertEqual(row.tokens, 36 * (WINDOW - 1))
        if not activations:  # what is known of the checkpoint does not quantize activations
            known = golden["ppl"]["ppl_quantized"] or row.perplexity
            self.assertLess(abs(row.reference_perplexity / known - 1), 1e-4)

    def check_float32(self, name):
        row = self.evaluate(name, wire="f32")
        self.assertLess(abs(row.difference_percent), 0.01, row)
        self.assertLess(row.mean_abs_dlogp, 1e-3, row)

    def test_of_unquantized_checkpoints_is_what_transformers_has(self):
        for name in UNQUANTIZED:
            with self.subTest(name):
                row = self.evaluate(name, reference=str(MODELS / name))
                self.assertLess(abs(row.difference_percent), 1e-3, row)

    def test_of_another_checkpoint_is_not_within_the_bound(self):
        row = self.evaluate("ct-mxfp4", reference=str(MODELS / "tiny-qwen3moe-bf16"))
        self.assertFalse(row.passed, row)

    def test_without_reference_has_no_difference(self):
        row = self.evaluate("tiny-mixtral-bf16", reference="none")
        self.assertEqual((row.reference_perplexity, row.difference_percent, row.passed), (None, None, True))

    def test_text_shorter_than_a_window_is_refused(self):
        self.assert_refused(moed.InvalidArgument, ["text", "256 tokens", "got 10"], lambda: evaluate(
            MODELS / "tiny-mixtral-bf16", self.client, b"0123456789", program=PROGRAM, model_name="tiny-mixtral-bf16"))


def _add(prefix, name, check):
    setattr(Perplexity, f"test_{prefix}_{name.replace('-', '_')}", lambda self: getattr(self, check)(name))


for _name in checkpoints():
    _add("bfloat16", _name, "check_bfloat16")
for _name in KINDS:
    _add("float32", _name, "check_float32")
