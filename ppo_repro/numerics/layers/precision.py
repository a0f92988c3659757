"""What rounded layers have in common: which formats, rounding that gradients pass through, rounded weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ppo_repro.numerics.arithmetic.rounding import round_rows, round_to
from ppo_repro.numerics.products import PreparedWeight


@dataclass(frozen=True)
class Precision:
    """To which format each kind of number is rounded, by its name in `arithmetic.rounding`; None: not at all."""

    weights: str | None = None  # of 8 bits: of the linear layers of attention and MLP
    other_weights: str | None = None  # what 8 bits leave alone: embedding, norms, biases, head
    linear_inputs: str | None = None  # of 8 bits, of the linear layers of attention and MLP
    activations: str | None = None  # of 16 bits, everywhere
    kv_cache: str | None = None
    logits: str | None = None
    gradients: str | None = None  # of activations, in the backward pass

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return any(getattr(self, field.name) is not None for field in fields(self))

    @property
    def only_logits(self) -> bool:
        """Whether nothing but logits is rounded."""
        return self == Precision(logits=self.logits)


class _Rounded(Function):
    """y = round(x); dx = dy, or round(dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, form: str | None, gradients: str | None) -> Tensor:
        ctx.gradients = gradients
        return x.view_as(x) if form is None else round_rows(x, form)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return (grad if ctx.gradients is None else round_rows(grad, ctx.gradients)), None, None


def rounded(x: Tensor, form: str | None, gradients: str | None = None) -> Tensor:
    """x [.., K] float32 in a format, its gradient in another one; None for none."""
    if not torch.is_grad_enabled() or not x.requires_grad:
        return x if form is None else round_rows(x, form)
    return x if form is None and gradients is None else _Rounded.apply(x, form, gradients)


class RoundedWeight(PreparedWeight):
    """A weight that is rounded before it is prepared; the parameter itself stays as it is."""

    def __init__(self, name: str, form: str | None, bias_form: str | None) -> None:
        super().__init__(name)
        self._form, self._bias_form = form, bias_form
        self._rounded_from: tuple[int, int] = (0, -1)
        self._rounded: Tensor | None = None

    def forget(self) -> None:
        super().forget()
        self._rounded, self._rounded_from = None, (0, -1)

    def contract(self, x: Tensor, weight: Tensor, dim: int, bias: Tensor | None = None) -> Tensor:
        if bias is not None and self._bias_form is not None:
            bias = round_to(bias.detach(), self._bias_form)
        return super().contract(x, self._of(weight), dim, bias)

    def _of(self, weight: Tensor) -> Tensor:
        if self._form is None:
            return weight
        source = (weight.data_ptr(), weight._version)
        if self._rounded is None:
            self._rounded = torch.empty_like(weight)
        if source != self._rounded_from:
            # in place, so that its version tells one rounding from the next
            self._rounded.copy_(round_rows(weight.detach(), self._form))
            self._rounded_from = source
        return self._rounded
