"""The tokens that the CPU computes again when a GPU computes a run; here both are the CPU."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from ppo_repro.base.ranks import ALONE
from ppo_repro.base.watcher import Silent
from ppo_repro.buffers import ForwardPass, Rollout
from ppo_repro.config.files import load_config
from ppo_repro.config.run import RunConfig
from ppo_repro.models.state import TrainState
from ppo_repro.runs.prepare import prepare
from ppo_repro.stages.cross_check import cross_check
from ppo_repro.stages.equal_bits import UnequalBits
from ppo_repro.stages.forward import score_rollout
from ppo_repro.stages.rollout import choose_prompts, roll_out
from tests.support.paths import TINY

Iteration = tuple[RunConfig, TrainState, Rollout, ForwardPass]


@pytest.fixture(scope="module")
def iteration() -> Iteration:
    config = load_config(TINY, ["model.warm_start_steps=5", "rollout.top_p=0.9", "numerics.cross_check=7"])
    prepared = prepare(config, Silent())
    rollout = roll_out(config, prepared.task, prepared.sampler, choose_prompts(config, prepared.task, 0), ALONE)
    state = prepared.state
    state.cpu_policy = deepcopy(state.policy)
    return config, state, rollout, score_rollout(state, rollout, config, ALONE)


def test_equal_bits_are_counted(iteration: Iteration) -> None:
    config, state, rollout, forward = iteration
    for parameter in state.cpu_policy.parameters():  # type: ignore[union-attr]  # it takes the policy's weights
        parameter.data.zero_()
    before = state.cross_checked
    cross_check(config, state, rollout, forward, ALONE)
    assert state.cross_checked - before == 7


def test_all_tokens_are_computed_where_there_are_few(iteration: Iteration) -> None:
    config, state, rollout, forward = iteration
    before = state.cross_checked
    every = config.model_copy(update={"numerics": config.numerics.model_copy(update={"cross_check": 10_000})})
    cross_check(every, state, rollout, forward, ALONE)
    assert state.cross_checked - before == len(rollout.response_ids)


def test_one_flipped_bit_ends_the_run(iteration: Iteration) -> None:
    config, state, rollout, forward = iteration
    flipped = (forward.old_logprobs.view(torch.int32) ^ 1).view(torch.float32)
    with pytest.raises(UnequalBits, match=r"old_logprobs .*, cpu_logprobs .*; 7 of 7 tokens differ"):
        cross_check(config, state, rollout, replace(forward, old_logprobs=flipped), ALONE)
