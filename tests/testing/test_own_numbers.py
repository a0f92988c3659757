"""Every check of `ppo_repro.testing`, on what the loop itself computes: one name, one formula."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor

import ppo_repro.testing
from ppo_repro.ppo import advantages
from ppo_repro.ppo.objectives import Clip, probability_ratios
from ppo_repro.records import reader
from ppo_repro.testing import LossBatch, PaddedAdvantageBatch, check_advantages, check_loss

CLIP = Clip(low=0.2, high=0.2)


def gae(batch: PaddedAdvantageBatch) -> Tensor:
    """The loop's, on the tokens that count."""
    lengths = batch.mask.sum(1)
    rewards, values = (x[batch.mask].to(torch.float32) for x in (batch.rewards, batch.values))
    found = torch.zeros_like(batch.values)
    found[batch.mask] = advantages.gae(rewards, values, lengths, torch.zeros(len(lengths)), 0.9, 0.95).to(found.dtype)
    return found


def group(batch: PaddedAdvantageBatch, scale: bool) -> Tensor:
    found = advantages.group_advantages(batch.scores.tolist(), batch.groups.tolist(), scale)
    return torch.tensor(found, dtype=batch.rewards.dtype)[:, None].expand_as(batch.rewards)


def test_the_advantages_of_the_loop_are_their_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_advantages(lambda batch: group(batch, True), "group_normalised") == {}
    assert check_advantages(lambda batch: group(batch, False), "group_mean") == {}
    monkeypatch.setitem(ppo_repro.testing.advantages.TOLERANCE, torch.float64, 1e-6)  # the loop's are float32
    assert check_advantages(gae, "gae", gamma=0.9) == {}
    assert check_advantages(gae, "gae", gamma=0.8) != {}, "the control"


def in_torch(batch: PaddedAdvantageBatch, epsilon: float) -> Tensor:
    """As TRL (1e-4) and verl (1e-6) divide: torch.std has n - 1."""
    found = torch.zeros_like(batch.scores)
    for g in batch.groups.unique():
        scores = batch.scores[batch.groups == g]
        spread = scores.std() if len(scores) > 1 else torch.zeros(())
        found[batch.groups == g] = (scores - scores.mean()) / (spread + epsilon)
    return found[:, None].expand_as(batch.rewards)


def test_the_divisor_and_epsilon_of_other_frameworks_are_said_and_theirs_alone() -> None:
    for epsilon in (1e-4, 1e-6):
        theirs = partial(in_torch, epsilon=epsilon)
        assert check_advantages(theirs, "group_normalised", divisor="n - 1", epsilon=epsilon) == {}
        assert check_advantages(theirs, "group_normalised") != {}
    theirs = partial(in_torch, epsilon=1e-4)
    assert check_advantages(theirs, "group_normalised", divisor="n - 1", epsilon=1e-6) != {}


def frame_of(run_dir: Path) -> pd.DataFrame:
    """The first minibatch of the last epoch of an iteration, as the loss of the loop reads it."""
    updates = reader.read_table("updates", run_dir, iterations=[1])
    updates = updates[(updates["epoch"] == updates["epoch"].max()) & (updates["minibatch"] == 0)]
    tokens = reader.read_table("tokens", run_dir, iterations=[1])
    both = updates.merge(tokens, on=["sequence", "position"])
    return both[["sequence", "position", "new_logprobs", "rollout_logprobs", "advantages", "surrogates"]]


def surrogate(batch: LossBatch) -> Tensor:
    """The loop's clipped surrogate: the mean over the tokens of the step."""
    new = batch.new_logprobs[batch.mask]
    old, advantage = (batch.columns[name][batch.mask] for name in ("rollout_logprobs", "advantages"))
    losses = CLIP.surrogates(probability_ratios(new, old), advantage, new)
    return losses.to(torch.float64).sum() / batch.step_tokens


def test_the_loss_of_the_loop_follows_from_the_tokens_that_count(deterministic_run: Path) -> None:
    frame = frame_of(deterministic_run)
    assert len(frame) > 20
    recorded = frame.pop("surrogates")
    new, old, advantage = (torch.tensor(frame[name].to_numpy()) for name in frame.columns[2:])
    found = CLIP.surrogates(probability_ratios(new, old), advantage, new)
    assert found.tolist() == recorded.tolist(), "the objective of the run"
    assert check_loss(surrogate, frame, combine="sum") == {}

    def halves(batch: LossBatch) -> Tensor:
        return surrogate(batch) * batch.step_tokens / batch.mask.sum()

    assert check_loss(halves, frame, combine="mean") != {}, "the control divides by the tokens of a micro-batch"
