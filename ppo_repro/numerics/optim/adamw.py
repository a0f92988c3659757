"""The global norm of gradients and AdamW, in exact numerics and in stock torch, with their state.

The exact norm comes from integer sums, and AdamW is elementwise with every operation rounded to float32, so neither
depends on an order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ppo_repro.errors import NumericsError
from ppo_repro.numerics import backend
from ppo_repro.numerics.arithmetic import elementwise
from ppo_repro.numerics.kernels import optimizer as kernels

NORM_BITS = 26  # grid bits of a gradient in the norm


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of AdamW (Loshchilov and Hutter, 2019) and of gradient clipping by the global norm."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer keeps from step to step, besides the weights; by parameter name."""

    first: Mapping[str, Tensor]  # AdamW first moments, float32
    second: Mapping[str, Tensor]  # second moments
    # exact numerics: exponent of each gradient's grid; a stock trainer in float16: of its loss scale; empty in native
    grids: Mapping[str, int]
    steps: Mapping[str, int]  # native numerics: steps each parameter has taken; empty in exact
    beta1_power: float  # exact numerics: beta1^steps by repeated multiplication; 1 in native
    beta2_power: float
    factors: Mapping[str, Tensor] = field(default_factory=dict)  # of low-rank adapters


def require_named(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """ValueError unless names, shapes and dtypes are the same."""
    if set(targets) != set(values):
        unmatched = ", ".join(sorted(set(targets) ^ set(values)))
        raise ValueError(f"these tensors are on one side only: {unmatched}")
    for name, target in targets.items():
        value = values[name]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            actual, expected = f"{value.dtype} {list(value.shape)}", f"{target.dtype} {list(target.shape)}"
            raise ValueError(f"tensor {name} is {actual}, expected {expected}")


def copy_named(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy every bit of `values` into `targets`; ValueError unless names, shapes and dtypes are the same."""
    require_named(targets, values)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


def _flat(x: Tensor) -> np.ndarray:
    """The elements of a contiguous CPU tensor as an array that shares its memory."""
    return x.detach().view(-1).numpy()


def _sum_of_squares(gradient: Tensor, shift: int) -> int:
    """sum rne(g 2^shift)^2 of integers up to 2^26, as int64 sums of products of their 13-bit halves."""
    integers = (gradient.to(torch.float64).reshape(-1) * elementwise.pow2(torch.tensor(shift))).round_()
    integers = integers.to(torch.int64)
    high = integers >> 13
    low = integers - (high << 13)
    return (int((high * high).sum()) << 26) + (int((high * low).sum()) << 14) + int((low * low).sum())


def exact_norms(gradients: Iterable[Tensor]) -> tuple[float, list[float], list[float]]:
    """The norm of all gradients together, the norm of each, and the largest magnitude in each.

    sqrt(sum g^2) from exact integer sums; independent of any order. Each tensor is rounded to a grid of NORM_BITS below
    its largest element. The integer sums of squares of all tensors are added as Python integers. NumericsError where
    a gradient is not finite.
    """
    tensors = list(gradients)
    largest = [_largest(tensor) for tensor in tensors]
    if not all(math.isfinite(magnitude) for magnitude in largest):
        raise NumericsError("a gradient is not finite; lower the learning rate")
    shifts = [NORM_BITS - math.frexp(magnitude)[1] for magnitude in largest]
    sums = [_square(t, shift) if most else 0 for t, shift, most in zip(tensors, shifts, largest, strict=True)]
    squares = [(total, -2 * shift) for total, shift in zip(sums, shifts, strict=True)]
    return _root(squares), [_root([square]) for square in squares], largest


def exact_norm(gradients: Iterable[Tensor]) -> float:
    """The norm of all gradients together, as `exact_norms` has it."""
    return exact_norms(gradients)[0]


def _largest(gradient: Tensor) -> float:
    if not gradient.numel():
        return 0.0
    return kernels.largest(_flat(gradient)) if backend.has_kernels(gradient) else float(gradient.abs().amax())


def _square(gradient: Tensor, shift: int) -> int:
    if backend.has_kernels(gradient):
        return kernels.sum_of_squares(_flat(gradient), shift)
    return _sum_of_squares(gradient, shift)


def _root(squares: Sequence[tuple[int, int]]) -> float:
    """sqrt(sum_i n_i 2^u_i) of integers n_i and exponents u_i, rounded down to 64 bits or more, then to float64."""
    squares = [(total, unit) for total, unit in squares if total]
    if not squares:
        return 0.0
    unit = min(exponent for _, exponent in squares)
    total = sum(square << (exponent - unit) for square, exponent in squares)
    # so many extra bits that the exponent of the unit is even: then the root's unit is a power of two
    extra = max(0, 128 - total.bit_length())
    extra += (extra + unit) % 2
    return math.ldexp(math.isqrt(total << extra), (unit - extra) // 2)


def _adamw(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, c: kernels.StepConstants) -> None:
    g = gradient * c.clip
    first.mul_(c.beta1).add_(g * c.rest1)
    second.mul_(c.beta2).add_((g * g).mul_(c.rest2))
    denominator = elementwise.divided(elementwise.sqrt(second), c.second_scale) + c.eps
    parameter.mul_(c.decay)
    parameter.sub_((first / denominator).mul_(c.step_size))


class ExactAdamW:
    """AdamW by the elementwise law on named parameters, with its moments."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = dict(parameters)
        self.first, self.second = (
            {name: torch.zeros_like(p.detach()) for name, p in self.parameters.items()} for _ in range(2)
        )
        # powers of beta by repeated multiplication: the C library's pow differs between machines
        self.beta1_power = self.beta2_power = 1.0

    @torch.no_grad()
    def apply(self, s: AdamWSettings, gradients: Mapping[str, Tensor], norm: float) -> None:
        """One step with gradients of global norm `norm`, scaled down to `max_grad_norm`."""
        self.beta1_power *= s.beta1
        self.beta2_power *= s.beta2
        constants = kernels.StepConstants(
            clip=min(1.0, s.max_grad_norm / (norm + 1e-6)),
            beta1=s.beta1,
            rest1=1.0 - s.beta1,
            beta2=s.beta2,
            rest2=1.0 - s.beta2,
            second_scale=math.sqrt(1.0 - self.beta2_power),
            eps=s.eps,
            decay=1.0 - s.learning_rate * s.weight_decay,
            step_size=s.learning_rate / (1.0 - self.beta1_power),
        )
        of_kernels = constants.as_float32()
        for name, parameter in self.parameters.items():
            tensors = (parameter.detach(), gradients[name], self.first[name], self.second[name])
            if backend.has_kernels(parameter):
                values, gradient, first, second = (_flat(t) for t in tensors)
                kernels.adamw(values, gradient, first, second, of_kernels)
                # prepared weights are outdated when this counter changes
                torch.autograd.graph.increment_version(parameter)
            else:
                _adamw(*tensors, constants)

    def state(self, grids: Mapping[str, int]) -> OptimizerState:
        return OptimizerState(self.first, self.second, dict(grids), {}, self.beta1_power, self.beta2_power)

    def load(self, state: OptimizerState) -> None:
        copy_named(self.first, state.first)
        copy_named(self.second, state.second)
        self.beta1_power, self.beta2_power = state.beta1_power, state.beta2_power


class NativeAdamW:
    """clip_grad_norm_ and torch.optim.AdamW on named parameters with float gradients in `grad`."""

    def __init__(self, parameters: Mapping[str, Tensor], settings: AdamWSettings) -> None:
        self.parameters = dict(parameters)
        self.adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def apply(self, settings: AdamWSettings) -> float:
        """One step; returns the global norm before clipping. NumericsError if it is not finite."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), settings.max_grad_norm))
        if not math.isfinite(norm):
            raise NumericsError("the gradient norm is not finite; lower the learning rate")
        for group in self.adamw.param_groups:
            group["lr"] = settings.learning_rate
        self.adamw.step()
        return norm

    def state(self) -> OptimizerState:
        # a parameter that never had a gradient has no state
        states = {name: self.adamw.state[p] for name, p in self.parameters.items() if p in self.adamw.state}
        first = {name: state["exp_avg"] for name, state in states.items()}
        second = {name: state["exp_avg_sq"] for name, state in states.items()}
        return OptimizerState(first, second, {}, {name: int(s["step"]) for name, s in states.items()}, 1.0, 1.0)

    def load(self, state: OptimizerState) -> None:
        if state.grids or not set(state.steps) <= set(self.parameters):
            raise ValueError("the optimizer state is not of this module in native numerics")
        names = list(state.steps)
        first, second = ({name: torch.zeros_like(self.parameters[name]) for name in names} for _ in range(2))
        copy_named(first, state.first)
        copy_named(second, state.second)
        for name, steps in state.steps.items():
            moments = {"step": torch.tensor(float(steps)), "exp_avg": first[name], "exp_avg_sq": second[name]}
            self.adamw.state[self.parameters[name]] = moments
