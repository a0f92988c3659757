"""The policy's earlier weights, for a sampler that is behind. Version v is the policy after v iterations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from ppo_repro.numerics.optimizer import copy_named

Weights = dict[str, Tensor]  # of everything in the policy that is trained: with adapters, their factors


def nothing() -> None:
    """What follows a change of weights that are the policy's own."""


@dataclass
class Versions:
    """The versions that a sampler may still need; the policy itself is the newest one."""

    live: Mapping[str, Tensor]  # the policy's, not copied
    depth: int  # how far behind a sampler may be
    merge: Callable[[], None] = nothing  # makes the policy's weights of changed factors
    kept: dict[int, Weights] = field(default_factory=dict)

    @property
    def newest(self) -> int:
        """The version that the policy is now."""
        return max(self.kept)

    def keep(self, version: int) -> None:
        """Copy the policy, which is `version` now."""
        self.kept[version] = {name: tensor.detach().clone() for name, tensor in self.live.items()}

    def forget(self, version: int) -> None:
        """Forget what no sampler needs once the policy is `version`."""
        self.kept = {v: weights for v, weights in self.kept.items() if v >= version - self.depth}

    @contextmanager
    def at(self, version: int) -> Iterator[None]:
        """The policy has the weights of `version` inside the block, and the newest again after it."""
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
        """All kept weights, named `version/parameter`."""
        return {f"{v}/{name}": t for v, weights in self.kept.items() for name, t in weights.items()}

    def restore(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Take kept weights back for a policy that is `version`; ValueError where they are not those it needs."""
        kept: dict[int, Weights] = {}
        for name, tensor in tensors.items():
            number, _, parameter = name.partition("/")
            kept.setdefault(int(number), {})[parameter] = tensor.clone()
        expected = set(range(max(0, version - self.depth), version))
        if set(kept) != expected or any(set(weights) != set(self.live) for weights in kept.values()):
            raise ValueError(f"it has older policies {sorted(kept)}, and the sampler needs {sorted(expected)}")
        self.kept = kept
