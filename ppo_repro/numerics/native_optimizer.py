"""Take optimizer steps by stock torch: gradients of autograd, clip_grad_norm_ and torch.optim.AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ppo_repro.base.errors import NumericsError
from ppo_repro.base.ranks import Ranks
from ppo_repro.numerics.adamw import AdamWSettings, OptimizerState
from ppo_repro.numerics.weights import copy_named, require_same_names


class NativeGradients:
    """Gradients of autograd in `.grad`, added over ranks."""

    def __init__(self, trained: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.trained, self.ranks = trained, ranks

    def begin(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    release = begin

    def finish(self) -> dict[str, Tensor]:
        if self.ranks.size > 1:
            for parameter in self.trained.values():
                if parameter.grad is None:  # this rank has no sequences
                    parameter.grad = torch.zeros_like(parameter)
            self.ranks.add_up([p.grad for p in self.trained.values() if p.grad is not None])
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}


class NativeAdamW:
    """Clipping and AdamW for named parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self.parameters = dict(parameters)
        self.adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        # torch makes this state at a parameter's first gradient, and some parameters never get one
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
