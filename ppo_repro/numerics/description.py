"""A transformers trunk as data: which of its parameters are which matrix of a layer, and the numbers of its config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.errors import UserError
from ppo_repro.numerics.families import MIXTURES, check_visibility, head_dim, key_value_heads, windows_of

RMS, RMS_OFFSET, LAYER = range(3)  # kinds of norms in kernels.h
NO_NORM, OF_HEADS, WHOLE = range(3)  # norms of queries and keys
SILU, GELU, GELU_TANH, GELU_QUICK = range(4)
ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), SILU),
    **dict.fromkeys(("gelu", "gelu_python"), GELU),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "gelu_python_tanh"), GELU_TANH),
    "quick_gelu": GELU_QUICK,
}


@dataclass(frozen=True)
class NormParts:
    """A norm and its name in the model."""

    name: str
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class MatrixParts:
    """The parameters of a matrix [N, K], which belong one after the other; `transposed`: one parameter [K, N]."""

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]
    transposed: bool = False


@dataclass(frozen=True)
class LayerParts:
    """The parameters of a decoder layer."""

    norm1: NormParts
    norm2: NormParts
    qkv: MatrixParts
    out: MatrixParts
    q_norm: NormParts | None
    k_norm: NormParts | None
    up: MatrixParts | None  # gates first, then ups; None in a mixture of experts
    down: MatrixParts | None
    router: MatrixParts | None  # None without experts
    expert_up: Tensor | None  # [E, 2 I, H]
    expert_down: Tensor | None  # [E, H, I]
    window: int  # keys that a query sees; 0: all
    scale: float  # of scores


@dataclass(frozen=True)
class Description:
    """A trunk: what the C struct `Model` says of it."""

    config: PretrainedConfig
    embedding: Tensor
    padding: int  # the token whose embedding is not trained, as in nn.Embedding; -1: none
    embedding_scale: float
    positions: Tensor | None  # learned; None with rotary positions
    layers: tuple[LayerParts, ...]
    last_norm: NormParts
    norm: int
    eps: float
    activation: int
    gated: bool
    parallel: bool  # attention and MLP read the same input
    interleaved: bool  # query, key and value of a head lie together in a row
    experts: int = 0
    chosen: int = 0
    normalised: bool = False
    names: tuple[str, ...] = field(default=())  # of norms in the order of a forward pass

    @property
    def qk_norm(self) -> int:
        found = self.layers[0].q_norm
        if found is None:
            return NO_NORM
        return OF_HEADS if len(found.weight) == head_dim(self.config) else WHOLE

    @property
    def mixtures(self) -> int:
        """How many layers have experts."""
        return sum(layer.router is not None for layer in self.layers)


def check_config(config: PretrainedConfig, max_context: int) -> None:
    """UserError naming the first setting of a model that the kernels do not cover."""
    check_visibility(config, max_context)
    activation = "activation_function" if hasattr(config, "activation_function") else "hidden_act"
    refusals = {
        activation: getattr(config, activation) not in ACTIVATIONS,
        "clip_qkv": getattr(config, "clip_qkv", None) is not None,
        "pretraining_tp": getattr(config, "pretraining_tp", 1) not in (None, 1),
    }
    for name, refused in refusals.items():
        if refused:
            raise UserError(
                f"model config {name} = {getattr(config, name)!r}: deterministic numerics do not support it; "
                "choose another model or numerics.mode = native"
            )


def _norm(names: dict[int, str], module: Any) -> NormParts:
    return NormParts(names[id(module)], module.weight, getattr(module, "bias", None))


def _matrix(*modules: Any) -> MatrixParts:
    biases = tuple(m.bias for m in modules if getattr(m, "bias", None) is not None)
    return MatrixParts(tuple(m.weight for m in modules), biases, isinstance(modules[0], Conv1D))


def _mlp(block: Any) -> dict[str, Any]:
    """The parts of an MLP or of a mixture of experts; the tables of `families` know no other classes."""
    if isinstance(block, MIXTURES):
        experts: Any = block.experts
        return {
            **dict.fromkeys(("up", "down")),
            "router": _matrix(block.gate),
            "expert_up": experts.gate_up_proj,
            "expert_down": experts.down_proj,
        }
    none = dict.fromkeys(("router", "expert_up", "expert_down"))
    if hasattr(block, "gate_proj"):
        return {**none, "up": _matrix(block.gate_proj, block.up_proj), "down": _matrix(block.down_proj)}
    if hasattr(block, "c_fc"):
        return {**none, "up": _matrix(block.c_fc), "down": _matrix(block.c_proj)}
    return {**none, "up": _matrix(block.dense_h_to_4h), "down": _matrix(block.dense_4h_to_h)}


def _layer(names: dict[int, str], layer: Any, window: int) -> LayerParts:
    kind = next(name for name in ("self_attn", "attn", "attention") if hasattr(layer, name))
    attention = getattr(layer, kind)
    q_norm = k_norm = None
    if kind == "self_attn":
        qkv = _matrix(attention.q_proj, attention.k_proj, attention.v_proj)
        out = attention.o_proj
        if hasattr(attention, "q_norm"):
            q_norm, k_norm = _norm(names, attention.q_norm), _norm(names, attention.k_norm)
    else:
        qkv = _matrix(attention.c_attn if kind == "attn" else attention.query_key_value)
        out = attention.c_proj if kind == "attn" else attention.dense
    before, after = ("ln_1", "ln_2") if kind == "attn" else ("input_layernorm", "post_attention_layernorm")
    return LayerParts(
        norm1=_norm(names, getattr(layer, before)),
        norm2=_norm(names, getattr(layer, after)),
        qkv=qkv,
        out=_matrix(out),
        q_norm=q_norm,
        k_norm=k_norm,
        window=window,
        scale=float(attention.scaling),
        **_mlp(layer.mlp),
    )


def _norms(layers: tuple[LayerParts, ...], last: NormParts) -> Iterator[str]:
    for layer in layers:
        yield layer.norm1.name
        yield layer.norm2.name
    yield last.name


def describe(trunk: PreTrainedModel) -> Description:
    """The description of a trunk of a known family."""
    parts, config = cast(Any, trunk), trunk.config
    family = config.model_type
    names = {id(module): name for name, module in trunk.named_modules()}
    modules = parts.h if family == "gpt2" else parts.layers
    layers = tuple(_layer(names, layer, window) for layer, window in zip(modules, windows_of(config), strict=True))
    last = {"gpt2": "ln_f", "gpt_neox": "final_layer_norm"}.get(family, "norm")
    table = getattr(parts, {"gpt2": "wte", "gpt_neox": "embed_in"}.get(family, "embed_tokens"))
    last_norm = _norm(names, getattr(parts, last))
    layer_norms = family in ("gpt2", "gpt_neox")
    eps = {"gpt2": "layer_norm_epsilon", "gpt_neox": "layer_norm_eps"}.get(family, "rms_norm_eps")
    activation = "activation_function" if hasattr(config, "activation_function") else "hidden_act"
    block = next((m for m in trunk.modules() if isinstance(m, MIXTURES)), None)
    router = None if block is None else cast(Any, block).gate
    return Description(
        config=config,
        embedding=table.weight,
        padding=-1 if table.padding_idx is None else int(table.padding_idx),
        embedding_scale=math.sqrt(config.hidden_size) if family == "gemma" else 1.0,
        positions=parts.wpe.weight if family == "gpt2" else None,
        layers=layers,
        last_norm=last_norm,
        norm=LAYER if layer_norms else RMS_OFFSET if family == "gemma" else RMS,
        eps=float(getattr(config, eps)),
        activation=ACTIVATIONS[getattr(config, activation)],
        gated=not layer_norms,
        parallel=family == "gpt_neox" and bool(config.use_parallel_residual),
        interleaved=family == "gpt_neox",
        experts=0 if router is None else len(router.weight),
        chosen=0 if router is None else int(router.top_k),
        normalised=bool(getattr(router, "norm_topk_prob", True)),  # Mixtral's always are
        names=tuple(_norms(layers, last_norm)),
    )


def heads_in_row(description: Description) -> tuple[int, int, int, int, int, int]:
    """Where queries, keys and values begin in a row of the first product, and how far their heads are apart."""
    config = description.config
    d, heads, kv_heads = head_dim(config), config.num_attention_heads, key_value_heads(config)
    if description.interleaved:
        return 0, 3 * d, d, 3 * d, 2 * d, 3 * d
    return 0, d, heads * d, d, (heads + kv_heads) * d, d
