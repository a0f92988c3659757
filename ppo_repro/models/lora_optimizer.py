"""Steps on low-rank adapters, and on the parameters beside them that are trained whole.

A backward pass collects gradients of the merged weights, as in full training. They become gradients of the factors
(see `numerics.optim.low_rank`), AdamW steps on the factors, and the weights are merged again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ppo_repro.buffers import TensorGradient
from ppo_repro.models.lora import Lora
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.optim.adamw import (
    AdamWSettings,
    ExactAdamW,
    NativeAdamW,
    OptimizerState,
    copy_named,
    exact_norm,
)
from ppo_repro.numerics.optim.optimizer import (
    Optimizer,
    StepReport,
    collect,
    collect_native,
    tensor_gradients,
)
from ppo_repro.ranks import ALONE, Ranks


class ExactLoraOptimizer:
    """Integer gradients of the merged weights, exact products with the factors, and exact AdamW on the factors."""

    loss_scale = 1.0

    def __init__(self, model: nn.Module, lora: Lora, settings: AdamWSettings) -> None:
        self.settings, self.lora = settings, lora
        self.accumulator = GradientAccumulator({**lora.merged_weights(), **lora.whole}.items())
        attach(model, self.accumulator)
        self.adamw = ExactAdamW(lora.trained())

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        collected, redos = collect(self.accumulator, backward, tokens, ranks)
        gradients = self.lora.factor_gradients(collected.__getitem__)
        gradients |= {name: collected[name] for name in self.lora.whole}
        norm = exact_norm(gradients.values())
        measured = tensor_gradients(gradients) if by_tensor else ()
        gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
        self.adamw.apply(self.settings, gradients, norm)
        self.lora.merge()
        return StepReport(norm, redos, measured)

    def rest(self) -> None:
        self.accumulator.release()

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(self.accumulator.grids), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        if state.steps or not set(state.grids) <= set(self.accumulator.parameters):
            raise ValueError("the optimizer state is not that of this adapter in exact numerics")
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.accumulator.grids = dict(state.grids)
        self.lora.merge()


class NativeLoraOptimizer:
    """The same in stock torch: autograd's gradients of the merged weights, float32 products, torch's AdamW."""

    loss_scale = 1.0

    def __init__(self, lora: Lora, settings: AdamWSettings) -> None:
        self.settings, self.lora = settings, lora
        self.adamw = NativeAdamW(lora.trained(), settings)

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        weights = self.lora.merged_weights()
        collect_native([*weights.values(), *self.lora.whole.values()], backward, ranks)
        merged = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
        for name, gradient in self.lora.factor_gradients(merged.__getitem__).items():
            self.adamw.parameters[name].grad = gradient
        measured: tuple[TensorGradient, ...] = ()
        if by_tensor:
            measured = tensor_gradients({n: p.grad for n, p in self.adamw.parameters.items() if p.grad is not None})
        norm = self.adamw.apply(self.settings)
        self.lora.merge()
        return StepReport(norm, 0, measured)

    def rest(self) -> None:
        for parameter in (*self.lora.merged_weights().values(), *self.adamw.parameters.values()):
            parameter.grad = None

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        if set(state.factors) != set(self.lora.factors()):
            raise ValueError("the optimizer state is not that of this adapter")
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.lora.merge()


def make_lora_optimizer(model: nn.Module, lora: Lora, settings: AdamWSettings) -> Optimizer:
    """The optimizer of an adapter, in the numerics of its model."""
    if lora.exact:
        return ExactLoraOptimizer(model, lora, settings)
    return NativeLoraOptimizer(lora, settings)
