"""One token for each of some sequences through a lowered trunk, kernel after kernel, without its modules.

The same kernels in the same order give the same bits; what is saved is the time between them, which for small models
is most of the time of decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from ppo_repro.errors import NumericsError
from ppo_repro.kernels import decoding, norms
from ppo_repro.kernels.amx import NO_BIAS
from ppo_repro.kernels.attention_block import Spec
from ppo_repro.numerics.fused_attention import attend_arrays, spec_of
from ppo_repro.numerics.grid import operand_bits
from ppo_repro.numerics.kv_cache import GridCache
from ppo_repro.numerics.layers import ExactEmbedding, ExactLinear, ExactRMSNorm, ExactRotary, ExactSiLU
from ppo_repro.numerics.products import Weight, array

TRUNKS = (LlamaModel, Qwen2Model, Qwen3Model, MistralModel)


@dataclass(frozen=True)
class _Linear:
    prepared: Weight
    weight: Tensor
    bias: np.ndarray


@dataclass(frozen=True)
class _Norm:
    weight: np.ndarray
    eps: float
    name: str


@dataclass(frozen=True)
class _Layer:
    before_attention: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None  # Qwen3 has them
    key_norm: _Norm | None
    out: _Linear
    window: int | None
    spec: Spec
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear


@dataclass(frozen=True)
class Decoder:
    """The live weights of a trunk in the order of their use."""

    embedding: np.ndarray
    cosine: np.ndarray
    sine: np.ndarray
    layers: tuple[_Layer, ...]
    last: _Norm


def decoder_of(trunk: PreTrainedModel) -> Decoder | None:
    """What `decode` needs of a lowered trunk; None where its modules have to be called.

    That is where another family is built otherwise, a layer is not of the kind known here, or somebody watches a
    module through a hook.
    """
    modules = list(trunk.modules())
    if type(trunk) not in TRUNKS or any(m._forward_hooks or m._forward_pre_hooks for m in modules):
        return None
    parts = cast(Any, trunk)
    known = type(parts.embed_tokens) is ExactEmbedding and type(parts.rotary_emb) is ExactRotary
    leaves = [m for layer in parts.layers for m in layer.modules() if not list(m.children())]
    if not known or any(type(m) not in (ExactLinear, ExactRMSNorm, ExactSiLU) for m in leaves):
        return None
    return Decoder(
        array(parts.embed_tokens.weight),
        array(parts.rotary_emb.cosine),
        array(parts.rotary_emb.sine),
        tuple(_layer(layer, trunk) for layer in parts.layers),
        _norm(parts.norm),
    )


def _norm(module: ExactRMSNorm) -> _Norm:
    return _Norm(array(module.weight), module.eps, module.name)


def _linear(module: ExactLinear) -> _Linear:
    return _Linear(module.prepared, module.weight, NO_BIAS if module.bias is None else array(module.bias))


def _layer(layer: nn.Module, trunk: PreTrainedModel) -> _Layer:
    parts = cast(Any, layer)
    a, mlp, config = parts.self_attn, parts.mlp, trunk.config
    own = config if isinstance(trunk, MistralModel) else a  # as the attention modules themselves take it
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return _Layer(
        before_attention=_norm(parts.input_layernorm),
        query=_linear(a.q_proj),
        key=_linear(a.k_proj),
        value=_linear(a.v_proj),
        query_norm=_norm(a.q_norm) if isinstance(trunk, Qwen3Model) else None,
        key_norm=_norm(a.k_norm) if isinstance(trunk, Qwen3Model) else None,
        out=_linear(a.o_proj),
        window=getattr(own, "sliding_window", None),
        spec=spec_of(heads, kv_heads, a.head_dim, a.scaling, a.max_context),
        before_mlp=_norm(parts.post_attention_layernorm),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


@torch.no_grad()
def decode(decoder: Decoder, ids: Tensor, cache: GridCache) -> Tensor:
    """Hidden states [R, H] float32 of ids [R] int64, one token at each place that `cache` aims at.

    The bits are those of the trunk's own forward. Raises NumericsError where a number is not finite.
    """
    assert cache.aimed is not None, "aim first"
    positions = cache.aimed.positions.numpy()
    x = decoder.embedding[ids.numpy()]
    for index, layer in enumerate(decoder.layers):
        query, key, value = _products((layer.query, layer.key, layer.value), _normed(layer.before_attention, x))
        dim = layer.spec.dim
        if layer.query_norm is not None and layer.key_norm is not None:
            query = _normed(layer.query_norm, query.reshape(-1, dim)).reshape(query.shape)
            key = _normed(layer.key_norm, key.reshape(-1, dim)).reshape(key.shape)
        for rotated in (query, key):
            decoding.rotate(rotated, decoder.cosine, decoder.sine, positions[:, 0], dim)
        cache.keep(index, *(torch.from_numpy(new).view(len(x), -1, 1, dim) for new in (key, value)))
        x += _products((layer.out,), _attend(layer, query, key, value, cache, index))[0]
        gate, up = _products((layer.gate, layer.up), _normed(layer.before_mlp, x))
        x += _products((layer.down,), decoding.silu_times(gate, up))[0]
    return torch.from_numpy(_normed(decoder.last, x))


def _normed(norm: _Norm, x: np.ndarray) -> np.ndarray:
    y = np.empty_like(x)
    inverse = np.empty(len(x))
    if not norms.rms_norm(x, norm.weight, norm.eps, operand_bits(x.shape[1]), inverse, y):
        raise NumericsError(f"the input of {norm.name} is not finite")
    return y


def _products(layers: Sequence[_Linear], x: np.ndarray) -> list[np.ndarray]:
    """Of layers that share an input, which is put on its grid once."""
    operand = layers[0].prepared.operand(x)
    return [layer.prepared.product(operand, layer.weight, layer.bias) for layer in layers]


def _attend(
    layer: _Layer, query: np.ndarray, key: np.ndarray, value: np.ndarray, cache: GridCache, index: int
) -> np.ndarray:
    assert cache.aimed is not None
    end = cache.aimed.positions.numpy() + 1
    begin = np.zeros_like(end) if layer.window is None else np.maximum(end - layer.window, 0)
    try:
        return attend_arrays(query, key, value, cache, index, begin, end, layer.spec)
    except NumericsError as error:
        raise NumericsError(f"layer {index}: {error}") from None
