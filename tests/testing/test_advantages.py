"""The kit for advantages passes right estimators and finds the faults of training stacks; its definitions by hand."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest
import torch
from torch import Tensor

from ppo_repro.testing import AdvantageBatch, assert_advantages_conform, check_advantages
from ppo_repro.testing.advantages import Kind


def gae(batch: AdvantageBatch) -> Tensor:
    """Over the tokens that count only, whatever is between them."""
    out = torch.zeros_like(batch.values)
    for row in range(len(out)):
        after = value = torch.zeros((), dtype=out.dtype)
        for t in reversed(batch.mask[row].nonzero()[:, 0].tolist()):
            after = batch.rewards[row, t] + 0.9 * value - batch.values[row, t] + 0.9 * 0.95 * after
            value = batch.values[row, t]
            out[row, t] = after
    return out


def to_go(batch: AdvantageBatch) -> Tensor:
    return batch.rewards.masked_fill(~batch.mask, 0.0).flip(1).cumsum(1).flip(1)


def group_mean(batch: AdvantageBatch) -> Tensor:
    means = torch.stack([batch.scores[batch.groups == g].mean() for g in batch.groups])
    return (batch.scores - means)[:, None].expand_as(batch.rewards)


RIGHT: list[tuple[Kind, object, float]] = [
    ("gae", gae, 0.9),
    ("rewards_to_go", to_go, 1.0),
    ("group_mean", group_mean, 1),
]


@pytest.mark.parametrize(("kind", "estimator", "gamma"), RIGHT)
def test_right_estimators_conform(kind: Kind, estimator: object, gamma: float) -> None:
    assert_advantages_conform(estimator, kind, gamma=gamma)  # type: ignore[arg-type]


def test_rewards_to_go_that_reset_at_tool_tokens_are_found() -> None:
    def resetting(batch: AdvantageBatch) -> Tensor:
        rewards, out = batch.rewards.masked_fill(~batch.mask, 0.0), torch.zeros_like(batch.rewards)
        for t in reversed(range(out.shape[1])):
            after = out[:, t + 1] if t + 1 < out.shape[1] else torch.zeros_like(out[:, 0])
            out[:, t] = (rewards[:, t] + after) * batch.mask[:, t]
        return out

    found = {d.what: d for d in check_advantages(resetting, "rewards_to_go")}
    assert found["padded right"].first is None and found["more padding"].first is None
    assert found["tokens that do not count between turns"].first == (0, 0)
    with pytest.raises(AssertionError, match=r"tokens that do not count between turns: .* instead of .* at response 0"):
        assert_advantages_conform(resetting, "rewards_to_go")


def test_values_of_tool_tokens_in_gae_and_junk_are_found() -> None:
    def through_the_mask(batch: AdvantageBatch) -> Tensor:
        out, after = torch.zeros_like(batch.values), torch.zeros(len(batch.values), dtype=batch.values.dtype)
        values = torch.cat([batch.values, torch.zeros_like(batch.values[:, :1])], 1)
        for t in reversed(range(out.shape[1])):
            delta = batch.rewards[:, t] + 0.9 * values[:, t + 1] - values[:, t]
            after = (delta + 0.9 * 0.95 * after) * batch.mask[:, t]
            out[:, t] = after
        return out

    found = {d.what: d for d in check_advantages(through_the_mask, "gae", gamma=0.9)}
    assert found["padded left"].first is None and found["tokens that do not count between turns"].first is not None
    assert (
        found["NaN and infinities under the mask"].describe().startswith("NaN and infinities under the mask: not fin")
    )


def test_the_example_runs() -> None:
    found = doctest.testmod(import_module("ppo_repro.testing.advantages"))
    assert found.attempted and not found.failed
