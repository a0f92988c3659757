"""AdamW as a torch optimizer whose steps have the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.library.model import passes_of
from ppo_repro.numerics import library, optimizer
from ppo_repro.numerics.optimizer import AdamWSettings, copy_named

_MOMENTS = ("exp_avg", "exp_avg_sq")  # as torch.optim.AdamW calls them


class AdamW(Optimizer):
    """Train `deterministic(model)` by AdamW with decoupled weight decay, with the same bits on every machine.

    theta <- theta (1 - lr wd) - lr m' / (sqrt(v') + eps), m' and v' the bias-corrected moments of the gradient, which
    is scaled down to the global norm `max_grad_norm` (0: never; turn other clipping off). It follows learning rate
    schedulers, saves its state as torch does, and goes into transformers' Trainer as `optimizers=(AdamW(...), None)`.

    Raises UserError for a model that is not deterministic or has no parameter to train, and for numbers out of range.

    Source: Loshchilov and Hutter, 2019, https://arxiv.org/abs/1711.05101.

    >>> import torch, ppo_repro
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=89, hidden_size=48, num_hidden_layers=2, num_attention_heads=4)
    >>> model = ppo_repro.deterministic(LlamaForCausalLM(config).eval())
    >>> adamw = ppo_repro.AdamW(model, lr=1e-3)
    >>> ids = torch.tensor([[1, 2, 3, 4, 5]])
    >>> before = model(ids, labels=ids).loss
    >>> before.backward()
    >>> adamw.step()
    >>> bool(model(ids, labels=ids).loss < before)
    True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
    ) -> None:
        passes_of(model)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not trained:
            raise UserError("AdamW: the model has no parameter to train; set requires_grad")
        values: dict[str, Any] = dict(
            lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm
        )
        allowed = {
            "lr": 0 <= lr < math.inf,
            "betas": len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
            "eps": 0 < eps < math.inf,
            "weight_decay": 0 <= weight_decay < math.inf,
            "max_grad_norm": 0 <= max_grad_norm < math.inf,
        }
        for name, is_allowed in allowed.items():
            if not is_allowed:
                raise UserError(f"AdamW: {name} = {values[name]!r}: out of range, see help(ppo_repro.AdamW)")
        super().__init__([{"params": list(trained.values())}], {**values, "steps": 0})
        self._adamw = optimizer.AdamW(trained)
        self.grad_norm = 0.0  # of the last step, before clipping
        self._show_state()

    def _show_state(self) -> None:
        """Let torch see the moments, so that the saved state has them."""
        for name, parameter in self._adamw.parameters.items():
            self.state[parameter] = dict(
                zip(_MOMENTS, (self._adamw.first[name], self._adamw.second[name]), strict=True)
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step on `.grad`; UserError if a parameter has none, NumericsError if one is not finite."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {}
        for name, parameter in self._adamw.parameters.items():
            if parameter.grad is None:
                raise UserError(f"AdamW: {name} has no gradient; call loss.backward() before step()")
            gradients[name] = parameter.grad.contiguous()
        library.check_denormals()
        group = self.param_groups[0]
        beta1, beta2 = group["betas"]
        settings = AdamWSettings(
            float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], group["max_grad_norm"]
        )
        self.grad_norm = self._adamw.apply(settings, gradients)
        group["steps"] = self._adamw.steps
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved state of such an optimizer; ValueError for another one."""
        super().load_state_dict(state_dict)
        for moment, held in zip(_MOMENTS, (self._adamw.first, self._adamw.second), strict=True):
            copy_named(held, {name: self.state[p][moment] for name, p in self._adamw.parameters.items()})
        self._adamw.steps = self.param_groups[0]["steps"]
        self._show_state()
