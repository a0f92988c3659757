"""`check_advantages` finds what a layout changes in an estimator and at which token, and nothing where nothing does."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ppo_repro.testing import PaddedAdvantageBatch, advantages, check_advantages
from ppo_repro.testing.advantages import Kind


def gae(batch: PaddedAdvantageBatch) -> Tensor:
    """Over the tokens that count only, whatever is between them."""
    out = torch.zeros_like(batch.values)
    for row in range(len(out)):
        after = value = torch.zeros((), dtype=out.dtype)
        for t in reversed(batch.mask[row].nonzero()[:, 0].tolist()):
            after = batch.rewards[row, t] + 0.9 * value - batch.values[row, t] + 0.9 * 0.95 * after
            value = batch.values[row, t]
            out[row, t] = after
    return out


def to_go(batch: PaddedAdvantageBatch) -> Tensor:
    return batch.rewards.masked_fill(~batch.mask, 0.0).flip(1).cumsum(1).flip(1)


def group_mean(batch: PaddedAdvantageBatch) -> Tensor:
    means = torch.stack([batch.scores[batch.groups == g].mean() for g in batch.groups])
    return (batch.scores - means)[:, None].expand_as(batch.rewards)


@pytest.mark.parametrize(
    ("kind", "estimator", "gamma"), [("gae", gae, 0.9), ("rewards_to_go", to_go, 1.0), ("group_mean", group_mean, 1.0)]
)
def test_right_estimators_conform(
    kind: Kind, estimator: Callable[[PaddedAdvantageBatch], Tensor], gamma: float
) -> None:
    assert check_advantages(estimator, kind, gamma=gamma) == {}


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
