"""Experts and shared experts of transformers with quantized activations: the modules' own weights and activation functions,
`_activations` before each product. In float32, request by request: a forward is a request."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Tuple

import torch
from torch.nn.functional import linear

from moed.eval._activations import Rule, quantize

Tensor = torch.Tensor


@dataclass(frozen=True)
class ProjectionRules:
    """What happens before gate, up and down of one expert: their rules, and the numbers that the checkpoint stores."""
    rules: Dict[str, Optional[Rule]]
    stored: Dict[str, float]

    def apply(self, projection: str, x: Tensor) -> Tensor:
        return quantize(self.rules[projection], self.stored.get(projection), x)


class QuantizedExperts(torch.nn.Module):
    """In the place of a block's `experts`; `rules` has one entry an expert."""

    def __init__(self, experts: Any, rules: List[ProjectionRules]):
        super().__init__()
        self.experts, self._rules = experts, rules

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x = hidden_states.float()
        used = [torch.where(ids == expert) for expert in range(self.experts.num_experts)]
        rows = [one for one, _ in used]
        h = [self._hidden(expert, gate, up)
             for expert, (gate, up) in enumerate(zip(self._inputs("gate", rows, x), self._inputs("up", rows, x)))]
        output = torch.zeros_like(x)
        for expert, values in enumerate(self._quantize_hidden(h)):
            _, _, down, bias = _weights(self.experts, expert)
            y = linear(values, down, bias[2]) * weights[used[expert]][:, None].float()
            output.index_add_(0, rows[expert], y)
        return output.to(hidden_states.dtype)

    def _stores(self, projection: str) -> bool:
        rule = self._rules[0].rules[projection]
        return rule is not None and rule.is_stored

    def _inputs(self, projection: str, rows: List[Tensor], x: Tensor) -> List[Tensor]:
        """Each expert's rows of x. Where experts have no numbers of their own all rows are quantized once and together, as a scale
        of the whole request demands."""
        if self._stores(projection):
            return [rules.apply(projection, x[one]) for rules, one in zip(self._rules, rows)]
        x = self._rules[0].apply(projection, x)
        return [x[one] for one in rows]

    def _quantize_hidden(self, h: List[Tensor]) -> List[Tensor]:
        """Of all experts, in their order; together, as `_inputs` does."""
        if self._stores("down"):
            return [rules.apply("down", one) for rules, one in zip(self._rules, h)]
        return list(torch.split(self._rules[0].apply("down", torch.cat(h)), [len(one) for one in h]))

    def _hidden(self, expert: int, gate_input: Tensor, up_input: Tensor) -> Tensor:
        gate, up, _, bias = _weights(self.experts, expert)
        a, b = linear(gate_input, gate, bias[0]), linear(up_input, up, bias[1])
        if bias[0] is not None:  # gpt_oss, which has them interleaved
            activated: Tensor = self.experts._apply_gate(torch.stack((a, b), dim=-1).flatten(-2))
            return activated
        product: Tensor = self.experts.act_fn(a) * b
        return product


class QuantizedMlp(torch.nn.Module):
    """In the place of a shared expert."""

    def __init__(self, mlp: Any, rules: ProjectionRules):
        super().__init__()
        self.mlp, self._rules = mlp, rules

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).float()
        a = linear(self._rules.apply("gate", x), self.mlp.gate_proj.weight.float())
        b = linear(self._rules.apply("up", x), self.mlp.up_proj.weight.float())
        y = linear(self._rules.apply("down", self.mlp.act_fn(a) * b), self.mlp.down_proj.weight.float())
        return y.reshape(hidden_states.shape).to(hidden_states.dtype)


def _weights(experts: Any, expert: int) -> Tuple[Tensor, Tensor, Tensor, List[Optional[Tensor]]]:
    """gate and up [I, H], down [H, I] and their biases, of the fused tensors of transformers, in float32."""
    both, down = experts.gate_up_proj[expert].float(), experts.down_proj[expert].float()
    if not hasattr(experts, "gate_up_proj_bias"):
        gate, up = both.chunk(2)
        return gate, up, down, [None, None, None]
    bias = experts.gate_up_proj_bias[expert].float()
    return both[:, ::2].T, both[:, 1::2].T, down.T, [bias[::2], bias[1::2], experts.down_proj_bias[expert].float()]
