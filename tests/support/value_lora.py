"""A value model with adapters, and some steps of training."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.models.batches import TokenBatch
from ppo_repro.models.lora import Lora, add_lora
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import ValueModel, make_value_model, value_predictions
from ppo_repro.numerics.optimizer import Optimizer
from tests.support.lora import ALPHA, COUNT, PROMPTS, RANK, RESPONSES, SETTINGS, TOKENS, slots, void
from tests.support.models import CONTEXT, scored, seeded, source_model


def adapted_value_model(
    architecture: str, mode: str, targets: tuple[str, ...] = ()
) -> tuple[ValueModel, Lora, Optimizer]:
    model = make_value_model(source_model(architecture), mode, CONTEXT, 0)
    lora = add_lora(model, RANK, ALPHA, targets, seed=5)
    return model, lora, make_lora_optimizer(model, lora, SETTINGS, mode)


def learn_values(
    model: ValueModel,
    optimizer: Optimizer,
    steps: int,
    micro_batch: int = 0,
    padding: str = "right",
) -> None:
    """Some steps towards random values of the same sequences, cut up in some way."""
    by_sequence = torch.randn(COUNT, generator=seeded(4)).tolist()
    wanted = torch.tensor([of for of, response in zip(by_sequence, RESPONSES, strict=True) for _ in response])

    def loss(batch: TokenBatch, first: int, last: int) -> Tensor:
        losses = (value_predictions(model, batch) - wanted[first:last]) ** 2
        torch.autograd.backward(losses, torch.full_like(losses, 1.0 / TOKENS))
        return losses.detach()

    for _ in range(steps):
        optimizer.step(lambda: void(scored(PROMPTS, RESPONSES, padding, micro_batch, loss, slots)))
