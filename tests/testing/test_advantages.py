"""`check_advantages` finds what a layout changes in an estimator and at which token, and nothing where nothing does."""

from __future__ import annotations

import doctest

import torch
from torch import Tensor

from ppo_repro.testing import PaddedAdvantageBatch, advantages, check_advantages


def test_advantages_that_reset_at_tool_tokens_and_junk_are_found() -> None:
    def resetting(batch: PaddedAdvantageBatch) -> Tensor:
        out, after = torch.zeros_like(batch.rewards), torch.zeros(len(batch.rewards), dtype=batch.rewards.dtype)
        for t in reversed(range(out.shape[1])):
            out[:, t] = after = (batch.rewards[:, t] + after) * batch.mask[:, t]
        return out

    found = check_advantages(resetting, "rewards_to_go")
    assert not {"all at once, padded right", "padding left", "extra 3", "order shuffled"} & set(found)
    assert found["inserted 2"].endswith("at sequence 0, position 0")
    assert found["inserted 1, junk not finite"].startswith("nan instead of")


def test_the_example_runs() -> None:
    found = doctest.testmod(advantages)
    assert found.attempted
    assert not found.failed
