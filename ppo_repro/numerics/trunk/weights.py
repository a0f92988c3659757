"""A lowered trunk as its parts in the order of their use, to be run kernel after kernel without its modules.

The same kernels in the same order give the bits of the modules; what is saved is the time between them, which for small
models is half of the time of training and most of the time of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.arithmetic.grid import operand_bits
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.kernels import norms
from ppo_repro.numerics.kernels.amx.product import NO_BIAS
from ppo_repro.numerics.kernels.attention.block import Spec
from ppo_repro.numerics.layers.fused_attention import spec_of
from ppo_repro.numerics.layers.linear import ExactEmbedding, ExactLinear, ExactRMSNorm, ExactRotary, ExactSiLU
from ppo_repro.numerics.products import PreparedWeight, array

TRUNKS = (LlamaModel, Qwen2Model, Qwen3Model, MistralModel)


@dataclass(frozen=True)
class Linear:
    """y = x W^T + b. Parameters are the live ones; `accumulator` takes their gradients, None where all are frozen."""

    prepared: PreparedWeight
    weight: Tensor
    bias: Tensor | None
    bias_values: np.ndarray  # empty without a bias
    accumulator: GradientAccumulator | None


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    values: np.ndarray
    eps: float
    name: str
    accumulator: GradientAccumulator | None


@dataclass(frozen=True)
class Layer:
    index: int
    before_attention: Norm
    query: Linear
    key: Linear
    value: Linear
    query_norm: Norm | None  # Qwen3 has them
    key_norm: Norm | None
    out: Linear
    window: int | None
    spec: Spec
    context: int  # so many keys a query may see
    before_mlp: Norm
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Trunk:
    """The live weights of a trunk in the order of their use."""

    embedding: Tensor
    padding_idx: int | None
    embedding_accumulator: GradientAccumulator | None
    cosine: np.ndarray
    sine: np.ndarray
    layers: tuple[Layer, ...]
    last: Norm


def parts_of(trunk: PreTrainedModel) -> Trunk | None:
    """The parts of a lowered trunk; None where its modules have to be called.

    That is where another family is built otherwise, a layer is not of the kind known here, or somebody watches a
    module through a hook.
    """
    modules = list(trunk.modules())
    if type(trunk) not in TRUNKS or any(_is_watched(m) for m in modules):
        return None
    parts = cast(Any, trunk)
    known = type(parts.embed_tokens) is ExactEmbedding and type(parts.rotary_emb) is ExactRotary
    leaves = [m for layer in parts.layers for m in layer.modules() if not m._modules]
    if not known or any(type(m) not in (ExactLinear, ExactRMSNorm, ExactSiLU) for m in leaves):
        return None
    return Trunk(
        parts.embed_tokens.weight,
        parts.embed_tokens.padding_idx,
        parts.embed_tokens.accumulator,
        array(parts.rotary_emb.cosine),
        array(parts.rotary_emb.sine),
        tuple(_layer(index, layer, trunk) for index, layer in enumerate(parts.layers)),
        _norm(parts.norm),
    )


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _norm(module: ExactRMSNorm) -> Norm:
    return Norm(module.weight, array(module.weight), module.eps, module.name, module.accumulator)


def _linear(module: ExactLinear) -> Linear:
    bias_values = NO_BIAS if module.bias is None else array(module.bias)
    return Linear(module.prepared, module.weight, module.bias, bias_values, module.accumulator)


def _layer(index: int, layer: nn.Module, trunk: PreTrainedModel) -> Layer:
    parts = cast(Any, layer)
    a, mlp, config = parts.self_attn, parts.mlp, trunk.config
    own = config if isinstance(trunk, MistralModel) else a  # as the attention modules themselves take it
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return Layer(
        index=index,
        before_attention=_norm(parts.input_layernorm),
        query=_linear(a.q_proj),
        key=_linear(a.k_proj),
        value=_linear(a.v_proj),
        query_norm=_norm(a.q_norm) if isinstance(trunk, Qwen3Model) else None,
        key_norm=_norm(a.k_norm) if isinstance(trunk, Qwen3Model) else None,
        out=_linear(a.o_proj),
        window=getattr(own, "sliding_window", None),
        spec=spec_of(heads, kv_heads, a.head_dim, a.scaling, a.max_context),
        context=a.max_context,
        before_mlp=_norm(parts.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def normed(norm: Norm, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The norm of each row of x [n, H] float32, and 1 / sqrt(mean(x^2) + eps), float64 [n]."""
    y, inverse = np.empty_like(x), np.empty(len(x))
    if not norms.rms_norm(x, norm.values, norm.eps, operand_bits(x.shape[1]), inverse, y):
        raise NumericsError(f"the input of {norm.name} is not finite")
    return y, inverse


def products(layers: Sequence[Linear], x: np.ndarray) -> list[np.ndarray]:
    """x W^T + b, float32, of layers that share an input, which is put on its grid once."""
    operand = layers[0].prepared.operand(x)
    return [layer.prepared.product(operand, layer.weight, 1, layer.bias_values) for layer in layers]
