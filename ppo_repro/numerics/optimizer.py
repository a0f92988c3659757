"""Take optimizer steps: gradients, clipping of their global norm, AdamW; deterministic, or by stock torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from ppo_repro.base.errors import NumericsError
from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.base.ranks import ALONE, Ranks
from ppo_repro.numerics.devices import kernels_of
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.interface import CPU, Struct, ffi, pointer

SLOTS = 8  # of a minibatch
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


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the first 16 hex digits of the SHA-256 over names and raw bits of the parameters, in the given order."""
    digest = hashlib.sha256()
    for name, parameter in parameters:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().view(-1).numpy().data)
    return digest.hexdigest()[:16]


def _require_same_names(expected: Iterable[str], found: Iterable[str], what: str) -> None:
    """Raise ValueError, with the first names, for names that only one side has."""
    unmatched = sorted(set(expected) ^ set(found))
    if unmatched:
        more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
        raise ValueError(f"one side only has {what} {', '.join(unmatched[:3])}{more}")


def copy_named(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy every bit of `values` into `targets`. Raises ValueError unless names, shapes and dtypes are the same."""
    _require_same_names(targets, values, "the tensors")
    for name, target in targets.items():
        value = values[name]
        if (value.shape, value.dtype) != (target.shape, target.dtype):
            actual, expected = f"{value.dtype} {list(value.shape)}", f"{target.dtype} {list(target.shape)}"
            raise ValueError(f"tensor {name} is {actual}, expected {expected}")
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(values[name])


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
        _require_same_names(self.parameters, state.steps, "steps of")
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
        _require_same_names(self.parameters, state.steps, "steps of")
        copy_named(self._kept("exp_avg"), state.first)
        copy_named(self._kept("exp_avg_sq"), state.second)
        for name, step in self._kept("step").items():
            step.fill_(state.steps[name])


class NativeGradients:
    """Gradients of autograd in `.grad`, added over ranks, with the interface of GradientSums."""

    def __init__(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        self.trained = {name: p for name, p in parameters if p.requires_grad}

    def begin(self) -> None:
        for parameter in self.trained.values():
            parameter.grad = None

    release = begin

    def finish(self, ranks: Ranks = ALONE) -> dict[str, Tensor]:
        if ranks.size > 1:
            for parameter in self.trained.values():
                if parameter.grad is None:  # this rank has no sequences
                    parameter.grad = torch.zeros_like(parameter)
            ranks.add_up([p.grad for p in self.trained.values() if p.grad is not None])
        return {name: p.grad for name, p in self.trained.items() if p.grad is not None}


class Adapter(Protocol):
    """Interface of an adapter, whose factors are trained in place of weights: `models.lora.Lora`."""

    @property
    def whole(self) -> Mapping[str, Tensor]: ...  # what is trained beside the factors

    def trained(self) -> dict[str, Tensor]: ...
    def factors(self) -> dict[str, Tensor]: ...
    def gradients(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def merge(self) -> None: ...


class Optimizer:
    """Optimizer of a module's parameters, or of an adapter's factors: gradients, clipping of the global norm, AdamW.

    Mode `deterministic` sums gradients in `slots` on this process, and computes their norm and AdamW in a fixed order.
    Mode `native` uses stock torch. `settings` may be replaced between steps; the next step uses all of them.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        mode: Mode,
        slots: int = SLOTS,
        adapter: Adapter | None = None,
    ) -> None:
        """Begin with moments of zero.

        Args:
            module: the module whose parameters with gradients are trained.
            settings: settings of AdamW and clipping.
            mode: `deterministic` or `native`.
            slots: slots of a minibatch on this process.
            adapter: adapter to train in place of the weights that it changes.
        """
        self.settings, self._adapter = settings, adapter
        named = list(module.named_parameters())
        self.sums = GradientSums(named, slots) if is_deterministic_mode(mode) else NativeGradients(named)
        trained = self.sums.trained if adapter is None else adapter.trained()
        self.adamw = AdamW(trained) if is_deterministic_mode(mode) else NativeAdamW(trained, settings)

    def step(self, backward: Callable[[], None], ranks: Ranks = ALONE) -> float:
        """Run `backward` over a minibatch, apply one step, and return the gradient norm before clipping.

        `backward` is called once; it must not change the weights, and calls autograd's backward for each micro-batch in
        the order of the sequences. With several ranks it covers the sequences of this rank, and every rank takes the
        same step. Raises NumericsError for a gradient that is not finite.
        """
        self.sums.begin()
        backward()
        gradients = self.sums.finish(ranks)
        if self._adapter is not None:
            gradients = self._adapter.gradients(gradients)
        norm = self.adamw.apply(self.settings, gradients)
        if self._adapter is not None:
            self._adapter.merge()
        return norm

    def rest(self) -> None:
        """Free the memory of steps; the next step allocates it again."""
        self.sums.release()

    @property
    def is_adapted(self) -> bool:
        """Return whether factors are trained in place of weights."""
        return self._adapter is not None

    @property
    def trained_count(self) -> int:
        """Return the number of trained numbers."""
        return sum(parameter.numel() for parameter in self.adamw.parameters.values())

    def weights_to_keep(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights of a module that `load` does not compute again from factors."""
        named = module.named_parameters() if self._adapter is None else self._adapter.whole.items()
        return {name: parameter.detach() for name, parameter in named}

    def state(self) -> OptimizerState:
        """Return the state that `load` needs to continue from here; its tensors are not copies."""
        return replace(self.adamw.state(), factors={} if self._adapter is None else self._adapter.factors())

    def load(self, state: OptimizerState) -> None:
        """Continue from `state`. Raises ValueError if it belongs to another module."""
        if self._adapter is None and state.factors:
            raise ValueError("it has factors of adapters; the configuration has no lora")
        if self._adapter is not None:
            copy_named(self._adapter.factors(), state.factors)
        self.adamw.load(state)
        if self._adapter is not None:
            self._adapter.merge()
