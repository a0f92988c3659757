"""The weights of every family after some steps have the same bits for 1, 2 and 4 ranks, whole or with adapters."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from ppo_repro.base.processes import SLOTS
from ppo_repro.base.ranks import Ranks
from ppo_repro.models.batches import lay_out
from ppo_repro.models.lora import add_lora
from ppo_repro.models.networks import make_policy, policy_logits
from ppo_repro.numerics.adamw import AdamWSettings
from ppo_repro.numerics.optimizer import Optimizer
from ppo_repro.numerics.sequences import slots_of_rank
from ppo_repro.numerics.shards import Shards
from ppo_repro.numerics.token_statistics import token_statistics
from ppo_repro.numerics.weights import weights_digest
from tests.support.models import CONTEXT, EVERY_FAMILY, ragged, seeded, source_model
from tests.support.thread_ranks import on_each

SETTINGS = AdamWSettings(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.01, max_grad_norm=1.0)
COUNT, STEPS = 9, 2
PROMPTS, RESPONSES = ragged(COUNT, 3, prompt=12)
DIRECTIONS = torch.randn(COUNT, generator=seeded(4)).tolist()


def steps(model: PreTrainedModel, is_adapted: bool, ranks: Ranks) -> str:
    """Let a rank take its part of some steps, and return the digest of all weights."""
    adapter = add_lora(model, 4, 8.0, (), seed=5) if is_adapted else None
    optimizer, mine = Optimizer(model, SETTINGS, "deterministic", ranks, adapter), ranks.mine(COUNT)
    responses = [RESPONSES[i] for i in mine]
    batch = lay_out([PROMPTS[i] for i in mine], responses, slots=slots_of_rank(COUNT, SLOTS, ranks))
    directions = torch.tensor([DIRECTIONS[i] for i in mine for _ in RESPONSES[i]])

    def backward() -> None:
        logits = policy_logits(model, batch.with_sums(optimizer.sink))
        logprobs = token_statistics(logits, batch.targets, 0.9, None, "deterministic")[0]
        torch.autograd.backward(logprobs, directions)

    for _ in range(STEPS):
        optimizer.step(backward)
    return weights_digest(model.named_parameters())


def digests(architecture: str, is_adapted: bool, count: int) -> set[str]:
    models = [make_policy(source_model(architecture), "deterministic", CONTEXT) for _ in range(count)]
    return set(on_each(count, lambda ranks: steps(models[ranks.rank], is_adapted, ranks)))


@pytest.mark.parametrize("is_adapted", [False, True], ids=["whole", "adapters"])
@pytest.mark.parametrize("architecture", EVERY_FAMILY)
def test_ranks_train_the_bits_of_one_process(architecture: str, is_adapted: bool) -> None:
    (alone,) = digests(architecture, is_adapted, 1)
    assert alone != weights_digest(source_model(architecture).named_parameters())
    for count in (2, 4):
        assert digests(architecture, is_adapted, count) == {alone}, count


def test_ranks_that_add_nothing_up_train_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control."""
    (alone,) = digests("smollm3", False, 1)
    monkeypatch.setattr(Shards, "add_up", lambda self, flat: None)
    assert alone not in digests("smollm3", False, 2)
