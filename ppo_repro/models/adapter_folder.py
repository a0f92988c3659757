"""Adapters saved in the folder format of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from torch import Tensor

from ppo_repro.models.lora import TRUNK, Lora
from ppo_repro.models.networks import ValueModel
from ppo_repro.numerics.families import token_head_name

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def save_adapter(lora: Lora, folder: Path, base_model: str) -> None:
    """Write the factors into an existing folder; peft will load W from `base_model`. Raises OSError."""
    _write(lora, folder, base_model, "CAUSAL_LM", [], lora.factors())


def save_value_adapter(lora: Lora, value_model: ValueModel, folder: Path, base_model: str) -> None:
    """Write the factors and the head of a value model into an existing folder. Raises OSError.

    peft loads them over transformers' token classification model of one label, whose trunk is that of `base_model`
    and whose logits before each token are then the value model's predictions.
    """
    trunk, head = value_model.trunk.base_model_prefix, token_head_name(value_model.trunk.config)
    named = {f"{trunk}.{name.removeprefix(TRUNK)}": factor for name, factor in lora.factors().items()}
    named |= {f"{head}.{name.removeprefix('head.')}": p.detach() for name, p in lora.whole.items()}
    _write(lora, folder, base_model, "TOKEN_CLS", [head], named)


def _write(lora: Lora, folder: Path, base_model: str, task: str, whole: list[str], named: Mapping[str, Tensor]) -> None:
    transposed = {layer.transposed for layer in lora.layers.values()}
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [target.removeprefix(TRUNK) for target in lora.target_modules],
        "modules_to_save": whole or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": transposed == {True},
        "inference_mode": True,
        "init_lora_weights": True,
    }
    tensors = {_PREFIX + name: tensor.cpu().contiguous() for name, tensor in named.items()}
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    safetensors.torch.save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
