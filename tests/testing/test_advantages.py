"""`check_advantages` finds what a layout changes in an estimator and at which token, and nothing where nothing does."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from torch import Tensor

from ppo_repro.base.errors import UserError
from ppo_repro.testing import PaddedAdvantageBatch, advantages, check_advantages
from ppo_repro.testing.advantages import Kind


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


def of_groups(batch: PaddedAdvantageBatch, kind: str, alone: Tensor | None) -> Tensor:
    """As verl, whose mean and std of one score are 0 and 1; without `alone` torch's, of which the std is NaN."""
    found = torch.empty_like(batch.scores)
    for i, (score, group) in enumerate(zip(batch.scores, batch.groups, strict=True)):
        peers = batch.scores[batch.groups == group]
        mean, std = peers.mean(), peers.std()
        if len(peers) == 1 and alone is not None:
            mean, std = alone
        found[i] = score - mean if kind == "group_mean" else (score - mean) / (std + 1e-6)
    return found[:, None].expand(batch.mask.shape)


@pytest.mark.parametrize("kind", ["group_mean", "group_normalised"])
@pytest.mark.filterwarnings("ignore:std")
def test_the_only_response_of_a_group_may_have_the_advantage_of_verl(kind: Kind) -> None:
    def check(alone: Tensor | None) -> dict[str, str]:
        return check_advantages(lambda batch: of_groups(batch, kind, alone), kind, divisor="n - 1")

    assert check(torch.tensor([0.0, 1.0])) == {}
    assert ("nan instead of 0" in str(check(None))) == (kind == "group_normalised")
    assert check(torch.tensor([0.5, 1.0])), "another mean is found"
    assert check_advantages(lambda batch: batch.scores[:, None].expand(batch.mask.shape), kind), "in larger groups"


@pytest.mark.parametrize("options", [{"kind": "rloo"}, {"kind": "group_normalised", "divisor": "n-1"}])
def test_a_formula_that_does_not_exist_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"must be one of 'gae'|must be one of 'n', 'n - 1'"):
        check_advantages(lambda batch: batch.rewards, **options)


def test_the_example_runs() -> None:
    found = doctest.testmod(advantages)
    assert found.attempted
    assert not found.failed
