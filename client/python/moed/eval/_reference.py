"""The model in process to which the service is compared: weights of `moed dequantize`, activations quantized as the server says
that it does."""
from __future__ import annotations

import json
import pathlib
import re
import subprocess
import tempfile
from typing import Any, Dict, List, Optional, Tuple

import safetensors
import torch
import transformers

from moed._tensors import invalid
from moed.errors import Error, NotFound
from moed.eval._activations import Rule, parse_rules
from moed.eval._experts import ProjectionRules, QuantizedExperts, QuantizedMlp
from moed.reports import Explanation
from moed.transformers._blocks import Block, find_blocks
from moed.transformers._loading import Checkpoint, build_empty, fill

_PROJECTIONS = {"gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",), "gate_up_proj": ("gate", "up"),
                "w1": ("gate",), "w3": ("up",), "w2": ("down",)}
_STORED = re.compile(r"layers\.(\d+)\.\w+\.(?:experts\.(\d+)|shared_experts?)\.(\w+)\.(input_scale|input_global_scale)$")
_SHARED = -1  # in the place of an expert's number

Stored = Dict[Tuple[int, int], Dict[str, float]]  # by layer and expert: the number of each projection


def load_whole(path: pathlib.Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers itself loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()


def load_dequantized(path: pathlib.Path, program: str, explanation: Explanation, dtype: torch.dtype) -> Any:
    """The model of a checkpoint with the exact values of its experts' weights, which `program`, a moed, writes to a file first;
    `explanation` has the schemes that run. `dtype` is that of all tensors, to which those weights are rounded if it is not float32;
    experts with quantized activations compute in float32 all the same. Needs memory for the whole model, and twice for experts."""
    model, checkpoint = build_empty(path, dtype), Checkpoint(path)
    blocks = list(find_blocks(model))
    with tempfile.TemporaryDirectory(prefix="moed-eval-") as folder:
        file = pathlib.Path(folder, "experts.safetensors")
        _dequantize(program, path, file)
        with safetensors.safe_open(file, framework="pt") as experts:
            names = set(experts.keys())
            given: Dict[str, torch.Tensor] = {}
            for block in blocks:
                given.update(_parameters(block, experts, names))
        fill(model, checkpoint, given)
    config = json.loads((path / "config.json").read_text()).get("quantization_config") or {}
    stored, schemes = _stored(checkpoint), {layer.layer: layer for layer in explanation.layers}
    for block in blocks:
        layer = schemes.get(block.layer)
        if layer is None:
            raise invalid(f"layer {block.layer}", "a layer that the server has", "none")
        _quantize_block(block, layer.scheme, layer.shared_scheme, config, stored)
    return model


def _dequantize(program: str, path: pathlib.Path, file: pathlib.Path) -> None:
    try:
        done = subprocess.run([program, "dequantize", str(path), str(file)], capture_output=True, text=True, check=False)
    except OSError as error:
        raise NotFound(f"{program}: wanted the program moed, got {error.strerror}") from None
    if done.returncode != 0:
        raise Error(f"{program} dequantize: {done.stderr.strip()}")


def _parameters(block: Block, experts: Any, names: set[str]) -> Dict[str, torch.Tensor]:
    """The block's parameters, named as in the model, of the tensors of `moed dequantize`."""
    prefix = f"model.layers.{block.layer}.mlp."

    def stack(kind: str) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        numbers = range(block.sizes[1])
        gate, up, down = (torch.stack([experts.get_tensor(f"{prefix}experts.{e}.{projection}_proj.{kind}") for e in numbers])
                          for projection in ("gate", "up", "down"))
        return gate, up, down

    def interleaved(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.stack((gate, up), dim=2).flatten(1, 2)  # rows gate 0, up 0, gate 1, ...

    gate, up, down = stack("weight")
    own = dict(block.module.named_parameters())
    if "experts.gate_up_proj_bias" in own:
        gate_bias, up_bias, down_bias = stack("bias")
        values = {"gate_up_proj": interleaved(gate, up).mT, "down_proj": down.mT, "down_proj_bias": down_bias,
                  "gate_up_proj_bias": interleaved(gate_bias, up_bias)}
    else:
        values = {"gate_up_proj": torch.cat((gate, up), dim=1), "down_proj": down}
    given = {f"{block.path}.experts.{name}": value.contiguous() for name, value in values.items()}
    for name in own:
        if block.family.shared and name.startswith(block.family.shared) and prefix + name in names:
            given[f"{block.path}.{name}"] = experts.get_tensor(prefix + name)
    return given


def _stored(checkpoint: Checkpoint) -> Stored:
    """Static scales and global scales of inputs. ModelOpt stores the inverse of a global scale, under the name of a static one;
    `_numbers` knows which it is."""
    stored: Stored = {}
    for name in checkpoint.names():
        match = _STORED.search(name)
        if match is None:
            continue
        layer, expert, projection, kind = match.groups()
        value = float(checkpoint.read(name).float())
        for one in _PROJECTIONS.get(projection, ()):
            key = (int(layer), _SHARED if expert is None else int(expert))
            stored.setdefault(key, {})[f"{one} {kind}"] = value
    return stored


def _numbers(rules: Dict[str, Optional[Rule]], stored: Dict[str, float], what: str) -> ProjectionRules:
    numbers: Dict[str, float] = {}
    for projection, rule in rules.items():
        if rule is None or not rule.is_stored:
            continue
        scale, inverse = stored.get(f"{projection} input_scale"), stored.get(f"{projection} input_global_scale")
        if rule.scale == "nvfp4":
            scale = inverse if inverse is not None else None if scale is None else float(1 / torch.tensor(scale))
        if scale is None:
            raise NotFound(f"{what}, {projection}: wanted input_scale or input_global_scale, got neither")
        numbers[projection] = scale
    return ProjectionRules(rules, numbers)


def _quantize_block(block: Block, scheme: str, shared_scheme: str, config: Dict[str, Any], stored: Stored) -> None:
    rules, module = parse_rules(scheme, config), block.module
    if any(rules.values()):
        each: List[ProjectionRules] = [_numbers(rules, stored.get((block.layer, e), {}), f"layer {block.layer}, expert {e}")
                                       for e in range(block.sizes[1])]
        module.experts = QuantizedExperts(module.experts, each)
    if not block.family.shared or not shared_scheme:
        return
    rules = parse_rules(shared_scheme, config)
    if any(rules.values()):
        numbers = _numbers(rules, stored.get((block.layer, _SHARED), {}), f"layer {block.layer}, shared expert")
        setattr(module, block.family.shared, QuantizedMlp(getattr(module, block.family.shared), numbers))
