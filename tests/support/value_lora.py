"""A value model with adapters, and some steps of training."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_repro.models.batches import TokenBatch
from ppo_repro.models.lora import Lora, add_lora
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import ValueModel, make_value_model, value_predictions
from ppo_repro.numerics.optimizer import Optimizer
from tests.support.lora import ALPHA, COUNT, PROMPTS, RANK, RESPONSES, SETTINGS, TOKENS, void
from tests.support.models import CONTEXT, scored, seeded, source_model


def adapted_value_model(
    architecture: str, mode: str, targets: tuple[str, ...] = ()
) -> tuple[ValueModel, Lora, Optimizer]:
    model = make_value_model(source_model(architecture), mode, CONTEXT, 0)
    lora = add_lora(model, RANK, ALPHA, targets, seed=5)
    return model, lora, make_lora_optimizer(model, lora, SETTINGS)


def learn_values(
    model: ValueModel,
    optimizer: Optimizer,
    steps: int,
    micro_batch: int = 0,
    padding: str = "right",
    order_seed: int = 0,
) -> None:
    """Some steps towards random values of the same sequences, cut up and ordered in some way."""
    order = torch.randperm(COUNT, generator=seeded(order_seed)).tolist() if order_seed else list(range(COUNT))
    by_sequence = torch.randn(COUNT, generator=seeded(4)).tolist()
    prompts, responses = [PROMPTS[i] for i in order], [RESPONSES[i] for i in order]
    wanted = torch.tensor([by_sequence[i] for i in order for _ in RESPONSES[i]])

    def loss(batch: TokenBatch, first: int, last: int) -> Tensor:
        losses = (value_predictions(model, batch) - wanted[first:last]) ** 2
        torch.autograd.backward(losses, torch.full_like(losses, 1.0 / TOKENS))
        return losses.detach()

    for _ in range(steps):
        optimizer.step(lambda: void(scored(prompts, responses, padding, micro_batch, loss)), 200)
