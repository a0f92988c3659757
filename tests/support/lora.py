"""A policy with adapters, and some steps of training."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_repro.models.batches import TokenBatch
from ppo_repro.models.lora import Lora, add_lora
from ppo_repro.models.lora_optimizer import make_lora_optimizer
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.optimizer import SLOTS, AdamWSettings, Optimizer
from ppo_repro.numerics.rows import slots_of
from ppo_repro.numerics.structs import Ints
from ppo_repro.numerics.token_statistics import token_statistics
from tests.support.models import CONTEXT, ragged, scored, seeded, source_model

SETTINGS = AdamWSettings(2e-2, 0.9, 0.95, 1e-8, 0.01, 1.0)

RANK, ALPHA = 4, 12.0
COUNT = 9
PROMPTS, RESPONSES = ragged(COUNT, 3, prompt=12)
TOKENS = sum(map(len, RESPONSES))


def slots(sequences: range) -> Ints:
    """Those of some of the sequences, of which all together are a minibatch."""
    return slots_of(sequences, COUNT, SLOTS)


def void(_: object) -> None:
    """An expression as a statement."""


def adapted(
    architecture: str, mode: str, targets: tuple[str, ...] = (), settings: AdamWSettings = SETTINGS
) -> tuple[PreTrainedModel, Lora, Optimizer]:
    policy = make_policy(source_model(architecture), mode, CONTEXT)
    lora = add_lora(policy, RANK, ALPHA, targets, seed=5)
    return policy, lora, make_lora_optimizer(policy, lora, settings, mode)


def learn(
    policy: PreTrainedModel,
    optimizer: Optimizer,
    mode: str,
    steps: int,
    micro_batch: int = 0,
    padding: str = "right",
) -> None:
    """Some steps on the same sequences with random advantages, cut up in some way."""
    by_sequence = torch.randn(COUNT, generator=seeded(4)).tolist()
    advantages = torch.tensor([of for of, response in zip(by_sequence, RESPONSES, strict=True) for _ in response])

    def loss(batch: TokenBatch, first: int, last: int) -> Tensor:
        logprobs, entropies = token_statistics(policy_logits(policy, batch), batch.targets, 0.9, None, mode)
        losses = -logprobs * advantages[first:last] - 0.01 * entropies
        torch.autograd.backward(losses, torch.full_like(losses, 1.0 / TOKENS))
        return losses.detach()

    for _ in range(steps):
        optimizer.step(lambda: void(scored(PROMPTS, RESPONSES, padding, micro_batch, loss, slots)))
