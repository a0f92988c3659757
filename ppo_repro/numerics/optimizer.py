"""Take optimizer steps: sum the gradients of a minibatch, clip and apply them, and merge adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from torch import Tensor, nn

from ppo_repro.base.mode import Mode, is_deterministic_mode
from ppo_repro.base.processes import SLOTS
from ppo_repro.base.ranks import ALONE, Ranks
from ppo_repro.numerics.adamw import AdamW, AdamWSettings, OptimizerState
from ppo_repro.numerics.gradient_sums import GradientSums
from ppo_repro.numerics.native_optimizer import NativeAdamW, NativeGradients
from ppo_repro.numerics.shards import Shards, divided, owned_whole, whole_cuts
from ppo_repro.numerics.weights import copy_named


class Adapter(Protocol):
    """Interface of an adapter, whose factors are trained in place of weights: `models.lora.Lora`."""

    @property
    def factors_of(self) -> Mapping[str, tuple[str, str]]: ...  # names of the factors, by the name of the weight

    @property
    def whole(self) -> Mapping[str, Tensor]: ...  # what is trained beside the factors

    def trained(self) -> dict[str, Tensor]: ...
    def factors(self) -> dict[str, Tensor]: ...
    def gradients(self, collected: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def merge(self) -> None: ...


class Optimizer:
    """Optimizer of a module's parameters, or of an adapter's factors: gradients, clipping of the global norm, AdamW.

    Mode `deterministic` computes sums of gradients, their norm and AdamW in a fixed order, and divides the sums, the
    moments and the steps among the ranks. In mode `native` stock torch does, and every rank does all. `settings` may be
    replaced between steps. The next step uses all of them.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: AdamWSettings,
        mode: Mode,
        ranks: Ranks = ALONE,
        adapter: Adapter | None = None,
    ) -> None:
        """Begin with moments of zero.

        Args:
            module: the module whose parameters with gradients are trained.
            adapter: adapter to train in place of the weights that it changes.
        """
        self.settings, self._adapter = settings, adapter
        named = list(module.named_parameters())
        weights = {name: p for name, p in named if p.requires_grad}
        trained = weights if adapter is None else adapter.trained()
        self.sums: GradientSums | NativeGradients
        self.adamw: AdamW | NativeAdamW
        if is_deterministic_mode(mode):
            of_gradients, of_step = _shards(weights, trained, adapter, ranks)
            self.sums, self.adamw = GradientSums(named, SLOTS // ranks.size, of_gradients), AdamW(trained, of_step)
        else:
            self.sums, self.adamw = NativeGradients(weights, ranks), NativeAdamW(trained, settings)

    def step(self, backward: Callable[[], None]) -> float:
        """Run `backward` over a minibatch, apply one step, and return the gradient norm before clipping.

        `backward` is called once. It must not change the weights. It calls autograd's backward for each micro-batch, in
        the order of the sequences. A micro-batch is laid out `with_sums(self.sink)`. With several ranks `backward`
        covers the sequences of this rank, and every rank has all new weights afterwards.

        Raises NumericsError for a gradient that is not finite, or a norm that is not finite in float32.
        """
        self.sums.begin()
        backward()
        gradients = self.sums.finish()
        if self._adapter is not None:
            gradients = self._adapter.gradients(gradients)
        norm = self.adamw.apply(self.settings, gradients)
        if self._adapter is not None:
            self._adapter.merge()
        return norm

    @property
    def sink(self) -> GradientSums | None:
        """Return the sums that a batch of a step needs; None in native numerics, where autograd has the gradients."""
        return self.sums if isinstance(self.sums, GradientSums) else None

    def rest(self) -> None:
        """Free the memory of steps. The next step allocates it again."""
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
        """Return the state that `load` needs to continue from here. Its tensors are not copies.

        Every rank calls this method. Only the first one gets the moments.
        """
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


def _shards(
    weights: Mapping[str, Tensor], trained: Mapping[str, Tensor], adapter: Adapter | None, ranks: Ranks
) -> tuple[Shards, Shards]:
    """Divide the gradients of weights, and what is trained.

    One rank owns an adapted matrix and its factors, whose gradients need the gradient of the whole matrix.
    """
    if adapter is None:
        shards = divided(weights, ranks)
        return shards, shards
    owners = owned_whole({name: weights[name] for name in adapter.factors_of}, ranks)
    of_weights = {**divided(weights, ranks).cuts} | {
        n: whole_cuts(weights[n], position, ranks) for n, position in owners.items()
    }
    of_trained = {name: of_weights[name] for name in trained if name in weights}
    for name, factors in adapter.factors_of.items():
        of_trained |= {factor: whole_cuts(trained[factor], owners[name], ranks) for factor in factors}
    return Shards(ranks, of_weights), Shards(ranks, of_trained)
