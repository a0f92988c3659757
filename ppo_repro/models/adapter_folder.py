"""Adapters in the folder format of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.disk.folder import check_sums
from ppo_repro.errors import UserError
from ppo_repro.models.lora import Lora, attach_factors, choose_layers, shape_of

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# fields that do not change what a loaded adapter computes; there is no dropout here, in training either
_WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"),
    *("lora_dropout", "fan_in_fan_out", "ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
}
_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other initialisations change the base weights, or need more than the two factors
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
}


def save_adapter(lora: Lora, folder: Path, base_model: str) -> None:
    """Write the factors into an existing folder; peft will load W from `base_model`. Raises OSError."""
    transposed = {layer.transposed for layer in lora.layers.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.target_modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "inference_mode": True,
        "init_lora_weights": True,
    }
    tensors = {_PREFIX + name: factor.contiguous() for name, factor in lora.factors().items()}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    safetensors.torch.save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})


def load_adapter(model: PreTrainedModel, folder: Path) -> Lora:
    """Adapt a model from `make_policy` with a saved adapter, and freeze all its other parameters.

    UserError names the file, field or tensor that is missing, not supported or does not fit this model.
    """
    check_sums(folder)
    rank, alpha, targets = _read_config(folder)
    tensors = _read_tensors(folder / TENSORS_NAME)
    factors = {}
    for name, layer in choose_layers(model, targets).items():
        rows, columns = shape_of(layer)
        a = _take(tensors, f"{name}.lora_A.weight", (rank, columns), folder)
        factors[name] = a, _take(tensors, f"{name}.lora_B.weight", (rows, rank), folder)
    if tensors:
        raise UserError(f"{folder / TENSORS_NAME}: {min(tensors)} is in no layer named by its target_modules")
    return attach_factors(model, rank, alpha, targets, factors)


def _read_config(folder: Path) -> tuple[int, float, tuple[str, ...]]:
    """Rank, alpha and targets; UserError for any other field that would change what the adapter computes."""
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); must be a folder saved by peft") from error
    if not isinstance(config, dict):
        raise UserError(f"{path}: must hold one JSON object; save the adapter again")
    rank, alpha, targets = (config.pop(name, None) for name in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank < 1:
        raise UserError(f"{path}: r = {rank!r}; must be a whole number from 1")
    if type(alpha) not in (int, float) or not 0 < alpha < float("inf"):
        raise UserError(f"{path}: lora_alpha = {alpha!r}; must be a number greater than 0")
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise UserError(f"{path}: target_modules = {targets!r}; must be a list of layer names")
    for field, value in config.items():
        if field in _VALUES and value not in _VALUES[field]:
            allowed = ", ".join(json.dumps(v) for v in _VALUES[field])
            raise UserError(f"{path}: {field} = {value!r}: not supported; must be one of {allowed}")
        unset = json.dumps(value) in ("null", "false", "[]", "{}")
        if field not in _VALUES and field not in _WITHOUT_EFFECT and not unset:
            raise UserError(f"{path}: {field} = {value!r}: not supported; only plain LoRA is")
    return rank, float(alpha), tuple(sorted(targets))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())}); save the adapter again") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _take(tensors: dict[str, Tensor], name: str, shape: tuple[int, int], folder: Path) -> Tensor:
    """Remove a factor from `tensors` and return it as float32; converting a narrower type is exact."""
    path = folder / TENSORS_NAME
    if name not in tensors:
        raise UserError(f"{path}: has no {name}; the adapter is not for this model")
    factor = tensors.pop(name)
    if factor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UserError(f"{path}: {name} is {factor.dtype}; must be float32, float16 or bfloat16")
    if tuple(factor.shape) != shape:
        raise UserError(f"{path}: {name} is {list(factor.shape)}, this model needs {list(shape)}")
    return factor.to(torch.float32).contiguous()
