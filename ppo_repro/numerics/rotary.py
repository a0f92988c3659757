"""Rotary positions: the frequencies of a model's configuration, and the tables of cosine and sine made from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ppo_repro.errors import UserError
from ppo_repro.numerics.elementwise import cos_sin, log, power
from ppo_repro.numerics.families import head_dim


def inverse_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Rotary frequencies theta^(-2i/D), float64 [D/2], and the factor of cosine and sine.

    D is the width of a head, or the part of it that rotates in GPT-NeoX. Types `default`, `linear` (position
    interpolation), `llama3` and `yarn`; UserError names any other: `dynamic` and `longrope` change with the
    current length, so that no cached key could equal a recomputed one.
    """
    rope = config.rope_parameters
    partial, kind = rope.get("partial_rotary_factor", 1.0), rope["rope_type"]
    if partial != 1.0 and config.model_type != "gpt_neox":
        raise UserError(
            f"model config partial_rotary_factor = {partial}: must be 1 in deterministic numerics outside GPT-NeoX"
        )
    dim = int(head_dim(config) * partial)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    frequencies = 1.0 / power(float(rope["rope_theta"]), exponents)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        turns = rope["original_max_position_embeddings"] / (2 * math.pi / frequencies)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return frequencies * smooth + (frequencies / rope["factor"]) * (1.0 - smooth), 1.0
    if kind == "yarn":
        return _yarn(frequencies, dim, rope, config.max_position_embeddings)
    raise UserError(
        f"model config rope_type = '{kind}': must be default, linear, llama3 or yarn in deterministic numerics"
    )


def _ln(x: float) -> float:
    return float(log(torch.tensor([x], dtype=torch.float64)))


def _magnitude(factor: float, scale: float) -> float:
    return 0.1 * scale * _ln(factor) + 1.0 if factor > 1.0 else 1.0


def _yarn(frequencies: Tensor, dim: int, rope: dict[str, Any], max_positions: int) -> tuple[Tensor, float]:
    """Fast dimensions keep their frequency, slow ones are interpolated, with a ramp between. Peng et al., 2023."""
    original = rope["original_max_position_embeddings"]
    factor = rope["factor"] or max_positions / original
    magnitude = rope.get("attention_factor")
    if magnitude is None:
        scale, scale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        magnitude = _magnitude(factor, 1.0)
        if scale and scale_all:
            magnitude = _magnitude(factor, scale) / _magnitude(factor, scale_all)

    def turning(turns: float) -> float:  # the dimension that turns this often within the original length
        return dim * _ln(original / (turns * 2 * math.pi)) / (2 * _ln(float(rope["rope_theta"])))

    first, last = turning(rope.get("beta_fast") or 32), turning(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = last - first if last != first else 0.001
    ramp = ((torch.arange(len(frequencies), dtype=torch.float64) - first) / width).clamp(0.0, 1.0)
    return (frequencies / factor) * ramp + frequencies * (1.0 - ramp), magnitude


def tables(config: PretrainedConfig, positions: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of all positions, float32 [positions, D/2] each, from float64. Su et al., 2021."""
    frequencies, scaling = inverse_frequencies(config)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    cosine, sine = cos_sin(angles)
    return (cosine * scaling).to(torch.float32), (sine * scaling).to(torch.float32)
