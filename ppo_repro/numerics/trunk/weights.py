"""The weights of a lowered trunk in the order of their use, to be run kernel after kernel without its modules.

The same kernels in the same order give the bits of the modules. Only the time between them is saved, which for small
models is half of the time of training and most of the time of decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from ppo_repro.numerics.gradient_bins import Gradients
from ppo_repro.numerics.kernels.attention.block import Spec
from ppo_repro.numerics.layers.activations import ExactSiLU
from ppo_repro.numerics.layers.embedding import ExactEmbedding
from ppo_repro.numerics.layers.families import LLAMA_TRUNKS, modules_of
from ppo_repro.numerics.layers.fused_attention import spec_of
from ppo_repro.numerics.layers.linear import ExactLinear
from ppo_repro.numerics.layers.norms import ExactRMSNorm
from ppo_repro.numerics.layers.rotary import ExactRotary
from ppo_repro.numerics.products import NO_BIAS, PreparedWeight, array


@dataclass(frozen=True)
class LinearWeights:
    """y = x W^T + b. Parameters are the live ones; `accumulator` takes their gradients, None where all are frozen."""

    prepared: PreparedWeight
    weight: Tensor
    bias: Tensor | None
    bias_values: np.ndarray  # empty without a bias
    accumulator: Gradients | None


@dataclass(frozen=True)
class NormWeights:
    """The live factor of a root-mean-square norm, as a parameter and as an array."""

    weight: Tensor
    values: np.ndarray
    eps: float
    name: str
    accumulator: Gradients | None


@dataclass(frozen=True)
class Layer:
    """A decoder layer: attention with rotary positions, then a gated MLP, each after its norm."""

    index: int
    attention_norm: NormWeights
    query: LinearWeights
    key: LinearWeights
    value: LinearWeights
    query_norm: NormWeights | None  # Qwen3 has them
    key_norm: NormWeights | None
    out: LinearWeights
    window: int | None
    spec: Spec
    max_context: int  # most keys that a query may see
    mlp_norm: NormWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """All linear layers."""
        return self.query, self.key, self.value, self.out, self.gate, self.up, self.down

    @property
    def norms(self) -> tuple[NormWeights, ...]:
        """All norms."""
        norms = self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm
        return tuple(norm for norm in norms if norm is not None)


@dataclass(frozen=True)
class Trunk:
    """The live weights of a trunk in the order of their use."""

    embedding: Tensor
    padding_idx: int | None
    embedding_accumulator: Gradients | None
    cosine: np.ndarray
    sine: np.ndarray
    layers: tuple[Layer, ...]
    final_norm: NormWeights


def unpack(trunk: PreTrainedModel) -> Trunk | None:
    """The weights of a lowered trunk; None where its modules have to be called.

    That is the case for a family of another structure, for a layer of a kind not known here (one that rounds), and
    where a module has hooks.
    """
    modules = modules_of(trunk)
    if type(trunk) not in LLAMA_TRUNKS or any(_has_hooks(m) for m in modules):
        return None
    model = cast(Any, trunk)
    known = type(model.embed_tokens) is ExactEmbedding and type(model.rotary_emb) is ExactRotary
    leaves = [m for layer in model.layers for m in modules_of(layer) if not m._modules]
    if not known or any(type(m) not in (ExactLinear, ExactRMSNorm, ExactSiLU) for m in leaves):
        return None
    return Trunk(
        model.embed_tokens.weight,
        model.embed_tokens.padding_idx,
        model.embed_tokens.accumulator,
        array(model.rotary_emb.cosine),
        array(model.rotary_emb.sine),
        tuple(_layer(index, layer, trunk) for index, layer in enumerate(model.layers)),
        _norm(model.norm),
    )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _norm(module: ExactRMSNorm) -> NormWeights:
    return NormWeights(module.weight, array(module.weight), module.eps, module.name, module.accumulator)


def _linear(module: ExactLinear) -> LinearWeights:
    bias_values = NO_BIAS if module.bias is None else array(module.bias)
    return LinearWeights(module.prepared, module.weight, module.bias, bias_values, module.accumulator)


def _layer(index: int, module: nn.Module, trunk: PreTrainedModel) -> Layer:
    layer = cast(Any, module)
    a, mlp, config = layer.self_attn, layer.mlp, trunk.config
    has_window = config if isinstance(trunk, MistralModel) else a  # where the attention modules themselves look
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return Layer(
        index=index,
        attention_norm=_norm(layer.input_layernorm),
        query=_linear(a.q_proj),
        key=_linear(a.k_proj),
        value=_linear(a.v_proj),
        query_norm=_norm(a.q_norm) if isinstance(trunk, Qwen3Model) else None,
        key_norm=_norm(a.k_norm) if isinstance(trunk, Qwen3Model) else None,
        out=_linear(a.o_proj),
        window=getattr(has_window, "sliding_window", None),
        spec=spec_of(heads, kv_heads, a.head_dim, a.scaling),
        max_context=a.max_context,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )
