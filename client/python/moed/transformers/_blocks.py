"""What an MoE block of transformers is made of, and the block that takes its place.

The four families differ in names only: a router of which `forward(x)` gives (logits, weights [M, k], ids [M, k]), `experts` of
which `forward(x, ids, weights)` gives [M, H], perhaps a shared expert, which is added. Names of the parts that stay are kept, so
that parameters of an attached model have the names that they had.
"""
from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional, Tuple

import torch

from moed import Client
from moed.errors import FailedPrecondition

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True)
class Family:
    """Names of a block's parts; `shared` is "" where there is none. A block of gpt_oss returns its routing weights as well."""
    router: str
    shared: str = ""
    returns_weights: bool = False


FAMILIES: Dict[str, Family] = {
    "MixtralSparseMoeBlock": Family("gate"),
    "Qwen3MoeSparseMoeBlock": Family("gate"),
    "DeepseekV3MoE": Family("gate", shared="shared_experts"),
    "GptOssMLP": Family("router", returns_weights=True),
}


@dataclass(frozen=True)
class Block:
    """An MoE block in a model: `path` is its name there, `layer` its number in the checkpoint."""
    path: str
    layer: int
    module: torch.nn.Module
    family: Family

    @property
    def router(self) -> Any:
        return getattr(self.module, self.family.router)

    @property
    def sizes(self) -> Tuple[int, int, int]:
        """H, E and k."""
        return self.router.hidden_dim, self.router.num_experts, self.router.top_k


def find_blocks(model: torch.nn.Module) -> Iterator[Block]:
    """The MoE blocks of a model that have their experts, in ascending order of layers."""
    for path, module in model.named_modules():
        family, layer = FAMILIES.get(type(module).__name__), _LAYER.search(path)
        if family is not None and layer is not None:
            yield Block(path, int(layer.group(1)), module, family)


class RemoteMoe(torch.nn.Module):
    """One MoE block whose routed experts run on a server. Made by `attach`.

    Takes [..., H] and gives the same shape, dtype and device. The router, a part of this module, routes here, or there is none
    and the server's does. Likewise the shared expert: it runs here and the server leaves it out, or the server's part of the
    layer has it. Hidden states are rounded to `wire` on their way, where it is set; the answer has that dtype as well.

    Raises RuntimeError in a forward that records gradients, which a server does not have, FailedPrecondition when other weights
    answered than the server had when this was attached, and what Client.forward raises: a call gives the whole layer or an
    exception.
    """

    def __init__(self, client: Client, model_name: str, block: Block, *, keep_router: bool, keep_shared: bool,
                 wire: Optional[torch.dtype], timeout: Optional[float], weights_hash: str):
        super().__init__()
        self.layer = block.layer
        self.hidden_size, self.num_experts, self.top_k = block.sizes
        self._client, self._model_name, self._family = client, model_name, block.family
        self._wire, self._timeout = wire, timeout
        self._weights_id = int(weights_hash[:16], 16) if weights_hash else 0  # as in Result
        self._keep_router, self._keep_shared = keep_router, keep_shared
        if keep_router:
            self.add_module(block.family.router, block.router)
        if keep_shared:
            self.add_module(block.family.shared, getattr(block.module, block.family.shared))

    def forward(self, hidden_states: torch.Tensor) -> Any:
        flat = hidden_states.reshape(-1, self.hidden_size)
        ids = weights = None
        if self._keep_router:
            _, weights, ids = getattr(self, self._family.router)(flat)
        self._refuse_gradients(hidden_states, weights)
        output = self._remote(flat, ids, weights).reshape(hidden_states.shape)
        if self._keep_shared:
            output = output + getattr(self, self._family.shared)(hidden_states)
        return (output, weights) if self._family.returns_weights else output

    def _remote(self, flat: torch.Tensor, ids: Optional[torch.Tensor], weights: Optional[torch.Tensor]) -> torch.Tensor:
        sent = flat.to(self._wire or flat.dtype).contiguous()
        routing = () if ids is None or weights is None else (ids, weights.float())
        result = self._client.forward(self.layer, sent, *routing, model=self._model_name, routed_only=self._keep_shared,
                                      timeout=self._timeout)
        if result.weights_id != self._weights_id:
            raise FailedPrecondition(f"{self._client.address}, model \"{self._model_name}\", layer {self.layer}: wanted an answer "
                                     f"of weights {self._weights_id:016x}, as when this model was attached, got one of "
                                     f"{result.weights_id:016x}")
        output: torch.Tensor = result.output
        return output.to(flat.device, flat.dtype)

    def _refuse_gradients(self, hidden_states: torch.Tensor, weights: Optional[torch.Tensor]) -> None:
        if torch.is_grad_enabled() and (hidden_states.requires_grad or (weights is not None and weights.requires_grad)):
            raise RuntimeError(f"layer {self.layer}: wanted a forward below torch.no_grad() or torch.inference_mode(), since "
                               "experts on a server have no gradients; got one that records them")

    def extra_repr(self) -> str:
        wire = "as hidden states" if self._wire is None else str(self._wire).rpartition(".")[2]
        parts = [f"layer={self.layer}", f"server={self._client.address}", f"router={'model' if self._keep_router else 'server'}"]
        if self._family.shared:
            parts.append(f"shared={'model' if self._keep_shared else 'server'}")
        return ", ".join(parts + [f"wire={wire}"])
