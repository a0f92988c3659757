"""The one mutable object of a run."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from ppo_repro.models.networks import ValueModel
from ppo_repro.numerics.optimizer import Optimizer


@dataclass
class TrainState:
    """Everything an update changes, and the reference it does not."""

    policy: PreTrainedModel
    value_model: ValueModel
    reference: PreTrainedModel  # frozen
    policy_optimizer: Optimizer
    value_optimizer: Optimizer
    iteration: int = 0
