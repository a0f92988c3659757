"""Compute rotary positions: the frequencies of a layer's parameters, and their tables of cosine and sine."""

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
    """Return the frequencies theta^(-2i/D), float64 [D/2], of a layer's rotary parameters, scaled by their type.

    theta is rounded to float32. The types are `default`, `linear` (position interpolation), `llama3`, `yarn`, and
    `longrope` with its short factors: `families.positions_of` refuses sequences that need the long factors. Raises
    UserError, which names any other: `dynamic` changes with the current length, so that no cached key could equal a
    recomputed one.
    """
    partial, kind, family = rope.get("partial_rotary_factor", 1.0), rope["rope_type"], FAMILIES[config.model_type]
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
    if kind == "yarn":
        smooth = _yarn_ramp(rope, dim, float(log(theta)))
        return (frequencies / rope["factor"]) * smooth + frequencies * (1.0 - smooth)
    if kind == "longrope":
        return frequencies / _short_factors(rope, dim)
    known = "default, linear, llama3, yarn or longrope"
    raise UserError(f"model config rope_type = '{kind}': must be {known} in deterministic numerics")


def _log(x: float) -> float:
    return float(log(torch.tensor([x], dtype=torch.float64)))


def _yarn_ramp(rope: dict[str, Any], dim: int, log_theta: float) -> Tensor:
    """Return 0 for frequencies that stay, 1 for those to divide, and a ramp between, [D/2]. Peng et al., 2023."""
    context = rope["original_max_position_embeddings"]
    fast, slow = rope.get("beta_fast") or 32, rope.get("beta_slow") or 1  # turns in the original context
    low, high = (dim * _log(context / (turns * 2 * math.pi)) / (2 * log_theta) for turns in (fast, slow))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    return ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0.0, 1.0)


def _short_factors(rope: dict[str, Any], dim: int) -> Tensor:
    """Return the divisors of frequencies, float64 [D/2], up to the original context. Ding et al., 2024."""
    factors = rope["short_factor"]
    if len(factors) != dim // 2 or not all(1e-9 <= factor <= 1e9 for factor in factors):
        raise UserError(f"model config short_factor: must be {dim // 2} numbers from 1e-09 to 1e+09; restore it")
    return torch.tensor(factors, dtype=torch.float64)


def attention_factor(config: PretrainedConfig, rope: dict[str, Any]) -> float:
    """Return the factor of cosines and sines: of `yarn` and `longrope` a function of the longer context, else 1."""
    kind, fixed = rope["rope_type"], rope.get("attention_factor")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if fixed is not None:
        return float(fixed)
    context = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or config.max_position_embeddings / context
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + _log(factor) / _log(context))
    scale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    both = (scale, of_all) if scale and of_all else (1.0, 0.0)
    return (0.1 * both[0] * _log(factor) + 1.0) / (0.1 * both[1] * _log(factor) + 1.0)


def tables(config: PretrainedConfig, rope: dict[str, Any], positions: int) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of all positions, float32 [positions, D/2] each, from float64. Su et al., 2021."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies(config, rope)
    cosine, sine = (table * attention_factor(config, rope) for table in cos_sin(angles))
    return cosine.to(torch.float32), sine.to(torch.float32)
