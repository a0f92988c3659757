"""A Qwen2 forward in as few float32 torch operations as one would write by hand: the baseline to beat.

Fused q/k/v and gate/up products, a static key/value cache, scaled_dot_product_attention, no module calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2ForCausalLM


@dataclass(frozen=True)
class Layer:
    """Weights of one decoder layer, q/k/v and gate/up joined."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Lean:
    """The weights of a model with tied embeddings, and its shape."""

    layers: tuple[Layer, ...]
    embedding: Tensor
    norm: Tensor
    cosine: Tensor  # [positions, D]
    sine: Tensor
    heads: int
    kv_heads: int
    eps: float

    @property
    def parameters(self) -> list[Tensor]:
        out = [self.embedding, self.norm]
        for layer in self.layers:
            out += vars(layer).values()
        return out


def from_model(model: Qwen2ForCausalLM, positions: int, trainable: bool) -> Lean:
    """Copy the weights of a transformers Qwen2 with tied embeddings."""

    def copied(*weights: Tensor) -> Tensor:
        return torch.cat([w.detach() for w in weights]).clone().requires_grad_(trainable)

    layers = []
    for layer in model.model.layers:
        a, mlp = layer.self_attn, layer.mlp
        layers.append(
            Layer(
                copied(layer.input_layernorm.weight),
                copied(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight),
                copied(a.q_proj.bias, a.k_proj.bias, a.v_proj.bias),
                copied(a.o_proj.weight),
                copied(layer.post_attention_layernorm.weight),
                copied(mlp.gate_proj.weight, mlp.up_proj.weight),
                copied(mlp.down_proj.weight),
            )
        )
    cosine, sine = model.model.rotary_emb(torch.zeros(1), torch.arange(positions)[None])
    c = model.config
    return Lean(
        tuple(layers),
        copied(model.model.embed_tokens.weight),
        copied(model.model.norm.weight),
        cosine[0],
        sine[0],
        c.num_attention_heads,
        c.num_key_value_heads,
        c.rms_norm_eps,
    )


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat([-x[..., half:], x[..., :half]], -1) * sine


def forward(m: Lean, ids: Tensor, start: int, cache: list[tuple[Tensor, Tensor]] | None) -> Tensor:
    """Logits [B, L, V] of ids [B, L] at positions start..; all sequences have the same length.

    A cache ([B, Hk, positions, D] for keys and values of each layer) is written to and attended over.
    """
    b, length = ids.shape
    x = m.embedding[ids]
    end = start + length
    cosine, sine = m.cosine[start:end], m.sine[start:end]
    for index, layer in enumerate(m.layers):
        h = F.rms_norm(x, (x.shape[-1],), layer.attention_norm, m.eps)
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(b, length, m.heads + 2 * m.kv_heads, -1).transpose(1, 2)
        rotated = _rotate(qkv[:, : m.heads + m.kv_heads], cosine, sine)
        q, k, v = rotated[:, : m.heads], rotated[:, m.heads :], qkv[:, m.heads + m.kv_heads :]
        if cache is not None:
            keys, values = cache[index]
            keys[:, :, start:end], values[:, :, start:end] = k, v
            k, v = keys[:, :, :end], values[:, :, :end]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=True)
        x = x + F.linear(out.transpose(1, 2).reshape(b, length, -1), layer.out)
        h = F.rms_norm(x, (x.shape[-1],), layer.mlp_norm, m.eps)
        gate, up = F.linear(h, layer.gate_up).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, layer.down)
    return F.linear(F.rms_norm(x, (x.shape[-1],), m.norm, m.eps), m.embedding)
