"""Compute rotary positions: the frequencies of a model's configuration, and their tables of cosine and sine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.elementwise import cos_sin, exp64, log
from ppo_repro.numerics.families import FAMILIES, head_dim


def rotating(config: PretrainedConfig, rope: dict[str, Any]) -> int:
    """Return the number D of elements of a head that rotate: all, or a part."""
    return int(head_dim(config) * rope.get("partial_rotary_factor", 1.0))


def inverse_frequencies(config: PretrainedConfig, rope: dict[str, Any]) -> Tensor:
    """Return the frequencies theta^(-2i/D), float64 [D/2], of a layer's rotary parameters.

    theta is rounded to float32. The types are `default`, `linear` (position interpolation) and `llama3`. Raises
    UserError, which names any other: `dynamic` and `longrope` change with the current length, so that no cached key
    could equal a recomputed one.
    """
    partial, kind = rope.get("partial_rotary_factor", 1.0), rope["rope_type"]
    family = FAMILIES[config.model_type]
    if partial != 1.0 and not family.rotates_part:
        raise UserError(
            f"model config partial_rotary_factor = {partial}: must be 1 in deterministic numerics of {family.name}"
        )
    dim = rotating(config, rope)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    theta = torch.tensor([float(rope["rope_theta"])], dtype=torch.float32)  # as transformers rounds it
    frequencies = 1.0 / exp64(exponents * log(theta))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / rope["factor"]
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * smooth + (frequencies / rope["factor"]) * (1.0 - smooth)
    raise UserError(f"model config rope_type = '{kind}': must be default, linear or llama3 in deterministic numerics")


def tables(config: PretrainedConfig, rope: dict[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of all positions, float32 [positions, D/2] each, from float64. Su et al., 2021.

    Args:
        config: the width of a head.
        rope: the layer's rotary parameters.
        positions: number of positions.
    """
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies(config, rope)
    cosine, sine = cos_sin(angles)
    return cosine.to(torch.float32), sine.to(torch.float32)
