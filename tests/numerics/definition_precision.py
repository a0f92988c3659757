"""Number formats by enumeration, and a small model in float64 that rounds to them where the law says, by autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.numerics.precision import Precision

# bits of the stored significand, smallest exponent of a normal number, largest number, whether numbers are clamped
SHAPES: dict[str, tuple[int, int, float, bool]] = {
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127, False),
    "float16": (10, -14, 65504.0, False),
    "float8_e4m3": (3, -6, 448.0, True),
    "float8_e5m2": (2, -14, 57344.0, True),
}


@cache
def numbers(name: str) -> np.ndarray:
    """All numbers of a format from 0 up to its largest, float64: those with an even index have an even significand."""
    stored, smallest, largest, _ = SHAPES[name]
    count = 1 << stored
    found = [math.ldexp(k, smallest - stored) for k in range(count)]
    exponent = smallest
    while math.ldexp(1.0, exponent) <= largest:
        found += [math.ldexp(count + k, exponent - stored) for k in range(count)]
        exponent += 1
    return np.array([x for x in found if x <= largest])


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """The nearest number of a format, of two as near the one with an even index; float64 -> float64, any shape."""
    table, (_, _, largest, clamped) = numbers(name), SHAPES[name]
    magnitude = np.abs(x)
    above = np.minimum(np.searchsorted(table, magnitude), len(table) - 1)
    below = np.maximum(above - 1, 0)
    middle = (table[below] + table[above]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (above % 2 == 0))
    result = np.where(up, table[above], table[below])
    half = (table[-1] - table[-2]) / 2
    beyond = magnitude >= largest + half  # the largest number's significand is odd or its neighbour's even
    result = np.where(magnitude > largest, largest if clamped else np.where(beyond, math.inf, largest), result)
    return np.copysign(result, x)


def scaled_rows(x: np.ndarray, name: str) -> np.ndarray:
    """The same with a scale for each row in formats of 8 bits, by plain division in float64."""
    if name in ("bfloat16", "float16"):
        return nearest(x, name)
    largest = 127.0 if name == "int8" else SHAPES[name][2]
    scale = np.abs(x).max(-1, keepdims=True) / largest
    scale[scale == 0] = 1.0
    return scale * (np.rint(x / scale) if name == "int8" else nearest(x / scale, name))


def through(x: Tensor, form: str, rule: Callable[[np.ndarray, str], np.ndarray] = scaled_rows) -> Tensor:
    """x rounded by a rule, with the gradient of x."""
    if form == "float32":
        return x
    return x + (torch.from_numpy(rule(x.detach().numpy(), form)) - x).detach()


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str) -> Tensor:
        ctx.form = form
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.from_numpy(scaled_rows(grad.numpy(), ctx.form)), None


@dataclass(frozen=True)
class Qwen3InFloat64:
    """The Qwen3 of `small_models` on one sequence, in float64, rounded by `formats`; weights by name, float64."""

    weights: dict[str, Tensor]
    config: Any
    formats: Precision

    def act(self, x: Tensor) -> Tensor:
        return through(x, self.formats.activations)

    def back(self, x: Tensor) -> Tensor:
        return x if self.formats.gradients == "float32" else _Back.apply(x, self.formats.gradients)

    def linear(self, x: Tensor, *names: str) -> Tensor:
        weights = [through(self.weights[f"{name}.weight"], self.formats.weights) for name in names]
        return self.act(through(self.back(self.act(x)), self.formats.linear_inputs) @ torch.cat(weights).t())

    def norm(self, name: str, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return x * scale * through(self.weights[f"{name}.weight"], self.formats.other_weights)

    def rotated(self, x: Tensor) -> Tensor:
        """x [L, H, D] at positions 0..L-1."""
        half = x.shape[-1] // 2
        turns = self.config.rope_parameters["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = (torch.arange(len(x), dtype=torch.float64)[:, None] * turns)[:, None]
        first, second = x[..., :half], x[..., half:]
        return self.act(
            torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)
        )

    def stored(self, x: Tensor) -> Tensor:
        """Keys or values: a scale for each head of a token in int8, none in floating point."""
        return through(x, self.formats.kv_cache, scaled_rows if self.formats.kv_cache == "int8" else nearest)

    def attention(self, name: str, x: Tensor) -> Tensor:
        dim, heads, kv = self.config.head_dim, self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = self.back(self.linear(x, *(f"{name}.{part}_proj" for part in "qkv"))).view(len(x), -1, dim)
        q, k, v = qkv.split([heads, kv, kv], 1)
        q, k = self.rotated(self.norm(f"{name}.q_norm", q)), self.rotated(self.norm(f"{name}.k_norm", k))
        k, v = (self.stored(x).repeat_interleave(heads // kv, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.linear(torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1), f"{name}.o_proj")

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self.back(self.linear(x, f"{name}.gate_proj", f"{name}.up_proj")).chunk(2, -1)
        return self.linear(gate * torch.sigmoid(gate) * up, f"{name}.down_proj")

    def logits(self, ids: list[int]) -> Tensor:
        """[L, V] of one sequence."""
        embedding = through(self.weights["model.embed_tokens.weight"], self.formats.other_weights)
        x = self.back(self.act(embedding[torch.tensor(ids)]))
        for index in range(self.config.num_hidden_layers):
            name = f"model.layers.{index}"
            x = self.back(self.act(x + self.attention(f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x))))
            x = self.back(self.act(x + self.mlp(f"{name}.mlp", self.norm(f"{name}.post_attention_layernorm", x))))
        return through(self.act(self.norm("model.norm", x)) @ embedding.t(), self.formats.logits)
