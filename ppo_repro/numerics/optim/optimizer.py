"""One optimizer step: collect gradients, clip their global norm, AdamW; exact and native behind one interface."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ppo_repro.buffers import TensorGradient
from ppo_repro.errors import PromiseBroken
from ppo_repro.numerics.gradients import GradientAccumulator, assert_no_wrap
from ppo_repro.numerics.layers.lowering import attach
from ppo_repro.numerics.optim.adamw import (
    AdamWSettings,
    ExactAdamW,
    NativeAdamW,
    OptimizerState,
    exact_norm,
    exact_norms,
)
from ppo_repro.ranks import ALONE, Ranks

MAX_REDOS = 8  # the grid fits after one redo, unless the backward pass is not reproducible


@dataclass(frozen=True)
class StepReport:
    grad_norm: float  # before clipping
    redos: int
    gradients: tuple[TensorGradient, ...]  # of each tensor, where they were asked for


class Optimizer(Protocol):
    settings: AdamWSettings  # may be replaced between steps, but only a new learning rate has an effect

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the losses by; the gradients are divided by it before the step."""
        ...

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        """Run `backward` over a minibatch of `tokens` tokens (prompts included) and apply one step.

        `backward` may be called several times and must be a pure function of the weights. With several ranks it covers
        the sequences of this rank, `tokens` counts those of all ranks, and every rank takes the same step.
        `by_tensor`: report the gradient of each tensor, which changes no bit of the step.
        """
        ...

    def rest(self) -> None:
        """Free the memory that only steps need, until the next one."""
        ...

    def state(self) -> OptimizerState:
        """The state that `load` needs to continue from here; its tensors are the live ones, not copies."""
        ...

    def load(self, state: OptimizerState) -> None:
        """Continue from `state`; raises ValueError if it belongs to another module or to other numerics."""
        ...


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """First 16 hex digits of the SHA-256 over names and raw bits of the parameters, in the given order."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).numpy().data)
    return digest.hexdigest()[:16]


def tensor_gradients(gradients: Mapping[str, Tensor]) -> tuple[TensorGradient, ...]:
    """Norm, largest magnitude and share of zeros of each gradient, the norm as `exact_norm` has it.

    NumericsError where one is not finite.
    """
    _, norms, largest = exact_norms(gradients.values())
    return tuple(
        TensorGradient(name, norm, most, int((gradient == 0).sum()) / gradient.numel())
        for (name, gradient), norm, most in zip(gradients.items(), norms, largest, strict=True)
    )


def collect(
    accumulator: GradientAccumulator,
    backward: Callable[[], None],
    tokens: int,
    ranks: Ranks,
) -> tuple[dict[str, Tensor], int]:
    """The float32 gradients of a minibatch over all ranks, and how often the backward pass was redone.

    UserError if the sums cannot hold this many tokens, PromiseBroken if no pass fits the grids of the one before.
    """
    assert_no_wrap(tokens)
    for redos in range(MAX_REDOS):
        accumulator.begin(tokens)
        backward()
        gradients = accumulator.finish(ranks)
        if gradients is not None:
            return gradients, redos
    raise PromiseBroken("a gradient changes every time it is computed; the backward pass is not reproducible")


class ExactOptimizer:
    """Integer gradients, exact norm and AdamW by the elementwise law: independent of how the work is split up."""

    loss_scale = 1.0

    def __init__(self, module: nn.Module, settings: AdamWSettings) -> None:
        self.settings = settings
        self.adamw = ExactAdamW(dict(module.named_parameters()))
        self.accumulator = GradientAccumulator(self.adamw.parameters.items())
        attach(module, self.accumulator)

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        gradients, redos = collect(self.accumulator, backward, tokens, ranks)
        norm = exact_norm(gradients.values())
        measured = tensor_gradients(gradients) if by_tensor else ()
        self.adamw.apply(self.settings, gradients, norm)
        return StepReport(norm, redos, measured)

    def rest(self) -> None:
        self.accumulator.release()

    def state(self) -> OptimizerState:
        return self.adamw.state(self.accumulator.grids)

    def load(self, state: OptimizerState) -> None:
        if state.steps or state.factors or not set(state.grids) <= set(self.adamw.parameters):
            raise ValueError("the optimizer state is not of this module in exact numerics")
        self.adamw.load(state)
        self.accumulator.grids = dict(state.grids)


def collect_native(parameters: Sequence[Tensor], backward: Callable[[], None], ranks: Ranks) -> None:
    """Run `backward` and put the sum of gradients over all ranks into `grad` of the parameters."""
    for parameter in parameters:
        parameter.grad = None
    backward()
    if ranks.size > 1:
        for parameter in parameters:
            if parameter.grad is None:  # this rank has no sequences
                parameter.grad = torch.zeros_like(parameter)
        ranks.add_up([p.grad for p in parameters if p.grad is not None])


class NativeOptimizer:
    """Stock torch: autograd's float gradients, clip_grad_norm_, torch.optim.AdamW."""

    loss_scale = 1.0

    def __init__(self, module: nn.Module, settings: AdamWSettings) -> None:
        self.settings = settings
        self.adamw = NativeAdamW(dict(module.named_parameters()), settings)

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        parameters = self.adamw.parameters
        collect_native(list(parameters.values()), backward, ranks)
        measured: tuple[TensorGradient, ...] = ()
        if by_tensor:
            measured = tensor_gradients({n: p.grad for n, p in parameters.items() if p.grad is not None})
        return StepReport(self.adamw.apply(self.settings), 0, measured)

    def rest(self) -> None:
        for parameter in self.adamw.parameters.values():
            parameter.grad = None

    def state(self) -> OptimizerState:
        return self.adamw.state()

    def load(self, state: OptimizerState) -> None:
        if state.factors:
            raise ValueError("the optimizer state is that of a low-rank adapter")
        self.adamw.load(state)


def make_optimizer(module: nn.Module, settings: AdamWSettings, mode: str) -> Optimizer:
    """The optimizer for numerics `exact` or `native`."""
    return ExactOptimizer(module, settings) if mode == "exact" else NativeOptimizer(module, settings)
