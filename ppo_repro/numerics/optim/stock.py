"""Steps with torch's own gradients of a copy in a dtype, on weights and moments in float32, as mixed precision does."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics.optim.adamw import AdamWSettings, ExactAdamW, OptimizerState, exact_norm
from ppo_repro.numerics.optim.optimizer import StepReport, tensor_gradients
from ppo_repro.ranks import ALONE, Ranks

# torch.amp.GradScaler's constants
FIRST_EXPONENT = 16
STEPS_TO_DOUBLE = 2000
EXPONENT, STEPS = "loss_scale", "steps_at_this_scale"  # in an optimizer's state


class StockOptimizer:
    """AdamW in float32 on the weights of `policy`, with the gradients that torch computes of `copy`.

    Gradients of several backward passes are added in float32, and over ranks. In float16 losses are multiplied by
    2^e, so that small gradients do not vanish, and gradients divided by it: e is 16 at first; where a gradient is not
    finite it falls by one and the step's passes are done again; after 2000 steps without that it rises by one. The copy
    has the weights of `policy` after every step and every `load`.

    Source: Micikevicius et al., 2018, sections 3.1 and 3.2; `torch.amp.GradScaler`, which leaves such a step out.
    """

    def __init__(self, policy: nn.Module, copy: nn.Module, settings: AdamWSettings) -> None:
        self.settings, self.copy = settings, copy
        self.adamw = ExactAdamW(dict(policy.named_parameters()))
        assert {name for name, _ in copy.named_parameters()} == set(self.adamw.parameters)
        self._is_scaled = next(copy.parameters()).dtype == torch.float16
        self._exponent, self._steps = FIRST_EXPONENT if self._is_scaled else 0, 0
        self._sums: dict[str, Tensor] = {}
        for name, parameter in copy.named_parameters():
            parameter.register_post_accumulate_grad_hook(partial(self._add, name))

    @property
    def loss_scale(self) -> float:
        return math.ldexp(1.0, self._exponent)

    def _add(self, name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sums[name] += parameter.grad
        parameter.grad = None

    def _collect(self, backward: Callable[[], None], ranks: Ranks) -> int:
        """Fill the sums with finite gradients times the loss scale; how often that had to be repeated."""
        redos = 0
        while True:
            self._sums = {name: torch.zeros_like(p.detach()) for name, p in self.adamw.parameters.items()}
            backward()
            ranks.add_up(list(self._sums.values()))
            if not self._is_scaled or all(bool(total.isfinite().all()) for total in self._sums.values()):
                return redos
            if self._exponent == 0:
                raise NumericsError("a gradient is not finite in float16 at any loss scale; lower the learning rate")
            self._exponent, self._steps, redos = self._exponent - 1, 0, redos + 1

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        redos = self._collect(backward, ranks)
        gradients = self._sums
        for total in gradients.values():
            total.mul_(1.0 / self.loss_scale)  # in place: a second copy would be as large as the model
        self._count_step()
        norm = exact_norm(gradients.values())
        measured = tensor_gradients(gradients) if by_tensor else ()
        self.adamw.apply(self.settings, gradients, norm)
        self._refresh()
        return StepReport(norm, redos, measured)

    def _count_step(self) -> None:
        if not self._is_scaled:
            return
        self._steps += 1
        if self._steps == STEPS_TO_DOUBLE:
            self._exponent, self._steps = self._exponent + 1, 0

    @torch.no_grad()
    def _refresh(self) -> None:
        for name, parameter in self.copy.named_parameters():
            parameter.copy_(self.adamw.parameters[name])

    def rest(self) -> None:
        self._sums = {}

    def state(self) -> OptimizerState:
        return self.adamw.state({EXPONENT: self._exponent, STEPS: self._steps} if self._is_scaled else {})

    def load(self, state: OptimizerState) -> None:
        if state.steps or state.factors or set(state.grids) != ({EXPONENT, STEPS} if self._is_scaled else set()):
            raise ValueError("the optimizer state is not that of mismatch.trainer.stock in this dtype")
        self.adamw.load(state)
        if self._is_scaled:
            self._exponent, self._steps = state.grids[EXPONENT], state.grids[STEPS]
        self._refresh()
