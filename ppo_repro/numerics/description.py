"""Describe a transformers trunk as data, and refuse settings of its config that the numerics do not compute."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.base.errors import UserError
from ppo_repro.numerics.families import (
    FAMILIES,
    MIXTURES,
    FamilyNames,
    head_dim,
    key_value_heads,
    number_of,
    positions_of,
    ropes_of,
    windows_of,
)
from ppo_repro.numerics.interface import constants
from ppo_repro.numerics.ranges import check_ranges

ACTIVATIONS = {  # by transformers' names
    "silu": constants.ACT_SILU,
    "swish": constants.ACT_SILU,
    "gelu": constants.ACT_GELU,
    "gelu_python": constants.ACT_GELU,
    "gelu_new": constants.ACT_GELU_TANH,
    "gelu_fast": constants.ACT_GELU_TANH,
    "gelu_accurate": constants.ACT_GELU_TANH,
    "gelu_pytorch_tanh": constants.ACT_GELU_TANH,
    "gelu_python_tanh": constants.ACT_GELU_TANH,
}
NORMS = ("norm1", "norm1_after", "norm2", "norm2_after")  # of a layer, as `model_forward` counts them


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """Parameters and numbers of a decoder layer, by the fields of the C struct `Layer`."""

    norms: dict[str, Any]  # modules
    matrices: dict[str, tuple[nn.Module, ...]]  # linear layers whose outputs follow one another; `up`: gates, then ups
    experts: dict[str, Tensor]  # expert_up [E, 2 I, H], expert_down [E, H, I]; empty without experts
    rope: dict[str, Any] | None  # parameters of rotary positions
    numbers: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Description:
    """Description of a trunk: its parameters, and the numbers of the C struct `Model` by field."""

    embedding: Tensor
    positions: Tensor | None  # learned
    layers: tuple[LayerParts, ...]
    last_norm: nn.Module
    numbers: dict[str, float]


def activation_of(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the field of a configuration that names the activation, and its value."""
    field = FAMILIES[config.model_type].names.activation
    return field, getattr(config, field)


def plain(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration with the same shapes, without settings that only native numerics support."""
    same = copy.deepcopy(config)
    setattr(same, activation_of(config)[0], "silu")
    for rope in filter(None, ropes_of(same)):
        rope["rope_type"] = "default"
    return same


def refuse(config: PretrainedConfig, refusals: dict[str, bool], reason: str) -> None:
    """Raise UserError for the first refused setting of a model, with the reason and the remedy."""
    for name, refused in refusals.items():
        if refused:
            raise UserError(f"model config {name} = {getattr(config, name)!r}: {reason}")


def check_visibility(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError unless each query sees only its own past, all of it or a window, up to `max_context` tokens.

    The batch layouts and the key/value caches assume this visibility, in both numerics. All numbers must be in their
    ranges.
    """
    check_ranges(vars(config), "model config")
    types = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = ["full_attention"]
    if FAMILIES[config.model_type].windows == "by layer_types":
        known.append("sliding_attention")
    refuse(config, {"layer_types": not types <= set(known)}, f"each must be {' or '.join(known)}; choose another model")
    is_missing = "sliding_attention" in types and config.sliding_window is None
    refuse(config, {"sliding_window": is_missing}, "sliding_attention in layer_types needs a number; restore it")
    refusals = {
        "is_causal": not getattr(config, "is_causal", True),
        "use_bidirectional_attention": bool(getattr(config, "use_bidirectional_attention", False)),
        "add_cross_attention": bool(getattr(config, "add_cross_attention", False)),
    }
    refuse(config, refusals, "not supported; choose a model whose tokens see only their own past")
    positions, beyond = positions_of(config), ""
    if positions < config.max_position_embeddings:
        beyond = ", and other rotary frequencies in longer sequences"
    if max_context > positions:
        has = f"the model has {positions} positions{beyond}"
        raise UserError(f"numerics.max_context = {max_context}: {has}; choose a smaller context")


def check_config(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError for the first setting of a model that the kernels do not support."""
    check_visibility(config, max_context)
    activation, function = activation_of(config)
    known, otherwise = ", ".join(ACTIVATIONS), "choose another model or numerics.mode = native"
    refuse(config, {activation: function not in ACTIVATIONS}, f"deterministic numerics know {known}; {otherwise}")
    refusals = {
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (None, 1),
    }
    refuse(config, refusals, f"deterministic numerics do not support it; {otherwise}")


def _layer(names: FamilyNames, layer: Any, window: int, rope: dict[str, Any] | None, score_cap: float) -> LayerParts:
    """Return the parts of a decoder layer.

    Args:
        window: number of keys that a query sees; 0 for all.
        rope: parameters of its rotary positions; None without them.
        score_cap: soft cap of scores; 0 for none.
    """
    attention, mlp = getattr(layer, names.attention), layer.mlp
    norms = {name: getattr(layer, module) for name in NORMS if (module := getattr(names, name)) is not None}
    norms |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    matrices = {"qkv": tuple(getattr(attention, name) for name in names.qkv), "out": (getattr(attention, names.out),)}
    experts = {}
    if isinstance(mlp, MIXTURES):
        mixture = cast(Any, mlp)
        matrices["router"] = (mixture.gate,)
        experts = {"expert_up": mixture.experts.gate_up_proj, "expert_down": mixture.experts.down_proj}
    else:
        matrices |= {"up": tuple(getattr(mlp, name) for name in names.up), "down": (getattr(mlp, names.down),)}
    numbers = dict(
        norms_before="norm1" in norms,
        norms_after="norm1_after" in norms,
        window=window,
        scale=float(attention.scaling),
        score_cap=score_cap,
    )
    return LayerParts(norms=norms, matrices=matrices, experts=experts, rope=rope, numbers=numbers)


def _qk_norm(layer: LayerParts, head_dim: int) -> int:
    """Return the kind of a layer's norms of queries and keys."""
    of_queries = layer.norms.get("q_norm")
    if of_queries is None:
        return int(constants.QK_NORM_NONE)
    return int(constants.QK_NORM_HEAD if len(of_queries.weight) == head_dim else constants.QK_NORM_WHOLE)


def _head_columns(joined: bool, heads: int, kv_heads: int, d: int) -> dict[str, float]:
    """Return the columns at which queries, keys and values begin in a row of qkv, and the distance of two heads."""
    if joined:
        return dict(q_at=0, q_step=3 * d, k_at=d, k_step=3 * d, v_at=2 * d, v_step=3 * d)
    return dict(q_at=0, q_step=d, k_at=heads * d, k_step=d, v_at=(heads + kv_heads) * d, v_step=d)


def describe(trunk: PreTrainedModel) -> Description:
    """Return the description of a trunk of a known family."""
    parts, config = cast(Any, trunk), trunk.config
    family = FAMILIES[config.model_type]
    names = family.names
    cap = number_of(config, family.score_cap, 0.0)
    layers = tuple(
        _layer(names, layer, window, rope, cap)
        for layer, window, rope in zip(getattr(parts, names.layers), windows_of(config), ropes_of(config), strict=True)
    )
    table = getattr(parts, names.embedding)
    positions = getattr(parts, family.learned_positions).weight if family.learned_positions else None
    mixture = next((cast(Any, m) for m in trunk.modules() if isinstance(m, MIXTURES)), None)
    root = math.sqrt(config.hidden_size)
    heads, kv_heads, d = config.num_attention_heads, key_value_heads(config), head_dim(config)
    numbers: dict[str, float] = dict(
        layers=len(layers),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        vocabulary=len(table.weight),
        norm=family.norm,
        head_norm=constants.NORM_RMS if family.norm == constants.NORM_LAYER else family.norm,
        qk_norm=_qk_norm(layers[0], d),
        **_head_columns(family.joins_heads, heads, kv_heads, d),
        activation=ACTIVATIONS[activation_of(config)[1]],
        gated=family.gated,
        parallel=family.may_be_parallel and bool(config.use_parallel_residual),
        experts=0 if mixture is None else len(mixture.gate.weight),
        chosen=0 if mixture is None else int(mixture.gate.top_k),
        normalised=mixture is not None and bool(getattr(mixture.gate, "norm_topk_prob", True)),  # Mixtral's always are
        mixtures=sum(bool(layer.experts) for layer in layers),
        position_entries=0 if positions is None else len(positions),
        padding=-1 if table.padding_idx is None else int(table.padding_idx),
        eps=float(getattr(config, names.eps)),
        embedding_scale=number_of(config, family.embedding_scale, root if family.scales_embedding else 1.0),
        residual_scale=number_of(config, family.residual_scale, 1.0),
    )
    return Description(
        embedding=table.weight,
        positions=positions,
        layers=layers,
        last_norm=getattr(parts, names.last_norm),
        numbers=numbers,
    )
