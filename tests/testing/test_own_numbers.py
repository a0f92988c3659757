"""`check_loss` on the loss that the loop itself computes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from torch import Tensor

from ppo_repro.ppo.objectives import Clip, probability_ratios
from ppo_repro.records import reader
from ppo_repro.testing import LossBatch, check_loss

CLIP = Clip(low=0.2, high=0.2)


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
