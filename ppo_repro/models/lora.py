"""Low-rank adapters that are always merged, so that sampler and trainer still agree on every bit. Hu et al., 2022.

The model has the merged weights W' = W + s B A, A [r, K], B [N, r], and every forward pass uses W'. Other
implementations compute x W^T + s (x A^T) B^T in training, and merge for generation. The two results round differently.
A backward pass collects the gradient of W' as in full training. The optimizer steps on A and B and merges again. That
saves optimizer moments and checkpoint size, but no gradient memory.

A policy trains only its adapters. A value model also trains its head, whose weights are new.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_repro.base.errors import UserError
from ppo_repro.base.seeding import words
from ppo_repro.models.networks import ValueModel
from ppo_repro.numerics.linear import product
from ppo_repro.numerics.lowering import is_deterministic
from ppo_repro.numerics.matrices import PackedMatrix, Packing
from ppo_repro.numerics.network import Network, network_of

_UNIFORM_BITS = 24

Adaptable = PreTrainedModel | ValueModel


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
    deterministic: bool
    whole: dict[str, nn.Parameter] = field(default_factory=dict)  # parameters trained without factors, by name

    @property
    def scale(self) -> float:
        """Return s = alpha / r."""
        return self.alpha / self.rank

    @property
    def factors_of(self) -> dict[str, tuple[str, str]]:
        """Return the names of the factors A and B by the name of the weight that they change."""
        return {f"{name}.weight": (f"{name}.lora_A.weight", f"{name}.lora_B.weight") for name in self.layers}

    def factors(self) -> dict[str, Tensor]:
        """Return A [r, K] and B [N, r] of every layer by name, not copied."""
        by_name: dict[str, Tensor] = {}
        for (a, b), layer in zip(self.factors_of.values(), self.layers.values(), strict=True):
            by_name |= {a: layer.a, b: layer.b}
        return by_name

    def trained(self) -> dict[str, Tensor]:
        """Return all trained parameters: the factors, and the parameters trained without factors."""
        return {**self.factors(), **self.whole}

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply [M, N] by [N, K]: sum_n a[m, n] b[n, k]. Deterministic numerics use the rule of linear layers."""
        return product(a, PackedMatrix([b.contiguous()], Packing(), transposed=True)) if self.deterministic else a @ b

    @torch.no_grad()
    def merge(self) -> None:
        """Set each weight W' to W + s (B A), and to the bits of W wherever B A is 0 (-0 stays -0)."""
        for layer in self.layers.values():
            added = self._product(layer.b, layer.a)
            merged = torch.where(added == 0, layer.base, layer.base + added * self.scale)
            layer.weight.copy_(merged.t() if layer.transposed else merged)

    def gradients(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return gradients by name of all trained parameters from the model's gradients; zeros for a missing gradient.

        dA = s (B^T dW') and dB = s (dW' A^T) are functions of dW' alone, so the layout never changes them. An empty
        dW' belongs to another rank, and so do its factors.
        """
        gradients = {name: collected[name] for name in self.whole if name in collected}
        for (name, (a, b)), layer in zip(self.factors_of.items(), self.layers.values(), strict=True):
            gradient = collected.get(name)
            if gradient is not None and not gradient.numel():
                gradients |= {a: gradient, b: gradient}
                continue
            merged = torch.zeros_like(layer.weight) if gradient is None else gradient
            merged = merged.t() if layer.transposed else merged
            gradients[a] = self._product(layer.b.t(), merged) * self.scale
            gradients[b] = self._product(merged, layer.a.t()) * self.scale
        return gradients


def linear_layers(model: Adaptable) -> dict[str, nn.Module]:
    """Return the linear layers of attention and MLP by name, without the head, whose weight may be the embedding."""
    head = model.head if isinstance(model, ValueModel) else model.get_output_embeddings()
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }


def choose_layers(model: Adaptable, target_modules: Sequence[str], section: str = "lora") -> dict[str, nn.Module]:
    """Return the linear layers whose name is a target or ends in `.target`; all if `target_modules` is empty.

    Raises UserError, naming `section` of the configuration, for a target that matches no layer.
    """
    layers = linear_layers(model)
    if not target_modules:
        return layers
    for target in target_modules:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise UserError(
                f"{section}.target_modules: {target!r} names no layer that can be adapted; "
                f"choose from {', '.join(_ends(layers))}"
            )
    return {n: layer for n, layer in layers.items() if any(f".{n}".endswith(f".{t}") for t in target_modules)}


def _ends(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name.rpartition(".")[2] for name in names}))


def initial_a(rank: int, columns: int, seed: int, name: str) -> Tensor:
    """Draw A [r, K] float32, uniform on 2^24 evenly spaced values in (-1/sqrt(K), 1/sqrt(K)).

    peft uses the same distribution: `kaiming_uniform_` with a = sqrt(5).

    Args:
        rank: r.
        columns: K, the inputs of the adapted layer.
        name: of the layer; each layer has its own random numbers.
    """
    integers = (words(rank * columns, "lora A", seed, name) >> np.uint64(64 - _UNIFORM_BITS)).astype(np.int64)
    centred = (2 * integers + 1 - (1 << _UNIFORM_BITS)).astype(np.float64)
    return torch.from_numpy(centred * (2.0**-_UNIFORM_BITS / math.sqrt(columns))).to(torch.float32).view(rank, columns)


def add_lora(model: Adaptable, rank: int, alpha: float, target_modules: Sequence[str], seed: int) -> Lora:
    """Adapt linear layers of a policy or value model, and freeze all its other parameters.

    No weight changes: A is drawn by `initial_a` and B is zero. The head of a value model stays trainable.

    Args:
        model: from `make_policy`, or a value model; changes in place.
        rank: r, columns of B and rows of A.
        alpha: the update B A is scaled by alpha / r.
        target_modules: ends of layer names, as in peft; empty for all linear layers of attention and MLP.

    Raises:
        UserError: a target matches no layer.
    """
    is_value = isinstance(model, ValueModel)
    adapted = choose_layers(model, target_modules, "value.lora" if is_value else "lora")
    whole = {f"head.{name}": p for name, p in model.head.named_parameters()} if isinstance(model, ValueModel) else {}
    trained = {id(parameter) for parameter in whole.values()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    layers = {}
    for name, linear in adapted.items():
        weight, transposed = linear.get_parameter("weight"), isinstance(linear, Conv1D)
        weight.requires_grad_(True)
        base = weight.detach().t() if transposed else weight.detach()
        outputs, inputs = shape_of(linear)
        layers[name] = AdaptedLayer(
            weight=weight,
            base=base.clone(memory_format=torch.contiguous_format),
            a=initial_a(rank, inputs, seed, name).to(base.device),
            b=torch.zeros(outputs, rank, device=base.device),
            transposed=transposed,
        )
    deterministic = is_deterministic(model.trunk if isinstance(model, ValueModel) else model)
    lora = Lora(rank, alpha, tuple(target_modules) or _ends(adapted), layers, deterministic, whole)
    lora.merge()
    return lora


def share_frozen(model: Adaptable, base: PreTrainedModel, lora: Lora) -> Lora:
    """Let an adapted model share the weights that it does not train with a frozen model; return the new adapter.

    The frozen model's weights replace the base of every adapted layer and every other parameter, except parameters that
    are trained without factors or that lie in one matrix with an adapted weight. `base` is the reference of a policy,
    or the trunk from which a value model started. No code may change a frozen parameter afterwards. Raises ValueError,
    naming a weight, if the two models have different bits.
    """
    prefix = "trunk." if isinstance(model, ValueModel) else ""
    own_trunk = model.trunk if isinstance(model, ValueModel) else model
    for each in (own_trunk, base):  # now: a weight that moves later would leave its old memory to the adapter
        network = network_of(each)
        if isinstance(network, Network):
            network.model.fuse()
    layers = {}
    for name, layer in lora.layers.items():
        weight = base.get_submodule(name.removeprefix(prefix)).get_parameter("weight").detach()
        shared = weight.t() if layer.transposed else weight
        _require_same_bits(name, layer.base, shared)
        layers[name] = replace(layer, base=shared)
    trained = {layer.weight.untyped_storage().data_ptr() for layer in lora.layers.values()}
    for name, module in own_trunk.named_modules():
        twin = base.get_submodule(name)
        for own, parameter in list(module.named_parameters(recurse=False)):
            if parameter.untyped_storage().data_ptr() in trained:
                continue
            _require_same_bits(f"{prefix}{name}", parameter, twin.get_parameter(own))
            setattr(module, own, twin.get_parameter(own))
    return replace(lora, layers=layers)


def _require_same_bits(name: str, ours: Tensor, theirs: Tensor) -> None:
    # compared as integers, because +0 and -0 are different bits
    if ours.shape != theirs.shape or not torch.equal(
        ours.detach().view(torch.int32), theirs.detach().view(torch.int32)
    ):
        raise ValueError(f"{name}: the two models have different weights, so they cannot share them")


def shape_of(layer: nn.Module) -> tuple[int, int]:
    """Return the numbers of outputs and inputs (N, K) of a linear layer."""
    first, second = layer.get_parameter("weight").shape
    return (second, first) if isinstance(layer, Conv1D) else (first, second)
