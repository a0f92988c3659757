"""Steps on low-rank adapters, and on the parameters beside them that are trained whole.

A backward pass collects gradients of the merged weights, as in full training. They become gradients of the factors
(see `models.low_rank`), AdamW steps on the factors, and the weights are merged again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ppo_repro.models.lora import Lora
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.optimizer import (
    SLOTS,
    AdamW,
    AdamWSettings,
    NativeAdamW,
    Optimizer,
    OptimizerState,
    StepReport,
    collect_native,
    copy_named,
    tensor_gradients,
)
from ppo_repro.ranks import ALONE, Ranks


class DeterministicLoraOptimizer:
    """Gradients of the merged weights in slots, their products with the factors, and AdamW on the factors."""

    def __init__(self, model: nn.Module, lora: Lora, settings: AdamWSettings, slots: int) -> None:
        self.settings, self.lora = settings, lora
        self.sums = GradientSums(model.named_parameters(), slots)
        self.adamw = AdamW(lora.trained())

    def step(self, backward: Callable[[], None], ranks: Ranks = ALONE, by_tensor: bool = False) -> StepReport:
        self.sums.begin()
        backward()
        collected = self.sums.finish(ranks)
        gradients = self.lora.factor_gradients(lambda layer: collected[f"{layer}.weight"])
        gradients |= {name: collected[name] for name in self.lora.whole}
        measured = tensor_gradients(gradients) if by_tensor else ()
        norm = self.adamw.apply(self.settings, gradients)
        self.lora.merge()
        return StepReport(norm, measured)

    def rest(self) -> None:
        self.sums.release()

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.lora.merge()


class NativeLoraOptimizer:
    """The same in stock torch: autograd's gradients of the merged weights, float32 products, torch's AdamW."""

    def __init__(self, lora: Lora, settings: AdamWSettings) -> None:
        self.settings, self.lora = settings, lora
        self.adamw = NativeAdamW(lora.trained(), settings)

    def step(self, backward: Callable[[], None], ranks: Ranks = ALONE, by_tensor: bool = False) -> StepReport:
        weights = self.lora.merged_weights()
        collect_native([*weights.values(), *self.lora.whole.values()], backward, ranks)
        merged = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
        for name, gradient in self.lora.factor_gradients(merged.__getitem__).items():
            self.adamw.parameters[name].grad = gradient
        measured = tensor_gradients(self.adamw.gradients()) if by_tensor else ()
        norm = self.adamw.apply(self.settings)
        self.lora.merge()
        return StepReport(norm, measured)

    def rest(self) -> None:
        for parameter in (*self.lora.merged_weights().values(), *self.adamw.parameters.values()):
            parameter.grad = None

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.lora.merge()


def make_lora_optimizer(
    model: nn.Module, lora: Lora, settings: AdamWSettings, mode: str, slots: int = SLOTS
) -> Optimizer:
    """The optimizer of an adapter for numerics `deterministic`, with `slots` on this process, or `native`."""
    if mode == "deterministic":
        return DeterministicLoraOptimizer(model, lora, settings, slots)
    return NativeLoraOptimizer(lora, settings)
