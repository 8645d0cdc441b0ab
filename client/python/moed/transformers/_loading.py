"""Loading a model without its experts: nothing of them is read, and no memory is allocated for them.

The model is made without memory ("meta" tensors), its MoE blocks are replaced, and then only what is left is read from the
safetensors files, tensor by tensor. Files that have nothing but experts may be missing.
"""
from __future__ import annotations

import json
import pathlib
from typing import Any, Dict, List, Optional, Union

import safetensors
import torch
import transformers

from moed import Client
from moed._tensors import invalid
from moed.errors import NotFound
from moed.transformers._attach import attach

__all__ = ["Checkpoint", "build_empty", "fill", "from_pretrained_without_experts"]

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# A parameter's name in transformers, and other names of the same in files.
_RENAMED = ((".mlp.", ".block_sparse_moe."),)
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


class Checkpoint:
    """Tensors of a folder of safetensors files, read one by one. NotFound for what is not there, InvalidArgument for files that
    cannot be read."""

    def __init__(self, path: Union[str, pathlib.Path]):
        self.path = pathlib.Path(path)
        index = self.path / _INDEX
        self._open: Dict[str, Any] = {}
        if index.is_file():
            self._files: Dict[str, str] = _weight_map(index)
        elif (self.path / _SINGLE).is_file():
            self._files = dict.fromkeys(self._file(_SINGLE).keys(), _SINGLE)
        else:
            raise NotFound(f"{self.path}: wanted {_INDEX} or {_SINGLE}, got neither")

    def names(self) -> List[str]:
        return list(self._files)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise NotFound(f"{self.path}: wanted tensor {name}, got none")
        try:
            tensor: torch.Tensor = self._file(self._files[name]).get_tensor(name)
        except safetensors.SafetensorError as error:
            raise invalid(f"{self.path / self._files[name]}", f"tensor {name}", error) from None
        return tensor

    def _file(self, name: str) -> Any:
        if name not in self._open:
            if pathlib.PurePath(name).name != name or not (self.path / name).is_file():
                raise NotFound(f"{self.path}: wanted file {name}, got none")
            try:
                self._open[name] = safetensors.safe_open(self.path / name, framework="pt")
            except safetensors.SafetensorError as error:
                raise invalid(f"{self.path / name}", "a safetensors file", error) from None
        return self._open[name]


def _weight_map(index: pathlib.Path) -> Dict[str, str]:
    """The file of each tensor."""
    try:
        files = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError):
        files = None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise invalid(f"{index}", "an object with a weight_map of tensors to files", "something else")
    return files


def from_pretrained_without_experts(path: Union[str, pathlib.Path], client: Client, *, dtype: Optional[Any] = None,
                                    attn_implementation: Optional[str] = None, **attach_options: Any) -> Any:
    """The causal language model of the checkpoint folder `path`, on the CPU and for inference, with its experts on the server
    behind `client`. Experts are never read, whatever quantized them; the other weights must be plain.

    dtype                of the model, as from_pretrained takes it; None: the checkpoint's
    attn_implementation  as from_pretrained takes it
    attach_options       those of `attach` but `layers`; its handle is `model.moed`. A shared expert that is quantized has to run on
                         the server, which is the default.

    NotFound for missing files and tensors, InvalidArgument for weights that are quantized, and what `attach` raises.
    """
    if attach_options.get("layers") is not None:
        raise invalid("layers", "none, since no layer's experts are read", attach_options["layers"])
    model = build_empty(path, dtype, attn_implementation)
    attach(model, client, **attach_options)
    fill(model, Checkpoint(path))
    return model


def build_empty(path: Union[str, pathlib.Path], dtype: Optional[Any], attn_implementation: Optional[str] = None) -> Any:
    """The model of a folder's config.json as if it were not quantized, in evaluation mode, without memory: all tensors are
    "meta"."""
    if not (pathlib.Path(path) / "config.json").is_file():
        raise NotFound(f"{path}: wanted a checkpoint folder with config.json, got none")
    config = transformers.AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    options: Dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    if dtype is not None:
        options["dtype"] = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    if (pathlib.Path(path) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model.eval()


def fill(model: Any, checkpoint: Checkpoint, given: Optional[Dict[str, torch.Tensor]] = None) -> None:
    """Gives every tensor of a model without memory its value: from `given`, by its name in the model, else from the checkpoint;
    tensors that a checkpoint does not store, as those of rotary embeddings, from the configuration."""
    given = given or {}
    known = set(checkpoint.names())
    state: Dict[str, torch.Tensor] = {}
    tied = _tied_names(model)
    for name, empty in model.state_dict().items():
        if name in tied and name not in known:
            continue
        value = given[name] if name in given else _read_plain(checkpoint, known, name)
        if value.shape != empty.shape:
            raise invalid(f"{checkpoint.path}, tensor {name}", f"shape {list(empty.shape)}", list(value.shape))
        state[name] = value.to(empty.dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    _compute_buffers(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise NotFound(f"{checkpoint.path}: wanted tensor {name}, got none")
    model.requires_grad_(False)


def _tied_names(model: Any) -> List[str]:
    return ["lm_head.weight"] if getattr(model.config, "tie_word_embeddings", False) else []


def _read_plain(checkpoint: Checkpoint, known: set[str], name: str) -> torch.Tensor:
    names = [name] + [name.replace(ours, theirs) for ours, theirs in _RENAMED if ours in name]
    found = [one for one in names if one in known]
    if not found:
        like = [one for one in known if one.startswith(name.rpartition(".")[0] + ".")]
        got = f"{', '.join(sorted(like))}: is it quantized? It would have to run on the server" if like else "none"
        raise NotFound(f"{checkpoint.path}: wanted tensor {' or '.join(names)}, got {got}")
    value = checkpoint.read(found[0])
    if value.dtype not in _PLAIN:
        raise invalid(f"{checkpoint.path}, tensor {found[0]}", "f32, bf16 or f16, as weights outside the experts must be",
                      f"{value.dtype}; if it is a shared expert's, it has to run on the server")
    return value


def _compute_buffers(model: Any) -> None:
    """Tensors that modules compute when they are made: such a module is made again, with memory."""
    for module in model.modules():
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if empty and hasattr(module, "config"):
            fresh = type(module)(module.config)
            for name in empty:
                setattr(module, name, getattr(fresh, name))
