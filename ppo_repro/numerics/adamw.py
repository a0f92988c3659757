"""Compute AdamW after clipping of the gradients' global norm: by the kernels, or by stock torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ppo_repro.base.errors import NumericsError
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.interface import CPU, Struct, ffi, pointer
from ppo_repro.numerics.weights import copy_named, require_same_names

_CLIP_EPS = 1e-6  # torch's, in clip_grad_norm_


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Settings of AdamW (Loshchilov and Hutter, 2019) and of gradient clipping by the global norm."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float  # 0: gradients are not clipped


@dataclass(frozen=True, kw_only=True)
class OptimizerState:
    """State of an optimizer between steps, besides the weights, by parameter name."""

    first: Mapping[str, Tensor]  # AdamW first moments, float32
    second: Mapping[str, Tensor]  # second moments
    steps: Mapping[str, int]  # that each parameter has taken
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
    """Compute the constants of step number `steps` in float64; each is rounded once to float32."""
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
    """Clipping and AdamW by the C kernels, for named float32 parameters and their moments."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = {name: parameters[name] for name in sorted(parameters)}
        self.first, self.second = (
            {name: torch.zeros_like(p, memory_format=torch.contiguous_format) for name, p in self.parameters.items()}
            for _ in range(2)
        )
        self.steps = 0

    def apply(self, settings: AdamWSettings, gradients: Mapping[str, Tensor]) -> float:
        """Take one step, and return the norm before clipping.

        Raises NumericsError for a gradient that is not finite.
        """
        tensors = ffi.new("Trained[]", len(self.parameters))
        device = next((p.device for p in self.parameters.values()), CPU)
        for tensor, (name, p) in zip(tensors, self.parameters.items(), strict=True):
            tensor.p, tensor.g, tensor.n = pointer(p, device), pointer(gradients[name], device), p.numel()
            tensor.m, tensor.v = pointer(self.first[name], device), pointer(self.second[name], device)
        norm = math.sqrt(kernels_of(device).gradient_squares(tensors, len(tensors)))
        for name, tensor in zip(self.parameters, tensors, strict=True):
            if not math.isfinite(tensor.square):
                raise NumericsError(f"the gradient of {name} is not finite; lower the learning rate")
        self.steps += 1
        kernels_of(device).adamw(tensors, len(tensors), step_constants(settings, norm, self.steps))
        # packed copies of weights are outdated when these counters change
        torch.autograd.graph.increment_version(self.parameters.values())
        return norm

    def state(self) -> OptimizerState:
        steps = dict.fromkeys(self.parameters, self.steps)
        return OptimizerState(first=self.first, second=self.second, steps=steps)

    def load(self, state: OptimizerState) -> None:
        """Continue from moments.

        Raises ValueError for parameters that one side lacks, or that have steps of their own.
        """
        require_same_names(self.parameters, state.steps, "steps of")
        steps, by_steps = max(state.steps.values(), default=0), sorted(state.steps, key=state.steps.__getitem__)
        if by_steps and state.steps[by_steps[0]] != steps:
            fewer = f"{by_steps[0]} has taken {state.steps[by_steps[0]]} steps, {by_steps[-1]} {steps}"
            raise ValueError(f"{fewer}; in deterministic numerics all parameters step together")
        copy_named(self.first, state.first)
        copy_named(self.second, state.second)
        self.steps = steps


class NativeAdamW:
    """Clipping and AdamW by torch (clip_grad_norm_, torch.optim.AdamW), for named parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self.parameters = dict(parameters)
        self.adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # as torch does at a parameter's first gradient; some parameters never have one
        for p in self.parameters.values():
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.adamw.state[p] = {"step": torch.zeros(()), **moments}

    def apply(self, settings: AdamWSettings, gradients: Mapping[str, Tensor]) -> float:
        """Take one step, and return the norm before clipping. Raises NumericsError if the norm is not finite."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), settings.max_grad_norm or math.inf))
        if not math.isfinite(norm):
            raise NumericsError("the gradient norm is not finite; lower the learning rate")
        for group in self.adamw.param_groups:
            group["lr"], group["betas"] = settings.learning_rate, (settings.beta1, settings.beta2)
            group["eps"], group["weight_decay"] = settings.eps, settings.weight_decay
        self.adamw.step()
        self.adamw.zero_grad()
        return norm

    def _kept(self, name: str) -> dict[str, Tensor]:
        return {parameter: self.adamw.state[p][name] for parameter, p in self.parameters.items()}

    def state(self) -> OptimizerState:
        steps = {name: int(step) for name, step in self._kept("step").items()}
        return OptimizerState(first=self._kept("exp_avg"), second=self._kept("exp_avg_sq"), steps=steps)

    def load(self, state: OptimizerState) -> None:
        """Continue from moments. Raises ValueError, which names parameters that one side lacks."""
        require_same_names(self.parameters, state.steps, "steps of")
        copy_named(self._kept("exp_avg"), state.first)
        copy_named(self._kept("exp_avg_sq"), state.second)
        for name, step in self._kept("step").items():
            step.fill_(state.steps[name])
