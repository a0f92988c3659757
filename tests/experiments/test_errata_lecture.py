"""A lecture's claims about PPO, run: its program, its advice on the clip range, its adaptive clip range."""

from __future__ import annotations

import math

import pytest
import torch

from experiments.errata.lecture_cartpole import (
    Printed,
    run_as_printed,
    update_ratios,
    values_for_gae,
)
from tests.support.float32 import tensor


def test_the_printed_program_makes_500_steps_and_no_update() -> None:
    assert run_as_printed() == Printed(env_steps=500, updates=0, last_50_return=0.0, learned=False)


def test_with_a_limit_for_each_episode_the_same_loop_does_step_on() -> None:
    """The control: the counter is the cause. A limit no one reaches leaves 60 episodes of 9 steps at least."""
    found = run_as_printed(episodes=60, max_steps=100_000, update_every=10**9)
    assert found.env_steps > 500 and found.last_50_return >= 8


def test_the_update_it_never_reaches_would_end_in_an_error() -> None:
    with pytest.raises(RuntimeError, match="dimension"):
        run_as_printed(update_every=64)
    with pytest.raises(RuntimeError):
        values_for_gae([torch.zeros(1, 1)] * 8, torch.zeros(1, 1))


def test_behind_the_error_every_step_meets_every_other() -> None:
    logprobs = [-0.1 * k for k in range(1, 9)]
    found = update_ratios(tensor(logprobs), [tensor([x]) for x in logprobs])
    assert found.shape == (8, 8)
    # of 64 ratios the 8 that were meant are 1, and the others compare different steps
    assert int((found == 1).sum()) == 8 and found[0, 7].item() == pytest.approx(math.exp(0.1 - 0.8), rel=1e-6)
