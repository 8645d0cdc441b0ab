"""`attach`: the MoE blocks of a model in memory are replaced by remote ones, after model and server were found to agree."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Optional, Sequence

import torch

from moed import Client
from moed._tensors import invalid
from moed.errors import FailedPrecondition
from moed.reports import ModelHello
from moed.transformers._blocks import DTYPES, FAMILIES, Block, RemoteMoe, find_blocks

__all__ = ["Attached", "attach"]


@dataclass(frozen=True)
class Attached:
    """What was attached to what. There is no way back: the experts' memory is free, a model with experts is loaded anew."""
    address: str
    model_name: str
    layers: List[int]        # run on the server
    local_layers: List[int]  # MoE layers that stayed
    router: str
    shared: str              # "" for a model without shared experts
    wire: str                # "" for the dtype of the hidden states

    def __repr__(self) -> str:
        shared = f", shared experts of the {self.shared}" if self.shared else ""
        return (f"<moed.transformers: layers {_listed(self.layers)} on {self.address} as \"{self.model_name}\", "
                f"local MoE layers {_listed(self.local_layers)}; router of the {self.router}{shared}, "
                f"wire {self.wire or 'as the model computes'}>")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def attach(model: torch.nn.Module, client: Client, *, model_name: str = "", router: str = "model", shared: str = "server",
           layers: Optional[Sequence[int]] = None, wire: Optional[str] = None, timeout: Optional[float] = None) -> Attached:
    """Replaces the MoE blocks of `model` (mixtral, qwen3_moe, deepseek_v3 or gpt_oss) by calls of the server behind `client`, and
    frees the memory of their experts. The handle is also `model.moed`.

    model_name  the server's name of it; may be "" when the server has one model
    router      "model": this model's own router runs here, ids and weights are sent. "server": the checkpoint's router runs there,
                and this model does not record router logits
    shared      of a model with shared experts. "server": they are part of the layer there, as the checkpoint has them. "model":
                this model's own run here and the server is asked for the routed experts only. Never both
    layers      which MoE layers; None: all
    wire        "f32", "bf16" or "f16": dtype of hidden states and outputs on their way; None: as the model computes
    timeout     seconds of each call, as in Client.forward; retries are those of the client

    InvalidArgument for a model without MoE blocks of these families, and for what is none of the above. FailedPrecondition where
    model and server do not agree on layers, H, E or k, where the server has part of the experts only, or lacks the shared one.
    Until all of that is checked the model is as it was.
    """
    for name, value in (("router", router), ("shared", shared)):
        if value not in ("model", "server"):
            raise invalid(name, "\"model\" or \"server\"", repr(value))
    if wire is not None and wire not in DTYPES:
        raise invalid("wire", "f32, bf16, f16 or None", repr(wire))
    blocks, stay = _choose(model, layers)
    served = _served_model(client, model_name)
    _check(client, served, blocks, shared)
    has_shared = any(block.family.shared for block in blocks)
    for block in blocks:
        remote = RemoteMoe(client, served.name, block, keep_router=router == "model",
                           keep_shared=bool(block.family.shared) and shared == "model",
                           wire=None if wire is None else DTYPES[wire], timeout=timeout, weights_hash=served.weights_hash)
        remote.train(block.module.training)
        model.set_submodule(block.path, remote)
    handle = Attached(client.address, served.name, [block.layer for block in blocks], stay, router, shared if has_shared else "",
                      wire or "")
    setattr(model, "moed", handle)
    return handle


def _choose(model: torch.nn.Module, layers: Optional[Sequence[int]]) -> tuple[List[Block], List[int]]:
    """The blocks to replace, and the numbers of the other ones."""
    blocks = list(find_blocks(model))
    if not blocks:
        raise invalid("model", f"MoE blocks ({', '.join(sorted(FAMILIES))})", f"{type(model).__name__} without any")
    have = [block.layer for block in blocks]
    wanted = have if layers is None else list(layers)
    unknown = sorted(set(wanted) - set(have))
    if unknown or not wanted:
        raise invalid("layers", f"some of the MoE layers {_listed(have)}", _listed(unknown))
    return [block for block in blocks if block.layer in wanted], [layer for layer in have if layer not in wanted]


def _served_model(client: Client, name: str) -> ModelHello:
    models = client.hello().models
    found = [one for one in models if one.name == name] if name else models
    if len(found) != 1:
        have = ", ".join(f"\"{one.name}\"" for one in models) or "none"
        raise invalid("model_name", "the name of one of the server's models", f"\"{name}\"; models of {client.address}: {have}")
    return found[0]


def _check(client: Client, served: ModelHello, blocks: Sequence[Block], shared: str) -> None:
    def disagree(what: str, wanted: Any, got: Any) -> FailedPrecondition:
        return FailedPrecondition(f"{client.address}, model \"{served.name}\": {what}: wanted {wanted}, as the model here has, "
                                  f"got {got}")

    missing = [block.layer for block in blocks if block.layer not in served.layers]
    if missing:
        raise disagree("layers", _listed([block.layer for block in blocks]), _listed(served.layers))
    for block in blocks:
        for what, here, there in zip("HEk", block.sizes, (served.hidden, served.num_experts, served.top_k)):
            if here != there:
                raise disagree(f"layer {block.layer}, {what}", here, there)
    if (served.first_expert, served.end_expert) != (0, served.num_experts):
        raise disagree("experts there", f"0:{served.num_experts}", f"{served.first_expert}:{served.end_expert}")
    if shared == "server" and any(block.family.shared for block in blocks):
        schemes = {one.layer: one.shared_scheme for one in client.explain(served.name).layers}
        for block in blocks:
            if block.family.shared and not schemes.get(block.layer):
                raise disagree(f"layer {block.layer}, shared expert", "one", "none; shared=\"model\" runs it here")
