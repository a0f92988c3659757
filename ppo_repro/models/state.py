"""The one mutable object of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from ppo_repro.buffers import Coefficients
from ppo_repro.models.networks import ValueModel
from ppo_repro.models.versions import Versions
from ppo_repro.numerics.network import forget_packed, free_memory
from ppo_repro.numerics.optimizer import Optimizer, weights_digest

Stream = tuple[int | str, ...]  # the name of a random stream
HiddenHook = Callable[[Tensor, Tensor, Stream], Tensor]


def unchanged(hidden: Tensor, tokens: Tensor, stream: Stream) -> Tensor:
    """Return the policy's last hidden states [n, H] of `tokens` [n] as they are."""
    return hidden


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
    hidden_hook: HiddenHook = unchanged  # what happens to the policy's last hidden states in training

    def rest_sampler(self) -> None:
        """Free the packed weights that only the sampler needs, until the next rollout."""
        if self.sampler is not None:
            forget_packed(self.sampler)

    def rest(self) -> None:
        """Free what only optimizer steps need, until the next ones."""
        self.policy_optimizer.rest()
        if self.value_optimizer is not None:
            self.value_optimizer.rest()
            free_memory(self.own_value_module)
        free_memory(self.policy)
        forget_packed(self.reference)

    @property
    def own_value_module(self) -> nn.Module:
        """What of the value model is not the policy's: all, or a head on the policy's trunk; nothing without one."""
        if self.value_model is None:
            return nn.Module()
        return self.value_model if self.value_optimizer is not None else self.value_model.head

    def digests(self) -> tuple[str, str | None]:
        """Digests of the weights of policy and value model; None without a value model."""
        policy = weights_digest(self.policy.named_parameters())
        value = None if self.value_model is None else weights_digest(self.own_value_module.named_parameters())
        return policy, value

    def value_parameters(self) -> dict[str, Tensor]:
        """The parameters of `own_value_module`."""
        return dict(self.own_value_module.named_parameters())
