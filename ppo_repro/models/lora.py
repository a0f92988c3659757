"""Low-rank adapters that are always merged, so that sampler and trainer still agree on every bit. Hu et al., 2022.

The model holds the merged weights W' = W + s B A (see `numerics.optim.low_rank`), and every forward pass uses them. A
backward pass collects the gradient of W' as in full training. The optimizer turns it into the gradients of A and B,
steps on A and B alone, and merges again. That saves optimizer moments and checkpoint size, but no gradient memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.errors import UserError
from ppo_repro.numerics.gradients import GradientAccumulator
from ppo_repro.numerics.layers.linear import ExactConv1D, ExactLinear
from ppo_repro.numerics.layers.lowering import attach, is_exact
from ppo_repro.numerics.optim import low_rank
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
from ppo_repro.seeding import words

_LINEAR = (nn.Linear, ExactLinear)
_TRANSPOSED = (Conv1D, ExactConv1D)  # weight [K, N]
_PREPARED = (ExactLinear, ExactConv1D)
_UNIFORM_BITS = 24


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of K inputs and N outputs, all float32. The forward pass uses `weight`."""

    weight: nn.Parameter  # W' as stored in the layer: [N, K], or [K, N] where `transposed`
    base: Tensor  # W, [N, K]
    a: Tensor  # [r, K]
    b: Tensor  # [N, r]
    transposed: bool


@dataclass(frozen=True)
class Lora:
    """The adapter of a model."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]  # ends of layer names
    layers: dict[str, AdaptedLayer]  # by the name of the layer
    exact: bool

    @property
    def scale(self) -> float:
        """s = alpha / r."""
        return self.alpha / self.rank

    def factors(self) -> dict[str, Tensor]:
        """A and B of every layer, not copied."""
        return {
            f"{name}.lora_{which}.weight": tensor
            for name, layer in self.layers.items()
            for which, tensor in (("A", layer.a), ("B", layer.b))
        }

    @torch.no_grad()
    def merge(self) -> None:
        """Set the model's weights to W + s B A."""
        merge = low_rank.merge if self.exact else low_rank.merge_native
        for layer in self.layers.values():
            merged = merge(layer.base, layer.a, layer.b, self.scale)
            layer.weight.copy_(merged.t() if layer.transposed else merged)

    def factor_gradients(self, gradient_of: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Gradients of all factors from the gradients of the merged weights, which have the shape of `weight`."""
        gradients_of = low_rank.factor_gradients if self.exact else low_rank.factor_gradients_native
        gradients: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            merged = gradient_of(name).t() if layer.transposed else gradient_of(name)
            a, b = gradients_of(merged, layer.a, layer.b, self.scale)
            gradients[f"{name}.lora_A.weight"], gradients[f"{name}.lora_B.weight"] = a, b
        return gradients


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers of attention and MLP by name: all but the output head, whose weight may be the embedding."""
    head = model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, (*_LINEAR, *_TRANSPOSED)) and layer is not head
    }


def choose_layers(model: PreTrainedModel, target_modules: Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers whose name is a target or ends in `.target`; all if `target_modules` is empty.

    UserError names a target that matches no layer.
    """
    layers = linear_layers(model)
    if not target_modules:
        return layers
    for target in target_modules:
        if not any(_ends_in(name, target) for name in layers):
            choices = ", ".join(_ends(layers))
            raise UserError(
                f"lora.target_modules: {target!r} names no layer that can be adapted; choose from {choices}"
            )
    return {n: layer for n, layer in layers.items() if any(_ends_in(n, target) for target in target_modules)}


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith("." + target)


def _ends(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def initial_a(rank: int, columns: int, seed: int, name: str) -> Tensor:
    """A [r, K] float32, uniform on 2^24 evenly spaced values in (-1/sqrt(K), 1/sqrt(K)); a function of seed and name.

    peft uses the same distribution: `kaiming_uniform_` with a = sqrt(5).
    """
    integers = (words(rank * columns, "lora A", seed, name) >> np.uint64(64 - _UNIFORM_BITS)).astype(np.int64)
    centred = (2 * integers + 1 - (1 << _UNIFORM_BITS)).astype(np.float64)
    return torch.from_numpy(centred * (2.0**-_UNIFORM_BITS / math.sqrt(columns))).to(torch.float32).view(rank, columns)


def add_lora(model: PreTrainedModel, rank: int, alpha: float, target_modules: Sequence[str], seed: int) -> Lora:
    """Adapt linear layers of a model from `make_policy`, and freeze all its other parameters.

    `target_modules` are ends of layer names, as in peft; empty for all linear layers of attention and MLP. A is
    drawn by `initial_a` and B is zero, so no weight changes. UserError names a target that matches no layer.
    """
    adapted = choose_layers(model, target_modules)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    layers = {}
    for name, linear in adapted.items():
        weight, transposed = linear.get_parameter("weight"), isinstance(linear, _TRANSPOSED)
        weight.requires_grad_(True)
        base = weight.detach().t() if transposed else weight.detach()
        outputs, inputs = shape_of(linear)
        layers[name] = AdaptedLayer(
            weight=weight,
            base=base.clone(memory_format=torch.contiguous_format),
            a=initial_a(rank, inputs, seed, name),
            b=torch.zeros(outputs, rank),
            transposed=transposed,
        )
    lora = Lora(rank, alpha, tuple(target_modules) or _ends(adapted), layers, is_exact(model))
    lora.merge()
    return lora


def share_frozen(policy: PreTrainedModel, reference: PreTrainedModel, lora: Lora) -> Lora:
    """Let an adapted policy use the weights of its reference where it does not train; returns the adapter that does.

    The base of every adapted layer is then the reference's own weight, and every other parameter of the policy is that
    of the reference, in exact numerics with what is prepared of it. Both models must be copies of one model, and
    neither frozen parameter may be changed from here on.
    """
    layers = {}
    for name, layer in lora.layers.items():
        weight = reference.get_submodule(name).get_parameter("weight").detach()
        layers[name] = replace(layer, base=weight.t() if layer.transposed else weight)
    trained = {id(layer.weight) for layer in lora.layers.values()}
    for name, module in policy.named_modules():
        twin = reference.get_submodule(name)
        for own, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in trained:
                continue
            setattr(module, own, twin.get_parameter(own))
            if own == "weight" and isinstance(module, _PREPARED) and isinstance(twin, _PREPARED):
                module.prepared = twin.prepared
    return replace(lora, layers=layers)


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    first, second = layer.get_parameter("weight").shape
    return (second, first) if isinstance(layer, _TRANSPOSED) else (first, second)


class ExactLoraOptimizer:
    """Integer gradients of the merged weights, exact products with the factors, and exact AdamW on the factors."""

    def __init__(self, model: PreTrainedModel, lora: Lora, settings: AdamWSettings) -> None:
        self.settings, self.lora = settings, lora
        self.accumulator = GradientAccumulator((n, x.weight) for n, x in lora.layers.items())
        attach(model, self.accumulator)
        self.adamw = ExactAdamW(lora.factors())

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        merged, redos = collect(self.accumulator, backward, tokens, ranks)
        gradients = self.lora.factor_gradients(merged.__getitem__)
        norm = exact_norm(gradients.values())
        measured = tensor_gradients(gradients) if by_tensor else ()
        self.adamw.apply(self.settings, gradients, norm)
        self.lora.merge()
        return StepReport(norm, redos, measured)

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(self.accumulator.grids), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        if state.steps or not set(state.grids) <= set(self.lora.layers):
            raise ValueError("the optimizer state is not that of this adapter in exact numerics")
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.accumulator.grids = dict(state.grids)
        self.lora.merge()


class NativeLoraOptimizer:
    """The same in stock torch: autograd's gradients of the merged weights, float32 products, torch's AdamW."""

    def __init__(self, lora: Lora, settings: AdamWSettings) -> None:
        self.settings, self.lora = settings, lora
        self.adamw = NativeAdamW(lora.factors(), settings)

    def step(
        self, backward: Callable[[], None], tokens: int, ranks: Ranks = ALONE, by_tensor: bool = False
    ) -> StepReport:
        weights = {name: layer.weight for name, layer in self.lora.layers.items()}
        collect_native(list(weights.values()), backward, ranks)
        merged = {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}
        gradients = self.lora.factor_gradients(merged.__getitem__)
        measured = tensor_gradients(gradients) if by_tensor else ()
        for name, gradient in gradients.items():
            self.adamw.parameters[name].grad = gradient
        norm = self.adamw.apply(self.settings)
        self.lora.merge()
        return StepReport(norm, 0, measured)

    def state(self) -> OptimizerState:
        return replace(self.adamw.state(), factors=self.lora.factors())

    def load(self, state: OptimizerState) -> None:
        if set(state.factors) != set(self.adamw.parameters):
            raise ValueError("the optimizer state is not that of this adapter")
        copy_named(self.lora.factors(), state.factors)
        self.adamw.load(state)
        self.lora.merge()


def make_lora_optimizer(model: PreTrainedModel, lora: Lora, settings: AdamWSettings) -> Optimizer:
    """The optimizer of an adapter, in the numerics of its model."""
    if lora.exact:
        return ExactLoraOptimizer(model, lora, settings)
    return NativeLoraOptimizer(lora, settings)
