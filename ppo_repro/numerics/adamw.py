"""Compute AdamW after clipping of the gradients' global norm, by the kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_repro.base.errors import NumericsError
from ppo_repro.base.ranks import ALONE
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import CPU, Struct, ffi, pointer
from ppo_repro.numerics.library import Kernels
from ppo_repro.numerics.shards import STRETCH, Shards, divided
from ppo_repro.numerics.weights import copy_named, require_same_names, require_same_shapes

_CLIP_EPS = 1e-6  # as in torch's clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Settings of AdamW (Loshchilov and Hutter, 2019) and of gradient clipping by the global norm."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0: gradients are not clipped


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """State of an optimizer between steps, besides the weights, by parameter name."""

    first: Mapping[str, Tensor]  # AdamW first moments, float32
    second: Mapping[str, Tensor]  # second moments
    steps: Mapping[str, int]  # number of steps that each parameter has taken
    factors: Mapping[str, Tensor] = field(default_factory=dict)  # of low-rank adapters


def power(base: float, exponent: int) -> float:
    """Return base^exponent in float64 by repeated squaring, because the C library's pow differs between machines."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def step_constants(s: AdamWSettings, norm: float, steps: int) -> Struct:
    """Compute the constants of step number `steps` in float64. Each is rounded once to float32."""
    constants = dict(
        clip=min(1.0, (s.max_grad_norm or math.inf) / (float(ffi.cast("float", norm)) + _CLIP_EPS)),
        beta1=s.beta1,
        rest1=1.0 - s.beta1,
        beta2=s.beta2,
        rest2=1.0 - s.beta2,
        keep=1.0 - s.learning_rate * s.weight_decay,
        rate=s.learning_rate / (1.0 - power(s.beta1, steps)),
        unroot=1.0 / math.sqrt(1.0 - power(s.beta2, steps)),
        eps=s.eps,
    )
    return ffi.new("Step *", constants)


class AdamW:
    """Clipping and AdamW by the C kernels, for named float32 parameters. Each rank has the moments of its shards."""

    def __init__(self, parameters: Mapping[str, Tensor], shards: Shards | None = None) -> None:
        """Begin with moments of zero; without `shards` this process owns all elements."""
        self.parameters = {name: parameters[name] for name in sorted(parameters)}
        self.shards = shards or divided(self.parameters, ALONE)
        own_shards = {name: self.shards.own_shard(name, p) for name, p in self.parameters.items()}
        self.first, self.second = (
            {name: torch.zeros_like(shard, memory_format=torch.contiguous_format) for name, shard in own_shards.items()}
            for _ in range(2)
        )
        self.steps = 0

    def apply(self, settings: AdamWSettings, gradients: Mapping[str, Tensor]) -> float:
        """Take one step with the gradients of this rank's shards, and return the norm of all before clipping.

        Raises NumericsError for a gradient that is not finite, or a norm that is not finite in float32.
        """
        tensors = ffi.new("Trained[]", len(self.parameters))
        device = next((p.device for p in self.parameters.values()), CPU)
        for tensor, (name, p) in zip(tensors, self.parameters.items(), strict=True):
            shard, gradient = self.shards.own_shard(name, p), gradients[name]
            if gradient.numel() != shard.numel():
                raise ValueError(f"a gradient of {name} for {gradient.numel()} of its {shard.numel()} numbers")
            tensor.p, tensor.g, tensor.n = pointer(shard, device), pointer(gradient, device), shard.numel()
            tensor.m, tensor.v = pointer(self.first[name], device), pointer(self.second[name], device)
        norm = self._norm(tensors, kernels_of(device))
        self.steps += 1
        kernels_of(device).adamw(tensors, len(tensors), step_constants(settings, norm, self.steps))
        self.shards.spread({name: p.detach().view(-1) for name, p in self.parameters.items()})
        # a change of these counters tells `PackedMatrix.prepare` to pack the weights again
        torch.autograd.graph.increment_version(self.parameters.values())
        return norm

    def _norm(self, tensors: Any, kernels: Kernels) -> float:
        """Compute the norm of all gradients, on every rank. Raises NumericsError if it is not finite in float32."""
        counts = [-(-tensor.n // STRETCH) for tensor in tensors]
        squares = np.full(sum(counts), np.nan)  # a stretch that the kernels did not write stays NaN
        kernels.gradient_squares(tensors, len(tensors), ffi.from_buffer("double[]", squares))
        of_ranks = self.shards.ranks.everyone(np.split(squares, np.cumsum(counts)[:-1]))
        total = 0.0
        for i, name in enumerate(self.parameters):
            square = sum_in_order(np.concatenate([of_ranks[rank][i] for rank in self.shards.in_order()]))
            if not math.isfinite(square):
                raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
            total += square
        norm = math.sqrt(total)
        if math.isinf(float(ffi.cast("float", norm))):  # clipping would scale every gradient to 0
            raise NumericsError("the gradient norm is not finite in float32; lower the learning rate")
        return norm

    def state(self) -> OptimizerState:
        """Return the state, whole on the first rank, and without moments on others. Every rank calls this method."""
        steps = dict.fromkeys(self.parameters, self.steps)
        return OptimizerState(first=self._whole(self.first), second=self._whole(self.second), steps=steps)

    def _whole(self, moments: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if self.shards.ranks.size == 1:
            return moments
        joined = {name: self.shards.joined(name, own) for name, own in moments.items()}
        return {name: x.view(self.parameters[name].shape) for name, x in joined.items() if x is not None}

    def load(self, state: OptimizerState) -> None:
        """Continue from whole moments.

        Raises ValueError if one side lacks a parameter, or if two parameters have taken different numbers of steps.
        """
        require_same_names(self.parameters, state.steps, "steps of")
        steps, by_steps = max(state.steps.values(), default=0), sorted(state.steps, key=state.steps.__getitem__)
        if by_steps and state.steps[by_steps[0]] != steps:
            fewer = f"{by_steps[0]} has taken {state.steps[by_steps[0]]} steps, {by_steps[-1]} {steps}"
            raise ValueError(f"{fewer}; in deterministic numerics all parameters step together")
        for own, saved in ((self.first, state.first), (self.second, state.second)):
            require_same_names(self.parameters, saved, "the tensors")
            require_same_shapes(self.parameters, saved)
            copy_named(own, {name: self.shards.own_shard(name, x.contiguous()) for name, x in saved.items()})
        self.steps = steps


def sum_in_order(squares: np.ndarray) -> float:
    """Return the sum of float64 numbers of at least 0, added one after another; 0 for none."""
    return float(np.add.accumulate(squares)[-1]) if len(squares) else 0.0
