"""The one mutable object of a run, and the policy's earlier weights for a sampler that lags behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.buffers import Coefficients, WeightDigests
from ppo_repro.models.networks import ValueModel
from ppo_repro.numerics import library
from ppo_repro.numerics.interface import CPU
from ppo_repro.numerics.network import forget_packed, free_memory
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.weights import copy_named, weights_digest

Stream = tuple[int | str, ...]  # the name of a random stream
HiddenHook = Callable[[Tensor, Tensor, Stream], Tensor]
Weights = dict[str, Tensor]  # of everything in the policy that is trained: with adapters, their factors


@dataclass
class Versions:
    """The versions of the policy that a sampler may still need; version v is the policy after v iterations."""

    live: Mapping[str, Tensor]  # the policy's, not copied
    depth: int  # how far behind a sampler may be
    merge: Callable[[], None] = lambda: None  # makes the policy's weights of changed factors
    kept: dict[int, Weights] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """Return the present version of the policy."""
        return max(self.kept)

    def keep(self, version: int) -> None:
        """Copy the policy's present weights as `version`."""
        self.kept[version] = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    def forget(self, version: int) -> None:
        """Remove the versions that no sampler needs once the policy is `version`."""
        self.kept = {v: weights for v, weights in self.kept.items() if v >= version - self.depth}

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """Give the policy the weights of `version` inside the block, and its newest weights again after the block."""
        newest = self.newest
        if version == newest:
            yield
            return
        self._load(version)
        try:
            yield
        finally:
            self._load(newest)

    def _load(self, version: int) -> None:
        copy_named({name: tensor.detach() for name, tensor in self.live.items()}, self.kept[version])
        self.merge()

    def tensors(self) -> Weights:
        """Return the weights of all stored versions, named `version/parameter`."""
        return {f"{v}/{name}": t for v, weights in self.kept.items() for name, t in weights.items()}

    def restore(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Restore stored versions for a policy that is `version`. Raises ValueError if they are not the needed ones."""
        kept: dict[int, Weights] = {}
        for name, tensor in tensors.items():
            number, _, parameter = name.partition("/")
            kept.setdefault(int(number), {})[parameter] = tensor.clone()
        expected = set(range(max(0, version - self.depth), version))
        if set(kept) != expected or any(set(weights) != set(self.live) for weights in kept.values()):
            raise ValueError(f"it has older policies {sorted(kept)}, and the sampler needs {sorted(expected)}")
        self.kept = kept


def unchanged(hidden: Tensor, tokens: Tensor, stream: Stream) -> Tensor:
    """Return the policy's last hidden states [n, H] of `tokens` [n] unchanged."""
    return hidden


@dataclass(frozen=True)
class Digests:
    """The digests of the weights after a step, which threads may still compute."""

    of_policy: Future[str]
    of_value: Future[str] | None  # None without a value model

    def result(self) -> WeightDigests:
        """Wait for the digests, and return them."""
        return WeightDigests(self.of_policy.result(), None if self.of_value is None else self.of_value.result())


@dataclass
class TrainState:
    """All objects that an update changes, and the frozen reference."""

    policy: PreTrainedModel
    value_model: ValueModel | None  # None for advantages without values
    reference: PreTrainedModel  # frozen
    policy_optimizer: Optimizer  # also of a value head on the policy's trunk
    value_optimizer: Optimizer | None  # None without a separate value model
    coefficients: Coefficients
    iteration: int = 0
    versions: Versions | None = None  # None for a sampler that is never behind
    sampler: PreTrainedModel | None = None  # the policy as the sampler has it, where that is another object
    hidden_hook: HiddenHook = unchanged  # changes the policy's last hidden states in training
    cpu_policy: PreTrainedModel | None = None  # on a GPU: the policy on the CPU, for cross-checks
    cross_checked: int = 0  # tokens that the CPU computed too, by this process
    copies: list[Weights] = field(default_factory=list)  # of a GPU's weights, on the CPU
    digesting: Sequence[Future[str]] = ()  # the digests of the last step

    @cached_property
    def _digesters(self) -> ThreadPoolExecutor:
        """Return the threads that compute digests, as many as the kernels have. They end with the state."""
        return ThreadPoolExecutor(library.load().threads, "digests")

    def free_sampler_memory(self) -> None:
        """Free the packed weights that only the sampler needs, until the next rollout."""
        if self.sampler is not None:
            forget_packed(self.sampler)

    def free_update_memory(self) -> None:
        """Free the memory that only optimizer steps need, until the next step."""
        self.policy_optimizer.rest()
        if self.value_optimizer is not None:
            self.value_optimizer.rest()
            free_memory(self.own_value_module)
        free_memory(self.policy)
        forget_packed(self.reference)

    @property
    def value_head(self) -> ValueModel | None:
        """Return the value model if it is a head on the policy's trunk, which the policy's optimizer trains."""
        return self.value_model if self.value_optimizer is None else None

    @property
    def separate_value(self) -> tuple[ValueModel, Optimizer] | None:
        """Return the value model that has a trunk of its own, and its optimizer; None without one."""
        if self.value_model is None or self.value_optimizer is None:
            return None
        return self.value_model, self.value_optimizer

    @property
    def own_value_module(self) -> nn.Module:
        """Return the modules of the value model that are not the policy's: the whole model, or only its head.

        The result is empty without a value model.
        """
        if self.value_model is None:
            return nn.Module()
        return self.value_model if self.value_head is None else self.value_head.head

    def digests(self) -> Digests:
        """Compute digests of the weights of policy and value model, in parallel.

        For weights on a CPU the digests are complete on return. Weights on a GPU are copied, and threads compute the
        digests of the copies during the next step.
        """
        modules = [self.policy] if self.value_model is None else [self.policy, self.own_value_module]
        weights: list[Weights] = [dict(module.named_parameters()) for module in modules]
        wait(self.digesting)  # they read the copies
        on_card = self.policy.device.type == "cuda"
        if on_card:
            weights = self.copied(weights)
        self.digesting = [self._digesters.submit(weights_digest, named.items()) for named in weights]
        if not on_card:
            wait(self.digesting)
        policy, *value = self.digesting
        return Digests(policy, value[0] if value else None)

    def copied(self, weights: list[Weights]) -> list[Weights]:
        """Copy weights from a GPU to memory of the CPU, which the next call reuses."""
        if not self.copies:
            self.copies = [{n: torch.empty_like(p, device=CPU) for n, p in named.items()} for named in weights]
        for copies, named in zip(self.copies, weights, strict=True):
            copy_named(copies, named)
        return self.copies
