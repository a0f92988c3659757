"""Describe a transformer of any family as arrays, which the other files of the definition use."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

import numpy as np

from ppo_repro.numerics.definition.elementary import Array
from ppo_repro.numerics.definition.product import Precision
from ppo_repro.numerics.definition.rounding import Rounding


@dataclass(frozen=True)
class NormWeights:
    """Weights w [C] of a norm, and b [C] of a LayerNorm."""

    w: Array
    b: Array | None = None


@dataclass(frozen=True)
class Matrix:
    """Weights w [N, K] and bias [N] of a linear layer y = x w^T + bias, and the precision of its products."""

    w: Array
    bias: Array | None = None
    precision: Precision = "highest"


@dataclass(frozen=True)
class Rotary:
    """Cosines and sines [positions, R / 2] of a layer in which R elements of a head rotate."""

    cosine: Array
    sine: Array


@dataclass(frozen=True)
class Layer:
    """Weights of a decoder layer: attention, then an MLP (`up`, `down`) or a mixture of experts (`router`, ..).

    `up` is [2 I, H], the rows of gates first, if the MLP is gated, else [I, H].
    """

    qkv: Matrix
    out: Matrix
    norm1: NormWeights | None = None  # of the input of attention
    norm1_after: NormWeights | None = None  # of the result of attention
    norm2: NormWeights | None = None  # of the input of the MLP
    norm2_after: NormWeights | None = None  # of the result of the MLP
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    up: Matrix | None = None
    down: Matrix | None = None
    router: Matrix | None = None
    expert_up: tuple[Matrix, ...] = ()
    expert_down: tuple[Matrix, ...] = ()
    window: int = 0  # keys that a query sees, its own included; 0: all
    rotary: Rotary | None = None
    scale: float = 1.0  # of attention scores
    score_cap: float = 0.0  # scores become cap tanh(score / cap); 0: they stay


@dataclass(frozen=True)
class Model:
    """Transformer below its head. Head h of queries has columns q_at + h q_step .. + head_dim - 1 of a row of qkv."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    embedding: Array  # [V, H]
    layers: tuple[Layer, ...]
    last_norm: NormWeights
    q_at: int
    q_step: int
    k_at: int
    k_step: int
    v_at: int
    v_step: int
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of results of attention and MLP, where they are added
    norm: Literal["rms", "rms_offset", "layer"] = "rms"
    qk_norm: Literal["none", "head", "whole"] = "none"
    head_norm: Literal["rms", "rms_offset"] = "rms"  # of queries and keys
    activation: str = "silu"  # a name in `rows.ACTIVATIONS`
    gated: bool = True
    parallel: bool = False
    positions: Array | None = None  # learned, [positions, H]
    chosen: int = 0  # experts of a token
    normalised: bool = False  # routing weights are a softmax over the chosen experts, not over all
    padding: int = -1  # a token whose embedding takes no gradient
    rounding: Rounding = field(default_factory=Rounding)


def parameters(model: Model) -> dict[str, Array]:
    """Return every trained array of a model by its path, for example `layers.1.expert_up.3.w`."""
    found: dict[str, Array] = {}

    def walk(part: object, path: str) -> None:
        if isinstance(part, np.ndarray):
            found[path] = part
        elif isinstance(part, tuple):
            for index, item in enumerate(part):
                walk(item, f"{path}.{index}")
        elif isinstance(part, (Layer, Matrix, NormWeights)):
            for each in fields(part):
                walk(getattr(part, each.name), f"{path}.{each.name}")

    for name in ("embedding", "positions", "layers", "last_norm"):
        walk(getattr(model, name), name)
    return found
