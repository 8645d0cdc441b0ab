"""The reference that quantizes activations gives the golden outputs, of every expert that the golden tokens reach."""
import safetensors.torch
import torch

import moed
from models_support import MODELS, PROGRAM, ModelCase, checkpoints
from moed.eval._activations import Rule, parse_rule, parse_rules, quantize
from moed.eval._reference import load_dequantized
from moed.transformers._blocks import find_blocks


class Reference(ModelCase):
    def test_of_every_checkpoint_gives_its_golden_outputs(self):
        for name in checkpoints():
            golden = safetensors.torch.load_file(MODELS / name / "golden.safetensors")
            model = load_dequantized(MODELS / name, PROGRAM, self.client.explain(name), torch.float32)
            for block in find_blocks(model):
                part = {key: golden[f"{block.layer}.{key}"] for key in ("x", "topk_ids", "topk_weights", "y")}
                quantized = f"{block.layer}.y_q" in golden
                if name == "quark-int4-fp8":
                    continue  # its scale spans a request, which the golden outputs do not model
                with self.subTest(name, layer=block.layer):
                    want = golden[f"{block.layer}.y_q"] if quantized else part["y"]
                    with torch.no_grad():
                        got = block.module.experts(part["x"].float(), part["topk_ids"].long(), part["topk_weights"])
                    apart = (got - want).norm(dim=1) / want.norm(dim=1)
                    # Where a value lies between two codes, the last bit of a sum chooses.
                    self.assertLess(float(apart.max()), 3e-3 if quantized else 1e-5)
                    self.assertLess(float(apart.median()), 1e-5)

    def test_scale_of_a_request_spans_all_its_rows(self):
        rule = Rule("fp8", "absmax", -1)
        x = torch.tensor([[1.0, 0.3], [448.0, 5.1]])
        self.assertTrue(torch.equal(quantize(rule, None, x), torch.tensor([[1.0, 0.3125], [448.0, 5.0]])))
        alone = quantize(rule, None, x[:1])
        self.assertNotEqual(float(alone[0, 1]), 0.3125)


class Rules(ModelCase):
    def test_values_between_two_codes_go_to_the_even_one(self):
        x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -6.0]])
        self.assertEqual(quantize(Rule("fp4", "even", 32), None, x).tolist(), [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0]])

    def test_group_of_zeros_stays_zero_and_a_short_one_has_its_own_scale(self):
        x = torch.cat([torch.zeros(1, 32), torch.tensor([[3.0, -6.0]])], dim=1)
        for rule in (Rule("fp4", "even", 32), Rule("fp8", "ceil", 32), Rule("fp8", "absmax", 32), Rule("fp8", "pow2", 32)):
            self.assertTrue(torch.equal(quantize(rule, None, x), x), rule)

    def test_nan_stays_in_its_group(self):
        x = torch.ones(2, 64)
        x[0, 40] = torch.nan
        got = quantize(Rule("fp4", "even", 32), None, x)
        self.assertEqual(got.isnan().sum(), 32)
        self.assertTrue(got[0, 32:].isnan().all())

    def test_even_and_ceil_differ_from_floor_where_the_largest_value_would_not_fit(self):
        x = torch.tensor([[7.0, 1.0]])
        values = [quantize(Rule("fp4", scale, 32), None, x)[0, 0].item() for scale in ("floor", "even", "ceil")]
        self.assertEqual(values, [6.0, 8.0, 8.0])

    def test_are_read_from_what_the_server_writes(self):
        mx = "fp4 g32, e8m0 scales, fp4 dynamic g32 activations"
        self.assertEqual(parse_rule(mx, {"quant_method": "compressed-tensors"}), Rule("fp4", "even", 32))
        self.assertEqual(parse_rule(mx, {"quant_method": "modelopt"}), Rule("fp4", "ceil", 32))
        fp8 = "fp8 block 128x128, f32 scales, fp8 dynamic g128 activations"
        self.assertEqual(parse_rule(fp8, {"scale_fmt": "ue8m0"}), Rule("fp8", "pow2", 128))
        apart = f"gate {mx}; up {mx}; down {fp8}"
        self.assertEqual(parse_rules(apart, {})["down"], Rule("fp8", "absmax", 128))
        self.assert_refused(moed.InvalidArgument, ["scheme", "int3"], lambda: parse_rule("int3 dynamic token activations", {}))
