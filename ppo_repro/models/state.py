"""The one mutable object of a run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.buffers import Coefficients
from ppo_repro.models.networks import ValueModel
from ppo_repro.models.versions import Versions
from ppo_repro.numerics.layers.lowering import forget_operands
from ppo_repro.numerics.optim.optimizer import Optimizer


@dataclass
class TrainState:
    """Everything an update changes, and the frozen reference."""

    policy: PreTrainedModel
    value_model: ValueModel | None  # None for advantages without values
    reference: PreTrainedModel  # frozen
    policy_optimizer: Optimizer  # also of a value head on the policy's trunk
    value_optimizer: Optimizer | None  # None without a separate value model
    coefficients: Coefficients
    iteration: int = 0
    versions: Versions | None = None  # None for a sampler that is never behind
    sampler: PreTrainedModel | None = None  # the policy as the sampler has it, where that is another object

    def forget(self, module: nn.Module | None) -> None:
        """Free the operands of one of the networks, which rests now, but not those of weights shared with another."""
        if module is not None:
            others = (self.policy, self.value_model, self.reference)
            forget_operands(module, [m for m in others if m is not None and m is not module])

    def rest_sampler(self) -> None:
        """Free the operands that only the sampler needs, until the next rollout."""
        self.forget(self.sampler)

    def rest(self) -> None:
        """Free what only optimizer steps need, until the next ones."""
        self.policy_optimizer.rest()
        if self.value_optimizer is not None:
            self.value_optimizer.rest()
        self.forget(self.reference)  # a KL loss over the whole vocabulary needs it in each step
        if self.sampler is not None:
            self.forget(self.policy)

    def versions_now(self) -> Versions | None:
        """The versions of the policy that the sampler may use, with a copy of the present one."""
        if self.versions is not None:
            self.versions.keep(self.iteration)
        return self.versions

    @property
    def own_value_module(self) -> nn.Module:
        """What of the value model is not the policy's: all, or a head on the policy's trunk; nothing without one."""
        if self.value_model is None:
            return nn.Module()
        return self.value_model if self.value_optimizer is not None else self.value_model.head

    def value_parameters(self) -> dict[str, Tensor]:
        """The parameters of `own_value_module`, or this process's parts of them."""
        return dict(self.own_value_module.named_parameters())
