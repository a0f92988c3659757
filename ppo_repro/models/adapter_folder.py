"""Adapters saved in the folder format of peft: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch

from ppo_repro.models.lora import Lora

CONFIG_NAME, TENSORS_NAME = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


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
