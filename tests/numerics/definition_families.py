"""Transformers' models, read into the arrays of the definition: every family is data."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.numerics.rotary import inverse_frequencies
from tests.numerics.definition import Layer, Matrix, Model, NormWeights, rotary_tables

ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "gelu_quick",
}


def array(x: Tensor) -> np.ndarray:
    """A copy in float32."""
    return x.detach().float().numpy().copy()


def _optional(x: Tensor | None) -> np.ndarray | None:
    return None if x is None else array(x)


def _norm(module: Any) -> NormWeights:
    return NormWeights(array(module.weight), _optional(getattr(module, "bias", None)))


def _matrix(*modules: Any, transposed: bool = False) -> Matrix:
    """Linear layers of one input, the rows of the first one first."""
    weights = [array(m.weight).T if transposed else array(m.weight) for m in modules]
    biases = [array(m.bias) for m in modules if m.bias is not None]
    return Matrix(np.concatenate(weights), np.concatenate(biases) if biases else None)


def _padding(embedding: Any) -> int:
    return -1 if embedding.padding_idx is None else int(embedding.padding_idx)


def _mlp_of_llama(module: Any) -> dict[str, Any]:
    if hasattr(module, "experts"):
        experts = module.experts
        return {
            "router": Matrix(array(module.gate.weight)),
            "expert_up": tuple(Matrix(array(w)) for w in experts.gate_up_proj),
            "expert_down": tuple(Matrix(array(w)) for w in experts.down_proj),
        }
    return {"up": _matrix(module.gate_proj, module.up_proj), "down": _matrix(module.down_proj)}


def _window(config: Any, index: int) -> int:
    if config.model_type in {"qwen2", "qwen3"}:
        return int(config.sliding_window) if config.layer_types[index] == "sliding_attention" else 0
    return int(getattr(config, "sliding_window", None) or 0)


def _layer_of_llama(config: Any, index: int, m: Any) -> Layer:
    a = m.self_attn
    return Layer(
        norm1=_norm(m.input_layernorm),
        norm2=_norm(m.post_attention_layernorm),
        qkv=_matrix(a.q_proj, a.k_proj, a.v_proj),
        out=_matrix(a.o_proj),
        q_norm=_norm(a.q_norm) if hasattr(a, "q_norm") else None,
        k_norm=_norm(a.k_norm) if hasattr(a, "k_norm") else None,
        window=_window(config, index),
        scale=a.scaling,
        **_mlp_of_llama(m.mlp),
    )


def _llama(trunk: Any, positions: int) -> Model:
    config, first = trunk.config, trunk.layers[0].self_attn
    heads, d = config.num_attention_heads, first.head_dim
    kv_heads = config.num_key_value_heads
    gemma = config.model_type == "gemma"
    frequencies, factor = inverse_frequencies(config)
    cosine, sine = rotary_tables(frequencies.numpy(), positions, factor)
    qk_norm = "none" if not hasattr(first, "q_norm") else "whole" if config.model_type == "olmoe" else "head"
    return Model(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=d,
        eps=config.rms_norm_eps,
        embedding=array(trunk.embed_tokens.weight),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        layers=tuple(_layer_of_llama(config, i, m) for i, m in enumerate(trunk.layers)),
        last_norm=_norm(trunk.norm),
        q_at=0,
        q_step=d,
        k_at=heads * d,
        k_step=d,
        v_at=(heads + kv_heads) * d,
        v_step=d,
        norm="rms_offset" if gemma else "rms",
        qk_norm=qk_norm,
        activation=ACTIVATIONS[config.hidden_act],
        cosine=cosine,
        sine=sine,
        padding=_padding(trunk.embed_tokens),
        chosen=getattr(config, "num_experts_per_tok", 0),
        normalised=bool(getattr(config, "norm_topk_prob", config.model_type == "mixtral")),
    )


def _gpt2(trunk: Any, _: int) -> Model:
    config = trunk.config
    d, width = config.n_embd // config.n_head, config.n_embd
    layers = tuple(
        Layer(
            norm1=_norm(m.ln_1),
            norm2=_norm(m.ln_2),
            qkv=_matrix(m.attn.c_attn, transposed=True),
            out=_matrix(m.attn.c_proj, transposed=True),
            scale=m.attn.scaling,
            up=_matrix(m.mlp.c_fc, transposed=True),
            down=_matrix(m.mlp.c_proj, transposed=True),
        )
        for m in trunk.h
    )
    return Model(
        heads=config.n_head,
        kv_heads=config.n_head,
        head_dim=d,
        eps=config.layer_norm_epsilon,
        embedding=array(trunk.wte.weight),
        positions=array(trunk.wpe.weight),
        padding=_padding(trunk.wte),
        layers=layers,
        last_norm=_norm(trunk.ln_f),
        q_at=0,
        q_step=d,
        k_at=width,
        k_step=d,
        v_at=2 * width,
        v_step=d,
        norm="layer",
        activation=ACTIVATIONS[config.activation_function],
        gated=False,
    )


def _gpt_neox(trunk: Any, positions: int) -> Model:
    config = trunk.config
    d = config.hidden_size // config.num_attention_heads
    frequencies, factor = inverse_frequencies(config)
    cosine, sine = rotary_tables(frequencies.numpy(), positions, factor)
    layers = tuple(
        Layer(
            norm1=_norm(m.input_layernorm),
            norm2=_norm(m.post_attention_layernorm),
            qkv=_matrix(m.attention.query_key_value),
            out=_matrix(m.attention.dense),
            scale=m.attention.scaling,
            up=_matrix(m.mlp.dense_h_to_4h),
            down=_matrix(m.mlp.dense_4h_to_h),
        )
        for m in trunk.layers
    )
    return Model(
        heads=config.num_attention_heads,
        kv_heads=config.num_attention_heads,
        head_dim=d,
        eps=config.layer_norm_eps,
        embedding=array(trunk.embed_in.weight),
        padding=_padding(trunk.embed_in),
        layers=layers,
        last_norm=_norm(trunk.final_layer_norm),
        q_at=0,
        q_step=3 * d,
        k_at=d,
        k_step=3 * d,
        v_at=2 * d,
        v_step=3 * d,
        norm="layer",
        activation=ACTIVATIONS[config.hidden_act],
        gated=False,
        parallel=config.use_parallel_residual,
        cosine=cosine,
        sine=sine,
    )


def model_from(trunk: PreTrainedModel, positions: int) -> Model:
    """The weights and shape of a transformers trunk, with rotary tables of `positions` rows."""
    read = {"gpt2": _gpt2, "gpt_neox": _gpt_neox}.get(trunk.config.model_type, _llama)
    return read(trunk, positions)
