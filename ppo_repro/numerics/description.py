"""A transformers trunk as data: which of its parameters are which matrix of a layer, and the numbers of its config."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ppo_repro.numerics.families import MIXTURES, check_visibility, head_dim, key_value_heads, refuse, windows_of
from ppo_repro.numerics.interface import constants

ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), constants.ACT_SILU),
    **dict.fromkeys(("gelu", "gelu_python"), constants.ACT_GELU),
    **dict.fromkeys(
        ("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), constants.ACT_GELU_TANH
    ),
}


class _Names(NamedTuple):
    """What a family calls the parts of its trunk; the defaults are those of Llama."""

    layers: str = "layers"
    embedding: str = "embed_tokens"
    norm1: str = "input_layernorm"
    norm2: str = "post_attention_layernorm"
    last_norm: str = "norm"
    eps: str = "rms_norm_eps"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    out: str = "o_proj"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


_GPT2 = _Names(
    *("h", "wte", "ln_1", "ln_2", "ln_f", "layer_norm_epsilon"), "attn", ("c_attn",), "c_proj", ("c_fc",), "c_proj"
)
_GPT_NEOX = _Names(
    *("layers", "embed_in", "input_layernorm", "post_attention_layernorm", "final_layer_norm", "layer_norm_eps"),
    *("attention", ("query_key_value",), "dense", ("dense_h_to_4h",), "dense_4h_to_h"),
)


@dataclass(frozen=True, kw_only=True)
class LayerParts:
    """The parameters of a decoder layer by the fields of the C struct `Layer`."""

    norms: dict[str, Any]  # modules
    matrices: dict[str, tuple[nn.Module, ...]]  # linear layers whose outputs follow one another; `up`: gates, then ups
    experts: dict[str, Tensor]  # expert_up [E, 2 I, H], expert_down [E, H, I]; empty without experts
    window: int  # keys that a query sees; 0: all
    scale: float  # of scores


@dataclass(frozen=True, kw_only=True)
class Description:
    """A trunk: its parameters, and the numbers of the C struct `Model` by field."""

    embedding: Tensor
    positions: Tensor | None  # learned; None with rotary positions
    layers: tuple[LayerParts, ...]
    last_norm: nn.Module
    numbers: dict[str, float]


def activation_of(config: PretrainedConfig) -> tuple[str, Any]:
    """Return the field of a configuration that names the activation, and its value."""
    field = "activation_function" if hasattr(config, "activation_function") else "hidden_act"
    return field, getattr(config, field)


def plain(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration with the same shapes, and nothing that native numerics cover alone."""
    same = copy.deepcopy(config)
    setattr(same, activation_of(config)[0], "silu")
    if getattr(same, "rope_parameters", None):
        same.rope_parameters |= {"rope_type": "default"}
    return same


def check_config(config: PretrainedConfig, max_context: int) -> None:
    """Raise UserError naming the first setting of a model that the kernels do not cover."""
    check_visibility(config, max_context)
    activation, function = activation_of(config)
    refusals = {
        activation: function not in ACTIVATIONS,
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (None, 1),
    }
    refuse(
        config,
        refusals,
        "deterministic numerics do not support it; choose another model or numerics.mode = native",
    )


def _layer(names: _Names, layer: Any, window: int) -> LayerParts:
    attention, mlp = getattr(layer, names.attention), layer.mlp
    norms = {name: getattr(layer, getattr(names, name)) for name in ("norm1", "norm2")}
    norms |= {name: getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)}
    matrices = {"qkv": tuple(getattr(attention, name) for name in names.qkv), "out": (getattr(attention, names.out),)}
    experts = {}
    if isinstance(mlp, MIXTURES):
        mixture = cast(Any, mlp)
        matrices["router"] = (mixture.gate,)
        experts = {"expert_up": mixture.experts.gate_up_proj, "expert_down": mixture.experts.down_proj}
    else:
        matrices |= {"up": tuple(getattr(mlp, name) for name in names.up), "down": (getattr(mlp, names.down),)}
    scale = float(attention.scaling)
    return LayerParts(norms=norms, matrices=matrices, experts=experts, window=window, scale=scale)


def describe(trunk: PreTrainedModel) -> Description:
    """Return the description of a trunk of a known family."""
    parts, config = cast(Any, trunk), trunk.config
    family = config.model_type
    names = {"gpt2": _GPT2, "gpt_neox": _GPT_NEOX}.get(family, _Names())
    modules = zip(getattr(parts, names.layers), windows_of(config), strict=True)
    layers = tuple(_layer(names, layer, window) for layer, window in modules)
    table = getattr(parts, names.embedding)
    positions = parts.wpe.weight if family == "gpt2" else None
    layer_norms = family in ("gpt2", "gpt_neox")
    mixture = next((cast(Any, m) for m in trunk.modules() if isinstance(m, MIXTURES)), None)
    q_norm = layers[0].norms.get("q_norm")
    heads, kv_heads, d = config.num_attention_heads, key_value_heads(config), head_dim(config)
    in_row: dict[str, float] = dict(q_at=0, q_step=d, k_at=heads * d, k_step=d, v_at=(heads + kv_heads) * d, v_step=d)
    if family == "gpt_neox":  # query, key and value of a head lie together in a row
        in_row = dict(q_at=0, q_step=3 * d, k_at=d, k_step=3 * d, v_at=2 * d, v_step=3 * d)
    norm = constants.NORM_RMS_OFFSET if family == "gemma" else constants.NORM_RMS
    if layer_norms:
        norm = constants.NORM_LAYER
    qk_norm = constants.QK_NORM_NONE
    if q_norm is not None:
        qk_norm = constants.QK_NORM_HEAD if len(q_norm.weight) == d else constants.QK_NORM_WHOLE
    numbers: dict[str, float] = dict(
        layers=len(layers),
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        vocabulary=len(table.weight),
        norm=norm,
        qk_norm=qk_norm,
        activation=ACTIVATIONS[activation_of(config)[1]],
        gated=len(names.up) == 2,
        parallel=family == "gpt_neox" and bool(config.use_parallel_residual),
        experts=0 if mixture is None else len(mixture.gate.weight),
        chosen=0 if mixture is None else int(mixture.gate.top_k),
        normalised=mixture is not None and bool(getattr(mixture.gate, "norm_topk_prob", True)),  # Mixtral's always are
        mixtures=sum(bool(layer.experts) for layer in layers),
        position_entries=0 if positions is None else len(positions),
        padding=-1 if table.padding_idx is None else int(table.padding_idx),
        eps=float(getattr(config, names.eps)),
        embedding_scale=math.sqrt(config.hidden_size) if family == "gemma" else 1.0,
    )
    return Description(
        embedding=table.weight,
        positions=positions,
        layers=layers,
        last_norm=getattr(parts, names.last_norm),
        numbers=numbers | in_row,
    )
