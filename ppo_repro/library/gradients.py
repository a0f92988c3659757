"""Exact gradients in `.grad`: each backward pass adds to integer sums, and `.grad` is their sum rounded once.

Weights may change in ways that torch does not count: through `.data`, NumPy, or another library that has their memory.
So their bits are looked at in each pass.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from ppo_repro.errors import UserError
from ppo_repro.numerics.gradient_bins import GradientBins
from ppo_repro.numerics.kernels.core.fingerprint import fingerprint
from ppo_repro.numerics.layers.lowering import attach, forget_operands
from ppo_repro.numerics.products import array


class ExactGradients:
    """The gradients of one model since they were last zeroed, and what of them is in `.grad`."""

    def __init__(self, bins: GradientBins) -> None:
        self.bins = bins
        self._published: dict[str, tuple[Tensor, int]] = {}  # the tensor in `.grad`, and its version
        self._weights: tuple[int, ...] = ()  # fingerprints

    def __deepcopy__(self, memo: dict[int, Any]) -> ExactGradients:
        return ExactGradients(deepcopy(self.bins, memo))

    def trained(self) -> dict[str, Tensor]:
        """The parameters that take gradients, by name."""
        return {name: p for name, p in self.bins.parameters.items() if p.requires_grad}

    def look_at_weights(self, model: PreTrainedModel) -> None:
        """Before a pass: forget what was prepared of weights that have changed since the last one."""
        found = self.weights()
        if found != self._weights:
            forget_operands(model)
            self._weights = found

    def weights(self) -> tuple[int, ...]:
        """A fingerprint of each parameter."""
        return tuple(fingerprint(array(p)) for p in self.bins.parameters.values())

    def begin(self) -> None:
        """Before a backward pass: forget what was zeroed. UserError for a `.grad` that is not the sum of passes."""
        for name, parameter in self.trained().items():
            if not self._goes_on(name, parameter):
                self.bins.forget(name)

    def _goes_on(self, name: str, parameter: Tensor) -> bool:
        grad, (published, version) = parameter.grad, self._published.get(name, (None, 0))
        if grad is None:
            return False
        if grad is published and grad._version == version:
            return True
        if bool((grad != 0).any()):
            raise UserError(
                f"the gradient of {name} was changed since the last backward pass, so that it is no sum of gradients; "
                "zero it before the next pass, or clip after the last one"
            )
        return False

    def publish(self) -> None:
        """After a backward pass: put the sums into `.grad`."""
        for name, parameter in self.trained().items():
            gradient = self.bins.gradient(name)
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.copy_(gradient)
            self._published[name] = parameter.grad, parameter.grad._version


class _Pass(Function):
    """A forward pass that autograd sees as one step; its backward runs the inner graph and fills `.grad`."""

    @staticmethod
    def forward(ctx: Any, trained: Tensor, gradients: ExactGradients, compute: Callable[[], Tensor]) -> Tensor:
        with torch.enable_grad():
            inner = compute()
        ctx.inner, ctx.gradients = inner, gradients
        ctx.weights = gradients.weights()
        return inner.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if ctx.inner is None:
            raise RuntimeError("a second backward through one pass: its activations were freed")
        if ctx.weights != ctx.gradients.weights():
            raise RuntimeError("a weight was changed between the forward pass and its backward; run the forward again")
        ctx.gradients.begin()
        inner, ctx.inner = ctx.inner, None
        torch.autograd.backward(inner, grad)
        ctx.gradients.publish()
        return None, None, None


def with_gradients(model: PreTrainedModel, gradients: ExactGradients, compute: Callable[[], Tensor]) -> Tensor:
    """compute(), a forward pass of `model`, whose backward adds to `.grad` of what is trained.

    Without a parameter to train, or under `torch.no_grad()`, there is no backward.
    """
    trained = gradients.trained()
    if not trained or not torch.is_grad_enabled():
        with torch.no_grad():
            return compute()
    attach(model, gradients.bins)
    return _Pass.apply(next(iter(trained.values())), gradients, compute)
